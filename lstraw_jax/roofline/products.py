"""What the products with a weight cost one device.

A weight W [in, out] meets the rows x of the device's tokens:

    forward      y = x W          2 rows in out FLOP
    again        the same, if a backward pass needs y
    backward     dx = dy W^T      2 rows in out FLOP
                 dW = x^T dy      the same, if W is trained

A frozen weight has no gradient; the factors A [in, r] and B [r, out] of its
adapter are two more weights, which are trained. Each product reads its operands
and writes its result once.

At rest a weight lies in parts (ZeRO-3). A forward gathers it, as wide as
activations are, and so does a backward; its gradient is reduced and scattered.
"""

from typing import Literal, NamedTuple

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced
from lstraw_jax.roofline.widths import widths


class Matrix(NamedTuple):
  """A weight as a device uses it: all of it, or its part of one axis."""

  d_in: int
  d_out: int
  trained: bool
  stored_bytes: int  # of an element at rest
  used_bytes: int  # of one in products, of their operands and results too
  parts: int  # that it is gathered from
  replicas: int  # devices whose gradients are added up
  cut: Literal["in", "out"] | None = None  # the axis that it is a part of
  cut_over: int = 1  # devices that have the other parts
  again: bool = True  # whether a backward pass needs the product again
  constant: bool = False  # no gradient reaches its product, which is done once
  copies: int = 1  # like weights on the device: experts
  rows_per_token: int = 1  # products of a token with them

  @property
  def size(self) -> int:
    """Elements of all copies."""
    return self.copies * self.d_in * self.d_out


def linear(
    name: str,
    d_in: int,
    d_out: int,
    workload: Workload,
    *,
    cut: Literal["in", "out"] | None = None,
    again: bool = True,
) -> list[Matrix]:
  """Returns the weight of a linear layer, and its adapter's factors.

  Args:
    name: of the layer, as in `LoraConfig.targets`.
    d_in: of the whole weight.
    d_out: the same.
    workload: the sizes.
    cut: the axis that lies over `tensor`.
    again: whether a backward pass needs the layer's result.
  """
  shards = workload.data * workload.context
  parts = workload.tensor if cut else 1
  matrix = Matrix(
      d_in=d_in // parts if cut == "in" else d_in,
      d_out=d_out // parts if cut == "out" else d_out,
      trained=workload.model.lora is None,
      stored_bytes=widths(workload.model).param,
      used_bytes=widths(workload.model).narrow,
      parts=shards,
      replicas=shards,
      cut=cut,
      cut_over=parts,
      again=again,
  )
  return [matrix, *adapter(name, matrix, workload)]


def adapter(name: str, matrix: Matrix, workload: Workload) -> list[Matrix]:
  """Returns the factors A and B of a weight's adapter, if it has one.

  A is cut as the weight's rows are, B as its columns. The one that has the
  model's own axis lies in parts at rest, the other one does not.
  """
  lora = workload.model.lora
  if lora is None or name not in workload.model.adapted:
    return []
  stored = widths(workload.model).trained
  factor = matrix._replace(trained=True, stored_bytes=stored)
  by_rows = matrix.cut == "in"
  a = factor._replace(
      d_out=lora.rank,
      parts=1 if by_rows else matrix.parts,
      cut="in" if by_rows else None,
      again=True,
  )
  b = factor._replace(
      d_in=lora.rank,
      parts=matrix.parts if by_rows else 1,
      cut=None if by_rows else matrix.cut,
  )
  return [a, b]


def product_cost(
    matrix: Matrix,
    *,
    tokens: int,
    calls: int,
    pulled_back: bool,
) -> StageCost:
  """Counts the products with a weight in some segments.

  Args:
    matrix: the weight.
    tokens: that the device has in each call.
    calls: number of forwards that use the weight.
    pulled_back: whether each of them is done again and pulled back.
  """
  width = matrix.used_bytes
  pulled_back = pulled_back and not matrix.constant
  products = 1 + pulled_back * (matrix.again + 1 + matrix.trained)
  uses = calls * (1 + pulled_back)
  rows = calls * tokens * matrix.rows_per_token
  touched = rows * (matrix.d_in + matrix.d_out) + calls * matrix.size
  return StageCost(
      flops=products * 2 * rows * matrix.d_in * matrix.d_out,
      memory_bytes=width * products * touched + uses * _staged(matrix),
      collective_bytes=uses * gathered(width * matrix.size, matrix.parts)
      + calls * pulled_back * gradient_received(matrix)
      + _partial_sums(matrix, width * rows, pulled_back),
  )


def _staged(matrix: Matrix) -> float:
  """Bytes read at rest and written for use; none if it is used as it rests."""
  if matrix.parts == 1 and matrix.stored_bytes == matrix.used_bytes:
    return 0
  element = matrix.stored_bytes / matrix.parts + matrix.used_bytes
  return matrix.size * element


def gradient_received(matrix: Matrix) -> float:
  """Returns the bytes received to add up the gradient of a segment.

  It ends in parts, as the weight does at rest, or whole on every device.
  """
  if not matrix.trained:
    return 0
  received = gathered if matrix.parts == matrix.replicas else reduced
  return received(matrix.used_bytes * matrix.size, matrix.replicas)


def _partial_sums(matrix: Matrix, row_bytes: int, pulled_back: bool) -> float:
  """With a part of the rows y is a partial sum, with one of the columns dx."""
  sums = {
      None: 0,
      "in": (1 + pulled_back * matrix.again) * matrix.d_out,
      "out": pulled_back * matrix.d_in,
  }
  return reduced(row_bytes * sums[matrix.cut], matrix.cut_over)

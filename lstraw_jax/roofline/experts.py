"""What a mixture of experts costs one device: its weights, and the exchange."""

from typing import NamedTuple

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced
from lstraw_jax.roofline.products import Matrix, adapter
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.widths import widths
from modeling.expert_exchange import SLACK


class Mixture(NamedTuple):
  """Sizes of the routed experts of a layer."""

  experts: int
  per_token: int  # that are chosen
  size: int  # columns of gate and of up


def expert_matrices(
    mixture: Mixture, workload: Workload, target: Target
) -> list[Matrix]:
  """Returns gate_up_proj and down_proj of the experts of a device.

  Experts lie over `context`, so that `data` alone holds parts of each of them.
  Gate and up have an adapter each.
  """
  model = workload.model
  inner = mixture.size // workload.tensor
  gate_up = Matrix(
      d_in=model.hidden_size,
      d_out=2 * inner,
      trained=model.lora is None,
      stored_bytes=widths(model).param,
      used_bytes=widths(model).narrow,
      parts=workload.data,
      replicas=workload.data,
      copies=mixture.experts // workload.context,
      rows_per_token=_rows_per_token(mixture, workload, target),
  )
  down = gate_up._replace(d_in=inner, d_out=model.hidden_size)
  half = gate_up._replace(d_out=inner)
  # What lies in parts is the model's own axis: the rows of down's A are not.
  return [
      gate_up,
      down,
      *2 * adapter("experts", half, workload),
      *adapter("experts", down._replace(cut="in"), workload),
  ]


def _rows_per_token(
    mixture: Mixture, workload: Workload, target: Target
) -> int:
  """Products of a token with an expert: one for each that is chosen.

  But on a CPU jax multiplies every row that a round has room for with every
  expert of the device.
  """
  if target.platform != "cpu":
    return mixture.per_token
  held = mixture.experts // workload.context
  return mixture.per_token * held * _room(workload)


def exchange_cost(
    mixture: Mixture, segments: Segments, workload: Workload
) -> StageCost:
  """Counts rows sent to their experts and back, in one round with all its room.

  A backward does the round again, and then its transpose. Over `tensor` each
  device has a part of every expert: sums, and later dx, are added up; and the
  columns of [gate | up] are cut anew, for those of a device to belong together.
  """
  model = workload.model
  narrow, wide, *_ = widths(model)
  pulled = segments.pulled_back
  tokens = segments.tokens // workload.context
  rows = tokens * mixture.per_token * _room(workload)
  trips, numbers = 2 * (1 + 2 * pulled), 1 + pulled
  row_bytes = trips * narrow * model.hidden_size + numbers * 4
  sums = tokens * model.hidden_size * (wide + pulled * narrow)
  held = mixture.experts // workload.context
  columns = 2 * mixture.size // workload.tensor
  weight = narrow * held * model.hidden_size * columns
  cuts = 1 + pulled * (1 + (model.lora is None))
  received = gathered(rows * row_bytes, workload.context)
  received += reduced(sums, workload.tensor)
  received += cuts * gathered(weight, workload.tensor)
  return StageCost(collective_bytes=received).repeated(segments.count)


def _room(workload: Workload) -> int:
  """Returns the rows that a round has room for, in balanced loads."""
  return min(SLACK, workload.context)

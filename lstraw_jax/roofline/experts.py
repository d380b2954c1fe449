"""What a mixture of experts costs one device: its weights, and the exchange."""

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced
from lstraw_jax.roofline.products import Matrix
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.widths import widths
from modeling.expert_exchange import SLACK
from modeling.qwen3_5_config import MoeConfig


def expert_matrices(workload: Workload, target: Target) -> list[Matrix]:
  """Returns gate_up_proj and down_proj of the experts of a device.

  Experts lie over `context`, so that `data` alone holds parts of each of them.
  """
  model, moe = workload.model, _moe(workload)
  inner = moe.moe_intermediate_size // workload.tensor
  gate_up = Matrix(
      d_in=model.hidden_size,
      d_out=2 * inner,
      trained=model.lora is None,
      stored_bytes=widths(model).param,
      parts=workload.data,
      replicas=workload.data,
      copies=moe.num_experts // workload.context,
      rows_per_token=_rows_per_token(workload, target),
  )
  return [gate_up, gate_up._replace(d_in=inner, d_out=model.hidden_size)]


def _rows_per_token(workload: Workload, target: Target) -> int:
  """Products of a token with an expert: one for each that is chosen.

  But on a CPU jax multiplies every row that a round has room for with every
  expert of the device.
  """
  moe = _moe(workload)
  if target.platform != "cpu":
    return moe.num_experts_per_tok
  held = moe.num_experts // workload.context
  return moe.num_experts_per_tok * held * _room(workload)


def exchange_cost(segments: Segments, workload: Workload) -> StageCost:
  """Counts rows sent to their experts and back, in one round with all its room.

  A backward does the round again, and then its transpose. Over `tensor` each
  device has a part of every expert: sums, and later dx, are added up; and the
  columns of [gate | up] are cut anew, for those of a device to belong together.
  """
  model, moe = workload.model, _moe(workload)
  narrow, wide, *_ = widths(model)
  pulled = segments.pulled_back
  tokens = segments.tokens // workload.context
  rows = tokens * moe.num_experts_per_tok * _room(workload)
  trips, numbers = 2 * (1 + 2 * pulled), 1 + pulled
  row_bytes = trips * narrow * model.hidden_size + numbers * 4
  sums = tokens * model.hidden_size * (wide + pulled * narrow)
  held = moe.num_experts // workload.context
  columns = 2 * moe.moe_intermediate_size // workload.tensor
  weight = narrow * held * model.hidden_size * columns
  cuts = 1 + pulled * (1 + (model.lora is None))
  received = gathered(rows * row_bytes, workload.context)
  received += reduced(sums, workload.tensor)
  received += cuts * gathered(weight, workload.tensor)
  return StageCost(collective_bytes=received).repeated(segments.count)


def _room(workload: Workload) -> int:
  """Returns the rows that a round has room for, in balanced loads."""
  return min(SLACK, workload.context)


def _moe(workload: Workload) -> MoeConfig:
  assert workload.model.moe is not None, "called for mixtures of experts only"
  return workload.model.moe

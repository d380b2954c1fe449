"""What it takes to have all queries meet the keys of each device (pass-Q)."""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.widths import widths


def pass_q_cost(
    segments: Segments, workload: Workload, *, query_dim: int, out_dim: int
) -> StageCost:
  """Counts queries gathered, and outputs merged by a reduce-scatter.

  Outputs and log-sum-exps are wide; before, the largest log-sum-exp of each
  query is found. A transpose sends what its forward does, but for that.

  Args:
    segments: whose queries.
    workload: the sizes.
    query_dim: of a head's query.
    out_dim: of its output.
  """
  model, shards = workload.model, workload.context
  narrow, wide, *_ = widths(model)
  rows = segments.tokens * model.num_attention_heads // workload.tensor
  sent = gathered(rows * (query_dim * narrow + (out_dim + 1) * wide), shards)
  peaks = reduced(rows * wide, shards)
  pulled = segments.pulled_back
  received = (1 + 2 * pulled) * sent + (1 + pulled) * peaks
  return StageCost(collective_bytes=received).repeated(segments.count)

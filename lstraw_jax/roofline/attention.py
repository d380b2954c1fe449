"""What full attention costs one device beside the products with its weights."""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced, total
from lstraw_jax.roofline.segments import Keys, Segments
from lstraw_jax.roofline.widths import widths


def attention_cost(segments: Segments, workload: Workload) -> StageCost:
  """Counts one layer of pass-Q: all queries meet the keys of the device."""
  over_keys = (_over_keys(keys, segments, workload) for keys in segments.keys)
  return total([*over_keys, _merged(segments, workload)])


def _over_keys(keys: Keys, segments: Segments, workload: Workload) -> StageCost:
  """Counts what a set of keys costs.

      2 T H/t K FLOP a product and key scored, t = tensor

  Forward: scores, output. Backward: both again, then scores, d weights, dq, and
  dk, dv unless the keys are constants. Each pass reads queries, keys and
  values, and writes outputs; a backward moves the cotangents of queries and
  outputs too, and reads and writes the sums of keys' and values'. What lies in
  host memory passes through the device's.
  """
  model, pulled = workload.model, segments.pulled_back
  narrow, wide, *_ = widths(model)
  heads = model.num_attention_heads // workload.tensor
  row = segments.tokens * heads * model.head_dim
  products = 2 * (1 + pulled) + pulled * (5 if keys.sum_bytes else 3)
  queries = (1 + 3 * pulled) * segments.count * row * (narrow + wide)
  slot = 2 * (model.num_key_value_heads // workload.tensor) * model.head_dim
  slot_bytes = (1 + 2 * pulled) * narrow + pulled * 2 * keys.sum_bytes
  moved = keys.read * slot * slot_bytes
  return StageCost(
      flops=products * 2 * row * keys.scored,
      memory_bytes=queries + (2 * moved if keys.on_host else moved),
      host_bytes=moved if keys.on_host else 0,
  )


def _merged(segments: Segments, workload: Workload) -> StageCost:
  """Counts queries gathered, and outputs merged by a reduce-scatter.

  Outputs and log-sum-exps are wide; before, the largest log-sum-exp of each
  query is found. A transpose sends what its forward does, but for that.
  """
  model, shards = workload.model, workload.context
  narrow, wide, *_ = widths(model)
  rows = segments.tokens * model.num_attention_heads // workload.tensor
  sent = gathered(rows * (model.head_dim * (narrow + wide) + wide), shards)
  peaks = reduced(rows * wide, shards)
  pulled = segments.pulled_back
  received = (1 + 2 * pulled) * sent + (1 + pulled) * peaks
  return StageCost(collective_bytes=received).repeated(segments.count)

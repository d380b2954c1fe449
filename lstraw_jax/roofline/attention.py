"""What full attention costs one device beside the products with its weights."""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, total
from lstraw_jax.roofline.pass_q import pass_q_cost
from lstraw_jax.roofline.segments import Keys, Segments
from lstraw_jax.roofline.widths import widths
from modeling.qwen3_5_config import Qwen3_5Config
from pallas_kernels.prefix_attention import KEY_BLOCK


def attention_cost(
    model: Qwen3_5Config, segments: Segments, workload: Workload
) -> StageCost:
  """Counts one layer of pass-Q: all queries meet the keys of the device."""
  over_keys = (
      _over_keys(model, keys, segments, workload) for keys in segments.keys
  )
  size = model.head_dim
  merged = pass_q_cost(segments, workload, query_dim=size, out_dim=size)
  return total([*over_keys, merged])


def keys_read(keys: Keys) -> int:
  """Returns how many a device reads, summed over the segments.

  A block is read before it is known whether a query sees it: those of all slots
  are, filled or not.
  """
  return len(keys.seen) * keys.in_blocks(keys.room, KEY_BLOCK)


def keys_scored(keys: Keys) -> int:
  """Returns how many it scores: those of blocks that a query sees."""
  return sum(keys.in_blocks(filled, KEY_BLOCK) for filled in keys.filled)


def _over_keys(
    model: Qwen3_5Config, keys: Keys, segments: Segments, workload: Workload
) -> StageCost:
  """Counts what a set of keys costs.

      2 T H/t K FLOP a product and key scored, t = tensor

  Forward: scores, output. Backward: both again, then scores, d weights, dq, and
  dk, dv unless the keys are constants. Each pass reads queries, keys and
  values, and writes outputs; a backward moves the cotangents of queries and
  outputs too, and reads and writes the sums of keys' and values'. What lies in
  host memory passes through the device's.
  """
  pulled = segments.pulled_back
  narrow, wide, *_ = widths(model)
  heads = model.num_attention_heads // workload.tensor
  row = segments.tokens * heads * model.head_dim
  products = 2 * (1 + pulled) + pulled * (5 if keys.sum_bytes else 3)
  queries = (1 + 3 * pulled) * segments.count * row * (narrow + wide)
  slot = 2 * (model.num_key_value_heads // workload.tensor) * model.head_dim
  slot_bytes = (1 + 2 * pulled) * narrow + pulled * 2 * keys.sum_bytes
  moved = keys_read(keys) * slot * slot_bytes
  return StageCost(
      flops=products * 2 * row * keys_scored(keys),
      memory_bytes=queries + (2 * moved if keys.on_host else moved),
      host_bytes=moved if keys.on_host else 0,
  )

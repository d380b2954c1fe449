"""What Gated DeltaNet costs one device beside the products with its weights.

Where `tensor` x `context` divides the heads, a device has all tokens of a
segment for some heads: convolution inputs, gates and outputs are exchanged, all
to all. Elsewhere it has its own tokens for the heads of its part of `tensor`,
the state's transition [K, K] as more value columns, and shards hand maps on.
"""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.widths import widths
from modeling.qwen3_5_config import Qwen3_5Config

_CHUNK = 64  # these are of pallas_kernels/gated_delta_rule/xla.py
_SMALL = 8


def delta_cost(
    model: Qwen3_5Config, segments: Segments, workload: Workload
) -> StageCost:
  """Counts one layer.

  A backward takes two products for each of the forward, which is done again;
  for the inverse of a chunk, C x C, it takes two in all. Each pass moves
  queries, keys, values and outputs of all value heads, in float32, once; a
  backward moves their cotangents too.
  """
  pulled = segments.pulled_back
  keys, values = model.linear_key_head_dim, model.linear_value_head_dim
  if spread(model, workload):
    tokens, columns, maps = segments.tokens, values, 0
    sent = _exchanged(model, segments, workload)
  else:
    tokens = segments.tokens // workload.context
    columns, maps = values + keys, _map_flops(model, workload)
    sent = _handed_on(model, workload)
  size, chunks = _chunks(tokens)
  reads = 2 * tokens * keys * values if maps else 0
  products = chunks * _chunk_flops(size, keys, columns) + maps + reads
  flops = (1 + 3 * pulled) * products
  flops += chunks * ((1 + pulled) * _inverse_flops(size) + pulled * 4 * size**3)
  row_bytes = 2 * (keys + values) * widths(model).wide
  heads = heads_of_a_device(model, workload)
  received = sent + _cut_anew(model, segments, workload)
  return StageCost(
      flops=heads * flops,
      memory_bytes=(1 + 3 * pulled) * heads * tokens * row_bytes,
      collective_bytes=(1 + 2 * pulled) * received,
  ).repeated(segments.count)


def spread(model: Qwen3_5Config, workload: Workload) -> bool:
  """Whether the heads lie over `context` too."""
  shards = workload.tensor * workload.context
  return model.linear_num_key_heads % shards == 0


def heads_of_a_device(model: Qwen3_5Config, workload: Workload) -> int:
  """Returns the number of its value heads."""
  over_context = workload.context if spread(model, workload) else 1
  return model.linear_num_value_heads // (workload.tensor * over_context)


def _chunks(tokens: int) -> tuple[int, int]:
  """Returns the tokens of a chunk and the number of chunks."""
  size = min(_CHUNK, 1 << (tokens - 1).bit_length())
  return size, -(-tokens // size)


def _chunk_flops(size: int, keys: int, values: int) -> int:
  """Products of a head's chunk of C tokens, but for the inverse A^-1.

  K K^T, Q K^T and A^-1 K are 2 C^2 K each, A^-1 V and scores N are 2 C^2 V, and
  W S, Q S and K^T N are 2 C K V.
  """
  inside = 2 * size**2 * (3 * keys + 2 * values)
  return inside + 3 * 2 * size * keys * values


def _inverse_flops(size: int) -> int:
  """Four products of each 8 x 8 block, then two for each pair of blocks."""
  block = min(size, _SMALL)
  flops = size // block * 4 * 2 * block**3
  while block < size:
    flops += size // (2 * block) * 2 * 2 * block**3
    block *= 2
  return flops


def _hops(workload: Workload) -> int:
  return (workload.context - 1).bit_length()


def _map_flops(model: Qwen3_5Config, workload: Workload) -> int:
  """Maps of a head applied to a state at each hop, composed at all but one."""
  hops = _hops(workload)
  keys, values = model.linear_key_head_dim, model.linear_value_head_dim
  applied = (1 + hops) * 2 * keys**2 * values
  return applied + max(hops - 1, 0) * 2 * keys**3


def _handed_on(model: Qwen3_5Config, workload: Workload) -> float:
  """Bytes of states and transitions handed on, and of the last state's sum."""
  hops = _hops(workload)
  keys, values = model.linear_key_head_dim, model.linear_value_head_dim
  states = (hops + 1) * keys * values
  transitions = max(hops - 1, 0) * keys**2
  summed = reduced(keys * values, workload.context)
  width = widths(model).wide * heads_of_a_device(model, workload)
  return width * (states + transitions + summed) if hops else 0.0


def _exchanged(
    model: Qwen3_5Config, segments: Segments, workload: Workload
) -> float:
  """Bytes of convolution inputs, two gates and outputs, tokens for heads."""
  narrow, wide, *_ = widths(model)
  values = model.linear_num_value_heads * (model.linear_value_head_dim + 2)
  token = narrow * model.conv_channels + wide * values
  share = segments.tokens * token / workload.context / workload.tensor
  return gathered(share, workload.context)


def _cut_anew(
    model: Qwen3_5Config, segments: Segments, workload: Workload
) -> float:
  """Bytes of [q | k | v], whose columns come over `tensor` as they stand."""
  if workload.tensor == 1:
    return 0.0
  narrow, channels = widths(model).narrow, model.conv_channels
  share = segments.tokens / workload.context / workload.tensor
  return narrow * share * channels

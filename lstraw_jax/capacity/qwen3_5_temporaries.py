"""The largest arrays that a segment makes in Qwen3.5."""

from typing import NamedTuple

import numpy as np

from lstraw_jax.capacity.segment_arrays import (
    Segment,
    exchange_bytes,
    made_bytes,
    table_bytes,
)
from lstraw_jax.capacity.workload import Workload
from modeling.qwen3_5_config import Qwen3_5Config
from pallas_kernels.prefix_attention import KEY_BLOCK
from pallas_kernels.shapes import wide_dtype


class _Arrays(NamedTuple):
  """Bytes on a device of the largest arrays, or how often each is counted."""

  scores: float  # of attention to one block of keys [T, H, 512], float32
  delta: float  # one operand of the delta rule [T, U, V], float32
  exchange: float  # tokens sent to experts [rows, D]
  layer: float  # gathered weights of one layer
  stacks: float  # this device's weights of all full layers
  table: float  # the embedding, and the head, if they are cast


_FORWARD = _Arrays(
    scores=0.5, delta=12.4, exchange=25.0, layer=3.5, stacks=0.8, table=0.8
)
_BACKWARD = _Arrays(
    scores=0.3, delta=49.0, exchange=54.0, layer=6.0, stacks=0.4, table=0.0
)


def qwen3_5_arrays(
    model: Qwen3_5Config, workload: Workload, segment: Segment
) -> float:
  """Returns the bytes of all of them, each as often as it is counted."""
  sizes = _sizes(model, workload, segment)
  return float(np.dot(sizes, _BACKWARD if segment.backward else _FORWARD))


def _sizes(
    model: Qwen3_5Config, workload: Workload, segment: Segment
) -> _Arrays:
  shards = workload.data * workload.context
  itemsize = model.activation_dtype.itemsize
  wide = wide_dtype(model.dtype).itemsize
  tokens, tensor = segment.tokens, workload.tensor
  per_token = 0 if model.moe is None else model.moe.num_experts_per_tok
  weights = _mixer_weights(model) + _feed_forward_weights(model, workload)
  return _Arrays(
      scores=tokens * model.num_attention_heads * KEY_BLOCK * wide / tensor,
      delta=_delta_values(model, workload, tokens) * wide,
      exchange=exchange_bytes(workload, segment, per_token=per_token),
      layer=weights / tensor * made_bytes(workload, shards=shards),
      stacks=model.num_blocks
      * weights
      / (tensor * shards)
      * (itemsize if shards > 1 else 0),
      table=table_bytes(workload),
  )


def _mixer_weights(model: Qwen3_5Config) -> int:
  """Returns the weights of attention or Gated DeltaNet, whichever is more."""
  queries = model.num_attention_heads * model.head_dim
  keys = model.num_key_value_heads * model.head_dim
  values = model.linear_num_value_heads * model.linear_value_head_dim
  linear_keys = model.linear_num_key_heads * model.linear_key_head_dim
  return model.hidden_size * max(
      3 * queries + 2 * keys, 2 * linear_keys + 3 * values
  )


def _feed_forward_weights(model: Qwen3_5Config, workload: Workload) -> float:
  """Returns those of a layer; a device has its part of the experts."""
  inner = model.intermediate_size or 0
  if model.moe is not None:
    experts = model.moe.num_experts / workload.context
    inner = experts * model.moe.moe_intermediate_size
    inner += model.moe.shared_expert_intermediate_size
  return 3 * model.hidden_size * inner


def _delta_values(
    model: Qwen3_5Config, workload: Workload, tokens: int
) -> float:
  """Returns the numbers of one operand: of a part of the heads, or tokens."""
  values = model.linear_num_value_heads * model.linear_value_head_dim
  return tokens * values / (workload.context * workload.tensor)

"""What a stage's program needs beside its arguments and results, estimated.

The compiler decides that. What it decides on are the largest arrays that a
segment makes; each is counted as often as fits the programs compiled for GPUs
best. The sum is good to about a third, and a small part of the whole
(`docs/capacity.md` has the comparison, and its commands).
"""

from typing import NamedTuple

import numpy as np

from lstraw_jax.capacity.kept_bytes import KeptBytes
from lstraw_jax.capacity.workload import Workload
from modeling.decoder_config import DecoderConfig
from modeling.expert_exchange import SLACK
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
  gradients: float  # of all trained weights, before they are added


_FORWARD = _Arrays(
    scores=0.5,
    delta=12.4,
    exchange=25.0,
    layer=3.5,
    stacks=0.8,
    table=0.8,
    gradients=0.0,
)
_BACKWARD = _Arrays(
    scores=0.3,
    delta=49.0,
    exchange=54.0,
    layer=6.0,
    stacks=0.4,
    table=0.0,
    gradients=1.06,
)


def temporaries(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """Returns the estimated bytes per device of a stage's temporaries."""
  if stage == "optimizer":
    return 0  # it works in place, weight by weight
  over_chunks = stage in ("capture", "prompt_gradient")
  tokens = workload.chunk_tokens
  if not over_chunks:
    tokens = workload.block_tokens
  sizes = _sizes(workload, tokens, kept)
  backward = stage in ("replay", "prompt_gradient")
  return int(np.dot(sizes, _BACKWARD if backward else _FORWARD))


def _sizes(workload: Workload, tokens: int, kept: KeptBytes) -> _Arrays:
  """Returns the bytes of each array for a segment of so many tokens."""
  model, shards = workload.model, workload.data * workload.context
  itemsize = model.activation_dtype.itemsize
  wide = wide_dtype(model.dtype).itemsize
  context, tensor = workload.context, workload.tensor
  # Weights that are cast or cut are made anew in the dtype of activations.
  cast = model.param_dtype != model.dtype
  made = itemsize if cast or shards > 1 else 0
  mixer, feed_forward = _mixer_weights(model), _feed_forward_weights(workload)
  vocabulary = model.vocab_size * model.hidden_size
  tables = 1 if model.tie_word_embeddings else 2
  return _Arrays(
      scores=tokens * model.num_attention_heads * KEY_BLOCK * wide / tensor,
      delta=_delta_values(workload, tokens) * wide,
      exchange=_exchanged(workload, tokens) * itemsize,
      layer=(mixer + feed_forward) / tensor * made,
      stacks=model.num_blocks
      * (mixer + feed_forward)
      / (tensor * shards)
      * (itemsize if shards > 1 else 0),
      table=tables * vocabulary * itemsize / (context * tensor) * cast,
      gradients=kept.gradients,
  )


def _mixer_weights(model: DecoderConfig) -> int:
  """Returns the weights of attention or Gated DeltaNet, whichever is more."""
  queries = model.num_attention_heads * model.head_dim
  keys = model.num_key_value_heads * model.head_dim
  values = model.linear_num_value_heads * model.linear_value_head_dim
  linear_keys = model.linear_num_key_heads * model.linear_key_head_dim
  return model.hidden_size * max(
      3 * queries + 2 * keys, 2 * linear_keys + 3 * values
  )


def _feed_forward_weights(workload: Workload) -> float:
  """Returns those of a layer; a device has its part of the experts."""
  model = workload.model
  inner = model.intermediate_size or 0
  if model.moe is not None:
    experts = model.moe.num_experts / workload.context
    inner = experts * model.moe.moe_intermediate_size
    inner += model.moe.shared_expert_intermediate_size
  return 3 * model.hidden_size * inner


def _delta_values(workload: Workload, tokens: int) -> float:
  """Returns the numbers of one operand: of a part of the heads, or tokens."""
  model = workload.model
  values = model.linear_num_value_heads * model.linear_value_head_dim
  return tokens * values / (workload.context * workload.tensor)


def _exchanged(workload: Workload, tokens: int) -> float:
  model = workload.model
  if model.moe is None:
    return 0
  rows = SLACK * tokens / workload.context * model.moe.num_experts_per_tok
  return rows * model.hidden_size

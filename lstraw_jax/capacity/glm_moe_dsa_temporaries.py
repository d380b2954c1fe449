"""The largest arrays that a segment makes in GLM-5."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from lstraw_jax.capacity.segment_arrays import (
    Segment,
    exchange_bytes,
    made_bytes,
    table_bytes,
)
from lstraw_jax.capacity.workload import Workload
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from pallas_kernels.entries import ENTRY_TILE
from pallas_kernels.index_topk import KEY_TILE
from pallas_kernels.query_tiles import QUERY_TILE
from pallas_kernels.shapes import wide_dtype


class _Arrays(NamedTuple):
  """Bytes on a device of the largest arrays, or how often each is counted."""

  outputs: float  # of attention to one set of latents [T, H, Z], float32
  queries: float  # gathered [T, H, Z + K]
  candidates: float  # of the indexer: score, position and slot [T, J]
  choices: float  # slots that all indexers chose [l, T, J], for a backward
  tiles: float  # gathered latents [64, 128, Z + K]; index scores [64, I, 2048]
  exchange: float  # tokens sent to experts [rows, D]
  run: float  # this device's experts of the layers that share a choice
  layer: float  # gathered weights of one layer
  table: float  # the embedding, and the head, if they are cast


_FORWARD = _Arrays(
    outputs=2.6,
    queries=1.0,
    candidates=2.0,
    choices=0.0,
    tiles=1.5,
    exchange=4.0,
    run=1.0,
    layer=0.5,
    table=0.8,
)
_BACKWARD = _Arrays(
    outputs=5.4,
    queries=4.0,
    candidates=20.0,
    choices=1.0,
    tiles=3.0,
    exchange=8.0,
    run=2.2,
    layer=0.5,
    table=0.0,
)


def glm_moe_dsa_arrays(
    model: GlmMoeDsaConfig, workload: Workload, segment: Segment
) -> float:
  """Returns the bytes of all of them, each as often as it is counted."""
  sizes = _sizes(model, workload, segment)
  counted = np.dot(sizes, _BACKWARD if segment.backward else _FORWARD)
  return float(counted) + _staged_bytes(model, workload, segment)


def _sizes(
    model: GlmMoeDsaConfig, workload: Workload, segment: Segment
) -> _Arrays:
  itemsize = model.activation_dtype.itemsize
  wide = wide_dtype(model.dtype).itemsize
  rows = segment.tokens * model.num_attention_heads
  entries = segment.tokens * _entries(model, workload, segment)
  tile = min(ENTRY_TILE, model.index_topk) * model.latent_dim
  return _Arrays(
      outputs=rows * model.kv_lora_rank * wide,
      queries=rows * model.latent_dim * itemsize,
      candidates=entries * (wide + 4 + 4),
      choices=entries * model.num_indexers * 4,
      tiles=QUERY_TILE * wide * (tile + model.index_n_heads * KEY_TILE),
      exchange=exchange_bytes(
          workload, segment, per_token=model.num_experts_per_tok
      ),
      run=_shared_layers(model) * _expert_bytes(model, workload),
      layer=_layer_bytes(model, workload),
      table=table_bytes(workload),
  )


def _staged_bytes(
    model: GlmMoeDsaConfig, workload: Workload, segment: Segment
) -> float:
  """Returns those of a layer's latents, and their sums, out of host memory."""
  if workload.slots_on_device:
    return 0
  itemsize = model.activation_dtype.itemsize
  if segment.backward and workload.exact:
    narrow = workload.update.cotangent_dtype == "bfloat16"
    itemsize += 2 if narrow else wide_dtype(model.dtype).itemsize
  return workload.capacity / workload.context * model.latent_dim * itemsize


def _entries(
    model: GlmMoeDsaConfig, workload: Workload, segment: Segment
) -> int:
  """Returns the candidates of a query on a shard, of all sets of keys."""
  sets = [segment.tokens, workload.capacity]
  if not segment.of_prompt:
    blocks = -(-workload.response_slots // segment.tokens)
    sets.append(blocks * segment.tokens)
  return sum(min(model.index_topk, x // workload.context) for x in sets)


def _shared_layers(model: GlmMoeDsaConfig) -> int:
  """Returns the layers with experts that the largest run stacks."""
  stacked = (
      sum(count for kind, count in group.sharers if kind == "sparse")
      for group in model.groups
  )
  return max(1, *stacked)


def _expert_bytes(model: GlmMoeDsaConfig, workload: Workload) -> float:
  """Returns those of a device's routed experts of a layer, as they lie."""
  experts = model.n_routed_experts / workload.context / workload.data
  weights = 3 * model.hidden_size * model.moe_intermediate_size
  return experts * weights * jnp.dtype(model.param_dtype).itemsize


def _layer_bytes(model: GlmMoeDsaConfig, workload: Workload) -> float:
  """Returns those of one layer as it uses them."""
  heads, hidden = model.num_attention_heads, model.hidden_size
  up = heads * (model.qk_nope_head_dim + model.v_head_dim)
  attention = (
      hidden * (model.q_lora_rank + model.latent_dim)
      + model.q_lora_rank * heads * model.qk_head_dim
      + model.kv_lora_rank * up
      + heads * model.v_head_dim * hidden
  )
  shared = model.n_shared_experts * model.moe_intermediate_size
  feed_forward = 3 * hidden * max(model.intermediate_size, shared)
  experts = model.n_routed_experts / workload.context
  experts *= 3 * hidden * model.moe_intermediate_size
  shards = workload.data * workload.context
  gathered = (attention + feed_forward) * made_bytes(workload, shards=shards)
  return gathered + experts * made_bytes(workload, shards=workload.data)

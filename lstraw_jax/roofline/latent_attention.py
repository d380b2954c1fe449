"""What attention to chosen latents costs one device beside its weights.

The weight of kv_b is counted here too: absorbed into queries and outputs, it
meets each head by itself.
"""

from typing import NamedTuple

import numpy as np

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, total
from lstraw_jax.roofline.pass_q import pass_q_cost
from lstraw_jax.roofline.products import Matrix, linear
from lstraw_jax.roofline.segments import Keys, Segments
from lstraw_jax.roofline.widths import widths
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig


class Chosen(NamedTuple):
  """What queries attend to in one set of latents, on one shard."""

  pairs: float  # of a query and a latent, summed over the segments
  keys: Keys  # the set


def chosen_latents(
    model: GlmMoeDsaConfig, segments: Segments, workload: Workload
) -> list[Chosen]:
  """Returns what is chosen of each set of latents, in expectation.

      min(k, visible) latents a query

  Assumed is that they lie evenly over what the query sees, and so over the
  shards and over the sets. An engine's own choice does not: the shard with most
  of it takes longer.
  """
  own, *stored = segments.keys
  before = np.sum([keys.seen for keys in stored], axis=0)
  own_pairs, stored_pairs = 0.0, np.zeros(len(stored))
  for index, (real, seen) in enumerate(zip(own.seen, before, strict=True)):
    rank = np.arange(1, real + 1)
    share = np.minimum(1, model.index_topk / (seen + rank))
    own_pairs += float((share * rank).sum())
    stored_pairs += share.sum() * np.array([x.seen[index] for x in stored])
  pairs = [own_pairs, *stored_pairs.tolist()]
  return [
      Chosen(count / workload.context, keys)
      for count, keys in zip(pairs, segments.keys, strict=True)
  ]


def latent_attention_cost(
    model: GlmMoeDsaConfig, segments: Segments, workload: Workload
) -> StageCost:
  """Counts one layer of pass-Q: all queries meet latents of the device."""
  over_latents = (
      latents_cost(model, chosen, segments)
      for chosen in chosen_latents(model, segments, workload)
  )
  merged = pass_q_cost(
      segments,
      workload,
      query_dim=model.latent_dim,
      out_dim=model.kv_lora_rank,
  )
  return total([*over_latents, merged])


def latents_cost(
    model: GlmMoeDsaConfig, chosen: Chosen, segments: Segments
) -> StageCost:
  """Counts what a set of latents costs.

      2 H (Z + K) FLOP for a score, or 2 H Z for an output, of each pair

  Forward: scores, output. Backward: both again, then scores, d weights, dq, and
  the gradients of a row as key and as value unless latents are constants. Each
  pass reads a row for each pair, reads queries and writes outputs; a backward
  moves the cotangents of both too, and reads and writes the row's sum for each
  pair. Of what lies in host memory each pass brings a whole layer to the
  device, and a backward takes its sums there and back.
  """
  pulled, keys = segments.pulled_back, chosen.keys
  narrow, wide, *_ = widths(model)
  key, value = model.latent_dim, model.kv_lora_rank
  summed = bool(keys.sum_bytes)
  size = (1 + pulled) * (key + value)
  size += pulled * (2 * key + value + summed * (key + value))
  rows = (1 + 2 * pulled) * narrow + pulled * 2 * keys.sum_bytes
  queries = segments.count * segments.tokens * model.num_attention_heads
  passes = (1 + 3 * pulled) * (key * narrow + value * wide)
  moved = queries * passes + chosen.pairs * rows * key
  staged = len(keys.seen) * keys.room * rows * key if keys.on_host else 0
  return StageCost(
      flops=round(2 * model.num_attention_heads * size * chosen.pairs),
      memory_bytes=moved + staged,
      host_bytes=staged,
  )


def latent_matrices(model: GlmMoeDsaConfig, workload: Workload) -> list[Matrix]:
  """Returns the weights of latent attention, without those of an indexer."""
  hidden, heads = model.hidden_size, model.num_attention_heads
  queries, values = heads * model.qk_head_dim, heads * model.v_head_dim
  return [
      *linear("q_a_proj", hidden, model.q_lora_rank, workload),
      *linear("q_b_proj", model.q_lora_rank, queries, workload),
      *linear("kv_a_proj_with_mqa", hidden, model.latent_dim, workload),
      *_absorbed(model, workload),
      *linear("o_proj", values, hidden, workload, cut="in"),
  ]


def _absorbed(model: GlmMoeDsaConfig, workload: Workload) -> list[Matrix]:
  """Returns kv_b_proj as it is used: of each head its keys, then its values.

  The A of an adapter meets each head twice.
  """
  heads, rank = model.num_attention_heads, model.kv_lora_rank
  keys, values = model.qk_nope_head_dim, model.v_head_dim
  columns = heads * (keys + values)
  kernel, *factors = linear("kv_b_proj", rank, columns, workload)
  by_head = lambda matrix, d_in, d_out: matrix._replace(
      d_in=d_in, d_out=d_out, copies=heads, rows_per_token=heads
  )
  found = [by_head(kernel, keys, rank), by_head(kernel, rank, values)]
  if factors:
    a, b = factors
    found += [
        a._replace(rows_per_token=2 * heads),
        by_head(b, keys, a.d_out),
        by_head(b, a.d_out, values),
    ]
  return found

"""What choosing the latents to attend to costs one device.

Only a forward chooses: a backward takes its choice, and no gradient reaches
what it is made of.
"""

from typing import NamedTuple

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered
from lstraw_jax.roofline.products import Matrix, linear
from lstraw_jax.roofline.segments import Keys, Segments
from lstraw_jax.roofline.widths import widths
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from pallas_kernels.index_topk import KEY_TILE
from pallas_kernels.query_tiles import QUERY_TILE


class Searched(NamedTuple):
  """The search of one set of keys on the first shard, over all segments."""

  read: int  # keys
  scored: int  # pairs of a query and a key


def indexer_matrices(
    model: GlmMoeDsaConfig, workload: Workload
) -> list[Matrix]:
  """Returns its weights, which are never trained."""
  hidden, heads = model.hidden_size, model.index_n_heads
  size, latent = model.index_head_dim, model.q_lora_rank
  found = [
      *linear("wq_b", latent, heads * size, workload),
      *linear("wk", hidden, size, workload),
      *linear("weights_proj", hidden, heads, workload),
  ]
  return [matrix._replace(trained=False, constant=True) for matrix in found]


def indexer_cost(
    model: GlmMoeDsaConfig, segments: Segments, workload: Workload
) -> StageCost:
  """Counts one search of all sets of keys, and the choice over all shards.

      2 I K FLOP for each query and key scored

  Queries are gathered, and candidates sent to the home shard of their query,
  each a score and a position; the last ones chosen come back. Candidates are
  written once, with their slots. Of keys in host memory a whole layer comes to
  the device.
  """
  narrow, wide, *_ = widths(model)
  heads, size = model.index_n_heads, model.index_head_dim
  searches = [searched(keys, segments) for keys in segments.keys]
  read = sum(x.read for x in searches)
  staged = sum(
      len(keys.seen) * keys.room for keys in segments.keys if keys.on_host
  )
  queries = segments.count * segments.tokens
  query = heads * (size * narrow + wide)
  room = sum(min(model.index_topk, keys.room) for keys in segments.keys)
  sent = query + (room + 1) * (wide + 4)
  moved = narrow * size * (read + staged)
  moved += queries * (query + room * (wide + 8))
  return StageCost(
      flops=2 * heads * size * sum(x.scored for x in searches),
      memory_bytes=moved,
      collective_bytes=gathered(queries * sent, workload.context),
      host_bytes=narrow * size * staged,
  )


def searched(keys: Keys, segments: Segments) -> Searched:
  """Returns what is searched of a set of keys, by tiles.

  A tile of queries reads the keys of all slots, filled or not, and scores those
  of tiles that one of its queries sees.
  """
  own = segments.keys[0]
  queries = min(QUERY_TILE, segments.tokens)
  tiles = -(-segments.tokens // queries)
  slots = keys.in_blocks(keys.room, KEY_TILE)
  tile = min(KEY_TILE, keys.room)
  scored = 0
  for real, filled in zip(own.seen, keys.filled, strict=True):
    seeing = -(-real // queries)
    for start in range(0, filled, tile):
      # Of its own keys a segment sees those up to each query.
      hidden = start // queries if keys is own else 0
      scored += (seeing - hidden) * queries * tile
  return Searched(read=segments.count * tiles * slots, scored=scored)

"""The best keys of a tile of queries, found a tile of keys at a time.

1. A tile of keys is read from the stack of all layers, or, of one that lies in
   host memory, from a layer brought to the device: every tile of queries reads
   all of it. A tile that no query sees is skipped, so that empty slots cost
   nothing.
2. Its scores are those of the reference. Tiles have one shape, so that how a
   score is rounded does not depend on how many keys a shard has.
3. Where a key ranks before the last of its query's best so far, the tile and
   the best so far are sorted, and the first entries kept.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import query_tiles
from pallas_kernels.index_topk.candidates import (
    NO_POSITION,
    Candidates,
    before,
    rank,
)
from pallas_kernels.index_topk.reference import score
from pallas_kernels.prefix_attention.reference import visible
from pallas_kernels.shapes import wide_dtype
from pallas_kernels.staging import layer_stack, read
from pallas_kernels.varying import vary_like

KEY_TILE = 2048  # products are [QUERY_TILE, I, KEY_TILE]: 16 MiB for 32 heads


def search(
    q_BTIK: jax.Array,
    weights_BTI: jax.Array,
    keys_LBSK: jax.Array,
    q_positions_BT: jax.Array,
    k_positions_BS: jax.Array,
    layer: jax.Array,
    k: int,
    scale: float,
) -> Candidates:
  """Returns the min(k, S) best of each query, [B,T,J]."""
  with jax.named_scope("index_topk"):
    stack, index = layer_stack(keys_LBSK, layer)
    slots = stack.shape[2]
    size = min(KEY_TILE, slots)
    starts = jnp.arange(0, slots, size, dtype=jnp.int32)

    def of_tile(tile):
      row, *queries = tile
      # The tile is a batch of one row of keys.
      q, weights, q_positions = (x[None] for x in queries)

      def step(best, wanted_start):
        # The last tile begins earlier, and hides what the one before it had.
        start = jnp.minimum(wanted_start, slots - size)
        tile_slots = start + jnp.arange(size, dtype=jnp.int32)
        positions = jax.lax.dynamic_slice(
            k_positions_BS, (row, start), (1, size)
        )
        new = (tile_slots >= wanted_start)[None]
        positions = jnp.where(new, positions, -1)
        at = index, row, start, jnp.int32(0)
        keys = read(stack, at, (1, 1, size, stack.shape[3]))[0]

        def update(best):
          found = score(
              q, weights, keys, q_positions, positions, tile_slots, scale
          )
          better = before(
              found.scores,
              found.positions,
              other_scores=best.scores[..., -1:],
              other_positions=best.positions[..., -1:],
          )
          return jax.lax.cond(
              better.any(), partial(_merge, found), lambda same: same, best
          )

        seen = visible(q_positions, positions).any()
        return jax.lax.cond(seen, update, lambda same: same, best), None

      shape = *q.shape[:2], min(k, slots)
      none = Candidates(
          jnp.full(shape, -jnp.inf, wide_dtype(q.dtype)),
          jnp.full(shape, NO_POSITION, jnp.int32),
          jnp.zeros(shape, jnp.int32),
      )
      none = vary_like(none, q, weights, stack, q_positions, k_positions_BS)
      best, _ = jax.lax.scan(step, none, starts)
      return jax.tree.map(lambda x: x[0], best)

    tiles = (
        query_tiles.key_rows(q_BTIK),
        query_tiles.split(q_BTIK),
        query_tiles.split(weights_BTI),
        query_tiles.split(q_positions_BT, value=-1),
    )
    best = jax.lax.map(of_tile, tiles)
    return jax.tree.map(lambda x: query_tiles.join(x, q_BTIK), best)


def _merge(found, best):
  both = jax.tree.map(lambda *x: jnp.concatenate(x, -1), best, found)
  return Candidates(*rank(*both, count=best.scores.shape[-1]))

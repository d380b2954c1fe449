"""The best k over all sources and shards, and the way back to their slots.

1. Each query has a home shard: of n shards, the i-th has the i-th n-th of the
   queries. The candidates of all sources and shards are sent there.
2. It sorts them. The k-th is the query's threshold, a score and a position.
3. The thresholds go to all shards. Candidates are sorted, so that a number is
   enough to say which of a source's are chosen: the first so many.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.index_topk.candidates import (
    NO_POSITION,
    Candidates,
    before,
    rank,
)
from pallas_kernels.shapes import typed

SORT_ELEMENTS = 1 << 20  # candidates sorted at once; 8 MiB in float32


def choose(
    candidates: Sequence[Candidates], *, k: int, axis_name: str | None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Chooses the best k of all candidates; all, where there are fewer.

  The same set for any split of the keys over sources and shards, for scores
  that are equal too.

  Args:
    candidates: of each source on this shard, for the same T queries on all
      shards.
    k: how many.
    axis_name: the mesh axis that the keys are split over, inside
      `jax.shard_map`; None for one shard. T is a multiple of its size n.

  Returns:
    For each source the number [B, T] of its candidates that are chosen: so
    many of the first. And the positions [B, T / n, min(k, n sum J)] of the
    choice over all shards, by rank, -1 where there is none, for the queries
    whose home this shard is. All int32.

  Raises:
    ValueError: if T is no multiple of n.
  """
  shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  batch, length = candidates[0].scores.shape[:2]
  if length % shards:
    raise ValueError(
        f"{length} queries: want a multiple of the {shards} shards of"
        f" axis_name={axis_name!r}"
    )
  with jax.named_scope("choose"):
    scores = jnp.concatenate([x.scores for x in candidates], -1)
    positions = jnp.concatenate([x.positions for x in candidates], -1)
    columns = tuple(_to_homes(x, axis_name) for x in (scores, positions))
    width = columns[0].shape[-1]
    columns = (x.reshape(-1, width) for x in columns)
    scores, positions = jax.lax.map(
        lambda row: rank(*row, count=min(k, width)),
        tuple(columns),
        batch_size=max(1, SORT_ELEMENTS // width),
    )
    ends = (x[:, -1].reshape(batch, -1) for x in (scores, positions))
    last_score, last_position = (_from_homes(x, axis_name) for x in ends)

    def count(source):
      beyond = before(
          last_score[..., None],
          last_position[..., None],
          other_scores=source.scores,
          other_positions=source.positions,
      )
      chosen = ~beyond & (source.positions < NO_POSITION)
      return chosen.sum(-1, dtype=jnp.int32)

    positions = jnp.where(positions < NO_POSITION, positions, -1)
    positions = positions.reshape(batch, length // shards, -1)
    return tuple(map(count, candidates)), positions


@typed
def look_up(
    positions: Int[Array, "B T k"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "M S"],
) -> tuple[Int[Array, "B T J"], Int[Array, "B T"]]:
  """Finds recorded positions among the slots of one source on one shard.

  Args:
    positions: recorded by `choose`; none below 0. No query has one twice.
    q_positions: as in `index_topk`; what a query does not see is not found.
    k_positions: as in `index_topk`.

  Returns:
    J = min(k, S) slots of each query, those found first, in the recorded order,
    and the number found. What comes after them is of no meaning.
  """
  with jax.named_scope("look_up"):
    rows, slots = k_positions.shape
    wanted = positions.reshape(rows, -1, positions.shape[-1])
    stored, order = jax.lax.sort(
        (k_positions, jax.lax.broadcasted_iota(jnp.int32, (rows, slots), 1)),
        num_keys=1,
    )
    places = jax.vmap(partial(jnp.searchsorted, method="scan_unrolled"))(
        stored, wanted
    )
    take = jax.vmap(lambda x, places: x.at[places].get(mode="clip"))
    seen = (wanted >= 0) & (wanted <= q_positions.reshape(rows, -1, 1))
    missing = ~(seen & (take(stored, places) == wanted))
    # Stable, so that either kind keeps its order.
    _, found = jax.lax.sort((missing, take(order, places)), num_keys=1)
    found = found.reshape(positions.shape)[..., :slots]
    counts = (~missing).sum(-1, dtype=jnp.int32)
    return found, counts.reshape(q_positions.shape)


def _to_homes(x_BTJ, axis_name):
  """[B, T, J] -> [B, T/n, n J]."""
  if axis_name is None:
    return x_BTJ
  return jax.lax.all_to_all(x_BTJ, axis_name, 1, 2, tiled=True)


def _from_homes(x_BT, axis_name):
  """[B, T/n] -> [B, T]."""
  if axis_name is None:
    return x_BT
  return jax.lax.all_gather(x_BT, axis_name, axis=1, tiled=True)

"""Scored keys, in an order that has no ties: by score, then by position."""

from typing import NamedTuple

import jax
import numpy as np

NO_POSITION = np.iinfo(np.int32).max


class Candidates(NamedTuple):
  """The best keys of one source on one shard, for each query.

  By (score falling, position rising). Entries that are none come last: they
  have score -inf, position `NO_POSITION`, and slot 0.
  """

  scores: jax.Array  # [B, T, J] float32 or wider
  positions: jax.Array  # [B, T, J] int32
  slots: jax.Array  # [B, T, J] int32


def rank(
    scores: jax.Array, positions: jax.Array, *others: jax.Array, count: int
) -> tuple[jax.Array, ...]:
  """Sorts along the last axis, and returns the first `count` entries of each.

  It need not be stable: only entries that are none have equal keys, and they
  are alike.
  """
  columns = (-scores, positions, *others)
  columns = jax.lax.sort(columns, num_keys=2, is_stable=False)
  negated, *rest = (x[..., :count] for x in columns)
  return -negated, *rest


def before(
    scores: jax.Array,
    positions: jax.Array,
    *,
    other_scores: jax.Array,
    other_positions: jax.Array,
) -> jax.Array:
  """Returns where entries rank before others; none ranks before no entry."""
  tie = scores == other_scores
  return (scores > other_scores) | (tie & (positions < other_positions))

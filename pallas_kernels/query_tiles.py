"""Queries, a tile at a time; all queries of a tile have the same key row."""

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_to_multiple

QUERY_TILE = 64


def split(x_BT: jax.Array, *, value: int = 0) -> jax.Array:
  """[B, T, ...] -> [tiles, queries, ...], filled up with `value`."""
  size = min(QUERY_TILE, x_BT.shape[1])
  padded = pad_to_multiple(x_BT, size, axis=1, value=value)
  return padded.reshape(-1, size, *x_BT.shape[2:])


def join(x: jax.Array, like_BT: jax.Array) -> jax.Array:
  """[tiles, queries, ...] -> [B, T, ...] of `like_BT`: undoes `split`."""
  batch, length = like_BT.shape[:2]
  return x.reshape(batch, -1, *x.shape[2:])[:, :length]


def key_rows(like_BT: jax.Array) -> jax.Array:
  """Returns the row b of each tile of [B, T, ...]."""
  batch, length = like_BT.shape[:2]
  tiles = -(-length // min(QUERY_TILE, length))
  return jnp.arange(batch * tiles, dtype=jnp.int32) // tiles

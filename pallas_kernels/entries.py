"""What a tile of queries chose, a tile of entries at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_to_multiple

ENTRY_TILE = 128  # gathered are [QUERY_TILE, ENTRY_TILE, K]: 18 MiB for K = 576


class Entries:
  """Chosen slots [T, J], of which the first counts [T] are real.

  Walked in as many steps as the largest count needs.
  """

  def __init__(self, slots_TJ: jax.Array, counts_T: jax.Array):
    self.length = slots_TJ.shape[1]
    self.size = min(ENTRY_TILE, self.length)
    self.slots = self._padded(slots_TJ)
    self.counts = counts_T
    self.steps = (counts_T.max() + self.size - 1) // self.size

  def load(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slots of a tile, and which of them are real."""
    entry = number * self.size + jnp.arange(self.size, dtype=jnp.int32)
    return self.cut(self.slots, number), entry[None] < self.counts[:, None]

  def cut(self, x_TJ: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the tile of an array with a value for each entry."""
    return jax.lax.dynamic_slice_in_dim(
        self._padded(x_TJ), number * self.size, self.size, axis=1
    )

  def map(
      self,
      value: Callable[[jax.Array, jax.Array], jax.Array],
      nothing_TJ: jax.Array,
  ) -> jax.Array:
    """Returns `value(slots, real)` of all tiles, [T, J].

    Args:
      value: of a tile.
      nothing_TJ: what stands in tiles that are not walked.
    """

    def step(number, total):
      new = value(*self.load(number)).astype(total.dtype)
      start = number * self.size
      return jax.lax.dynamic_update_slice_in_dim(total, new, start, axis=1)

    filled = jax.lax.fori_loop(0, self.steps, step, self._padded(nothing_TJ))
    return filled[:, : self.length]

  def _padded(self, x_TJ):
    return pad_to_multiple(x_TJ, self.size, axis=1)

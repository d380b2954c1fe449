"""Padding of an axis to a multiple of a block."""

import jax
import jax.numpy as jnp


def pad_to_multiple(
    x: jax.Array, size: int, *, axis: int, value: int = 0
) -> jax.Array:
  """Fills an axis up at its end; one that fits is returned as it is.

  A pad by nothing is not left to the compiler: inside `jax.shard_map` its value
  would be an input of the backward pass that XLA then finds unused, and the
  partitioner of jax 0.11 hangs or crashes on too many of these.
  """
  missing = -x.shape[axis] % size
  if not missing:
    return x
  pad = [(0, 0)] * x.ndim
  pad[axis] = (0, missing)
  return jnp.pad(x, pad, constant_values=value)

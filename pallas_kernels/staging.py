"""Host and device memory: a state may lie in either, and nothing else knows.

Which memory an array lies in is a part of its type, so that no flag is passed
down: both functions do nothing to an array that is already there, and JAX
refuses at trace time any operation that would mix the two.
"""

from typing import TypeVar

import jax

T = TypeVar("T")


def stage(tree: T) -> T:
  """Has arrays in device memory, e.g. one layer's while it is used.

  Call it inside `jax.checkpoint`, lest the staged copies are kept for the
  backward pass.
  """
  return jax.device_put(tree, jax.memory.Space.Device)


def put_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Has an array in the memory that another one lies in."""
  return jax.device_put(x, jax.typeof(like).memory_space)

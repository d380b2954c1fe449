"""Stored arrays are read and written a slice at a time, wherever they lie.

Host memory or the device's: which one is a part of an array's type, so that no
flag is passed down. `stage` and `put_like` do nothing to an array that is
already there, and JAX refuses at trace time any operation that would mix the
two.

A slice is laid out in rows, as the whole is. Left alone, the compiler may pick
for the slice what suits the product that it goes into, and then copies the
whole, all layers of a prompt, to have it so as well.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

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


def read(x: jax.Array, start: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
  """Returns a slice of a stored array, on the device."""
  flat, at, cut = _along_one_axis(x, start, sizes)
  part = stage(jax.lax.dynamic_slice(flat, at, cut))
  return _in_rows(part).reshape(sizes)


def write(x: jax.Array, new: jax.Array, start: Sequence[Any]) -> jax.Array:
  """Returns a stored array with a slice replaced, in place if it is donated."""
  new = _in_rows(new.astype(x.dtype))

  def along_one_axis(x, new, start):
    flat, at, cut = _along_one_axis(x, start, new.shape)
    new = put_like(new.reshape(cut), x)
    return jax.lax.dynamic_update_slice(flat, new, at).reshape(x.shape)

  def at_once(x, new, start):
    return jax.lax.dynamic_update_slice(x, put_like(new, x), start)

  # On a CPU the other form would, in a loop, copy the whole.
  return jax.lax.platform_dependent(
      x, new, start, tpu=along_one_axis, default=at_once
  )


def layer_stack(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns a stack of layers on the device, and where in it the layer is.

  Rows can be gathered, and added to, in device memory alone: of an array that
  lies in host memory, one layer comes to the device, as a stack of one.
  """
  if not _in_host_memory(x):
    return x, layer
  return read(x, _start_of(x, layer), (1, *x.shape[1:])), jnp.int32(0)


def put_layer(x: jax.Array, stack: jax.Array, layer: jax.Array) -> jax.Array:
  """Returns a stored array after its `layer_stack` was changed."""
  if not _in_host_memory(x):
    return stack
  return write(x, stack, _start_of(x, layer))


def _in_host_memory(x):
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def _start_of(x, layer):
  return layer, *[jnp.int32(0)] * (x.ndim - 1)


def _along_one_axis(x, start, sizes):
  """Merges axes of which a slice has one element into the next one.

  A slice of one row of one layer is then cut along one axis; along two, a TPU
  cannot cut what lies in host memory.
  """
  longer = (i for i, size in enumerate(sizes) if size > 1)
  first = next(longer, len(sizes) - 1)
  at = start[0]
  for length, index in zip(x.shape[1:], start[1 : first + 1], strict=False):
    at = at * length + index
  flat = x.reshape(-1, *x.shape[first + 1 :])
  return flat, [at, *start[first + 1 :]], sizes[first:]


def _in_rows(x):
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

"""How weights are made: with logical axis names, and stacked over layers."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.sharding import Axes, spec

M = TypeVar("M", bound=nnx.Module)

STACK_AXIS = "layers"  # logical name of the axis that stacks like layers


class IndexerParam(nnx.Variable):
  """A weight of an indexer, which only a loss of its own trains."""


class Buffer(nnx.Variable):
  """A value that comes with the weights and is never trained."""


def param(
    value: jax.Array,
    axes: Axes,
    *,
    kind: type[nnx.Variable] = nnx.Param,
) -> Any:
  """Wraps a weight with the logical name of each of its axes.

  The names are not mesh axes: eager sharding would take them for such.

  Raises:
    ValueError: for a name without a rule, or two names on one mesh axis.
  """
  spec(axes)
  return kind(value, out_sharding=axes, eager_sharding=False)


def stack(make: Callable[[nnx.Rngs], M], count: int, *, rngs: nnx.Rngs) -> M:
  """Makes `count` like modules whose weights share a leading layer axis."""
  vmapped = nnx.vmap(
      make,
      in_axes=0,
      out_axes=0,
      transform_metadata={nnx.PARTITION_NAME: STACK_AXIS},
  )
  return vmapped(rngs.split(count))


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, std: float, dtype: str
) -> jax.Array:
  """Draws a weight from N(0, std^2)."""
  draw = jax.random.normal(rngs.params(), shape, jnp.float32)
  return (std * draw).astype(dtype)

"""Dimension letters of signatures and suffixes, and their check at trace time.

    B sequences            G branches per prompt   P prompt tokens
    R response tokens      T tokens in this call   S slots attended to
    C tokens per chunk     D hidden                F feed-forward
    L layers               V value head dim        W conv window kept
    H query heads (or linear key heads)            N key/value heads
    U linear value heads   K query/key head dim    E experts
    A experts per token    r LoRA rank             I indexer heads
    J entries chosen by an indexer                 Z latent of a token

A suffix such as `q_BTHK` names the axes of an array, outermost first.
"""

from collections.abc import Callable
from typing import TypeVar

import beartype
import jax
import jax.numpy as jnp
import jaxtyping

F = TypeVar("F", bound=Callable)


def typed(function: F) -> F:
  """Checks a function's jaxtyping annotations each time it is traced."""
  return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


def wide(x: jax.Array) -> jax.Array:
  """Casts to the accumulation dtype: float32, or float64 if `x` is float64."""
  return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the dtype in which sums over values of `dtype` are kept."""
  is_float64 = jnp.dtype(dtype) == jnp.float64
  return jnp.dtype(jnp.float64 if is_float64 else jnp.float32)

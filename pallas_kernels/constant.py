"""Functions whose results are constants for gradients, and are computed once.

With `stop_gradient` alone, what `jax.checkpoint` makes of a function still
takes apart the loops inside: it keeps their intermediate values, stacked, and
runs them again. This way they are one operation to it. If the result is kept by
name, a backward pass has no part of it.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

R = TypeVar("R")


def constant(function: Callable[..., R]) -> Callable[..., R]:
  """Returns a function of positional arguments without a gradient."""

  @jax.custom_vjp
  def call(*args):
    return function(*args)

  call.defvjp(
      lambda *args: (call(*args), len(args)),
      lambda count, _: (None,) * count,
  )
  return call

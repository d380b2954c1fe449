"""The gradient of a loss by a prompt state: what branches leave on it.

It is linear in the loss, so that all branches of a group add to one. The sums
over slots are as large as the slots themselves, in their dtype or a wider one.
"""

import dataclasses
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState, zero_sums
from modeling.layer_state import Recurrent, Slots
from modeling.sharding import sharding
from pallas_kernels.shapes import wide_dtype

CotangentDtype = Literal["float32", "bfloat16"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCotangent:
  """Cotangents of a prompt state, each laid out as its leaf of the state."""

  slots: Slots  # [L, B, S, ...] of what is learned
  recurrent: Recurrent  # [L, l, B, ...] float32 or wider


@partial(jax.jit, static_argnames="dtype")
def zero_cotangent(
    policy: Policy, prompt: PromptState, *, dtype: CotangentDtype = "float32"
) -> StateCotangent:
  """Returns the accumulator that replay adds to.

  Args:
    policy: the weights.
    prompt: the state; its memory kind is the accumulator's.
    dtype: of the sums over slots. "float32" is float64 for a float64 model;
      "bfloat16" halves them and rounds at each addition.

  Raises:
    ValueError: for another dtype.
  """
  check_dtype(dtype)
  wide = wide_dtype(policy.config.dtype)
  axes = policy.config.recurrent_axes(policy.mesh)
  zeros = lambda x, axes: jax.lax.with_sharding_constraint(
      jnp.zeros(x.shape, wide), sharding(policy.mesh, axes)
  )
  return StateCotangent(
      slots=zero_sums(
          prompt,
          policy.config.trained,
          dtype=wide if dtype == "float32" else jnp.dtype(dtype),
      ),
      recurrent=jax.tree.map(zeros, prompt.recurrent, axes),
  )


def check_dtype(dtype: str) -> None:
  """Raises ValueError for a dtype that sums cannot have."""
  if dtype not in get_args(CotangentDtype):
    raise ValueError(
        f"cotangent_dtype={dtype!r}: want one of {get_args(CotangentDtype)}"
    )

"""Sums of gradients, in float32 or wider, laid out as the weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.policy import Policy
from modeling.sharding import shardings
from pallas_kernels.shapes import wide_dtype


@jax.jit
def zero_gradients(policy: Policy) -> nnx.State:
  """Returns the accumulator that replay adds to."""
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), policy.trainable
  )
  return lay_out(zeros, policy)


def lay_out(gradients: nnx.State, policy: Policy) -> nnx.State:
  """Lays gradients out: a sum is never whole on one device."""
  return jax.lax.with_sharding_constraint(
      gradients, shardings(gradients, policy.mesh)
  )


def add(sums: Any, terms: Any) -> Any:
  """Returns the sums of two trees, in the dtypes of the first."""
  return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, terms)

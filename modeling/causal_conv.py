"""Depthwise causal convolution that continues from the last inputs seen."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.shapes import typed


@typed
def causal_conv(
    u: Float[Array, "B T X"],
    tail: Float[Array, "B W X"],
    *,
    kernel: Float[Array, "W1 X"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T X"], Float[Array, "B W X"]]:
  """Returns y_t = sum_j kernel_j u_{t-W+j} and the last W inputs.

  Args:
    u: inputs; rows may be padded on the right.
    tail: the W inputs before the first one, zeros at the start of a sequence.
    kernel: W + 1 taps a channel; the last one multiplies the current token.
    lengths: number of real tokens of each row. The tail that is returned ends
      with the last of them, so that padding never enters it.
  """
  padded = jnp.concatenate([tail, u], axis=1)
  taps = kernel.astype(u.dtype)[:, None, None]
  steps = u.shape[1]
  y = jnp.zeros_like(u)
  for j in range(kernel.shape[0]):
    y += taps[j] * padded[:, j : j + steps]
  new_tail = jax.vmap(
      lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, tail.shape[1])
  )(padded, lengths)
  return y, new_tail

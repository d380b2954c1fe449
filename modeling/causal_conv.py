"""Depthwise causal convolution that continues from the last inputs seen.

1. A frame of tokens lies over some mesh axes, none of them if it is whole. Each
   shard gets the W inputs before its own from the shards before it.
2. In each row the real tokens are those from `start` to `stop`. The W inputs
   before `start` are those of the state, whatever padding stands there.
3. The new state is the W inputs before `stop`, the same on every shard.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.shapes import typed
from pallas_kernels.varying import vary_like


@typed
def causal_conv(
    u: Float[Array, "B T H K"],
    tail: Float[Array, "B W H K"],
    *,
    kernel: Float[Array, "W1 H K"],
    start: Int32[Array, " B"],
    stop: Int32[Array, " B"],
    over: tuple[str, ...] = (),
) -> tuple[Float[Array, "B T H K"], Float[Array, "B W H K"]]:
  """Returns y_t = sum_j kernel_j u_{t-W+j} and the last W inputs.

  Args:
    u: this shard's inputs, one a channel of each head.
    tail: the W inputs before `start`, zeros at the start of a sequence.
    kernel: W + 1 taps a channel; the last one multiplies the current token.
    start: index in the frame of each row's first real token.
    stop: index after its last one; a row without any has stop = start.
    over: mesh axes that the tokens of the frame lie over, in `jax.shard_map`.
  """
  # At once and not where they are used: their cotangents are summed here.
  kernel, tail = vary_like((kernel, tail), u)
  steps, window = u.shape[1], tail.shape[1]
  shard = jax.lax.axis_index(over)
  first = shard * steps - window  # index in the frame of inputs[:, 0]
  inputs = jnp.concatenate([_before(u, window, over), u], axis=1)
  index = first + jnp.arange(window + steps, dtype=jnp.int32)
  for j in range(window):
    is_tail_j = index[None] == start[:, None] - window + j
    inputs = jnp.where(is_tail_j[..., None, None], tail[:, j : j + 1], inputs)

  taps = kernel.astype(u.dtype)[:, None, None]
  y = jnp.zeros_like(u)
  for j in range(window + 1):
    y += taps[j] * inputs[:, j : j + steps]

  last = stop[:, None] - window - first
  last += jnp.arange(window, dtype=jnp.int32)[None]
  # A shard owns its own inputs; the first one also those before the frame.
  owned = (last < window + steps) & ((last >= window) | (shard == 0))
  new_tail = jnp.take_along_axis(
      inputs, last[..., None, None], axis=1, mode="clip"
  )
  new_tail = jnp.where(owned[..., None, None], new_tail, 0)
  return y, jax.lax.psum(new_tail, over)


def _before(u, count, over):
  """The `count` inputs before this shard's; zeros before the first shard's.

  They may span several shards. Nothing else is sent, however long the frame.
  """
  shards, steps = jax.lax.axis_size(over), u.shape[1]
  parts = []
  for hop in range(1, min(shards, -(-count // steps) + 1)):
    part = u[:, -min(steps, count - (hop - 1) * steps) :]
    hops = [(source, source + hop) for source in range(shards - hop)]
    parts.append(jax.lax.ppermute(part, over, hops))
  missing = count - sum(part.shape[1] for part in parts)
  if missing:  # an empty part is one more input that the backward pass drops
    shape = (u.shape[0], missing, *u.shape[2:])
    parts.append(jnp.zeros_like(u, shape=shape))
  return jnp.concatenate(parts[::-1], axis=1)

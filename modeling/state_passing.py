"""The gated delta rule over a sequence that is cut into shards of its tokens.

1. What a shard's tokens do to a state is affine: S -> M S + B. One run of the
   chunked rule on the shard, with value columns [v | 0] behind the initial
   state [0 | I], gives both: its last state is [B | M], and its outputs are
   [o_zero | r], so that o = o_zero + r S for the S before the shard.
2. The maps of the shards are composed by doubling: log2(shards) steps, each of
   which hands one map on. No shard ever holds the maps of all others, so that
   memory does not grow with their number.
3. S before a shard is S after the shard before it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.shapes import typed

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@typed
def sharded_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T U V"],
    *,
    g: Float[Array, "B T U"],
    beta: Float[Array, "B T U"],
    initial_state: Float[Array, "B U K V"],
    axis: str,
) -> tuple[Float[Array, "B T U V"], Float[Array, "B U K V"]]:
  """Runs `gated_delta_rule` inside `jax.shard_map`; T is this shard's tokens.

  Args:
    q: as there; so are k, v, g and beta.
    initial_state: S before the first shard, the same on every shard.
    axis: the mesh axis that the tokens lie over, in order.

  Returns:
    This shard's o, and the state after the last shard, the same on every shard.
  """
  shards, shard = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  keys, values = q.shape[-1], v.shape[-1]
  identity = jnp.eye(keys, dtype=initial_state.dtype)[None, None]
  identity = jnp.broadcast_to(identity, (*initial_state.shape[:-1], keys))
  nothing = jnp.zeros_like(v, shape=(*v.shape[:-1], keys))
  out, last = gated_delta_rule(
      q,
      k,
      jnp.concatenate([v, nothing], axis=-1),
      g=g,
      beta=beta,
      initial_state=jnp.concatenate(
          [jnp.zeros_like(initial_state), identity], axis=-1
      ),
  )
  out, reads = jnp.split(out, (values,), axis=-1)
  added, transition = jnp.split(last, (values,), axis=-1)

  # From here on `added` of the first shard is the state after it. Shards that
  # receive nothing get zeros, the map that is added to theirs without effect.
  before_all = jnp.where(shard == 0, initial_state, 0)
  added += _einsum("bukj,bujv->bukv", transition, before_all)
  hop = 1
  while hop < shards:
    earlier = _send((added, transition), axis, hop)
    added += _einsum("bukj,bujv->bukv", transition, earlier[0])
    transition = _einsum("bukj,bujl->bukl", transition, earlier[1])
    hop *= 2
  before = before_all + _send(added, axis, 1)
  out += _einsum("btuk,bukv->btuv", reads, before)
  return out, jax.lax.psum(jnp.where(shard == shards - 1, added, 0), axis)


def _send(tree, axis, hop):
  """Hands arrays on to the shard `hop` later; the first ones get zeros."""
  shards = jax.lax.axis_size(axis)
  hops = [(source, source + hop) for source in range(shards - hop)]
  return jax.lax.ppermute(tree, axis, hops)

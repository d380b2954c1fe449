"""The oracle: the dense softmax of prefix attention, with a mask a query."""

import jax
import jax.numpy as jnp

from pallas_kernels.prefix_attention import reference


def attend(
    q_BTHK: jax.Array,
    latents_LBSK: jax.Array,
    sink: jax.Array | None,
    slots_BTJ: jax.Array,
    counts_BT: jax.Array,
    layer: jax.Array,
    scale: float,
    value_dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns the output [B,T,H,V], log-sum-exp [B,T,H], and the sink."""
  mask_BTS = _mask(slots_BTJ, counts_BT, latents_LBSK.shape[2])
  # One head of keys, of which the values are a part.
  split = lambda x: (x[..., None, :], x[..., None, :value_dim])

  def one_query(q_BHK, mask_BS):
    out, lse, _ = reference.attend(
        q_BHK[:, None],
        *split(latents_LBSK),
        None if sink is None else split(sink),
        jnp.zeros((len(q_BHK), 1), jnp.int32),
        jnp.where(mask_BS, 0, -1),  # a query at 0 sees what is at 0
        layer,
        scale,
    )
    return out[:, 0], lse[:, 0]

  out, lse = jax.vmap(one_query, in_axes=1, out_axes=1)(q_BTHK, mask_BTS)
  return out, lse, sink


def _mask(slots_BTJ, counts_BT, length):
  """Returns [B,T,S]: is slot s one of the first counts?"""
  count = lambda size: jnp.arange(size, dtype=jnp.int32)
  batch, queries, entries = slots_BTJ.shape
  real = count(entries)[None, None] < counts_BT[..., None]
  slots = jnp.where(real, slots_BTJ, length)
  at = count(batch)[:, None, None], count(queries)[None, :, None], slots
  nothing = jnp.zeros((batch, queries, length), bool)
  return nothing.at[at].set(True, mode="drop")

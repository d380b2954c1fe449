"""The oracle: the dense softmax of prefix attention, with a mask a query."""

import jax
import jax.numpy as jnp

from pallas_kernels.prefix_attention import reference
from pallas_kernels.shapes import wide


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


def weights(
    q_BTHK: jax.Array,
    latents_LBSK: jax.Array,
    lse_BTH: jax.Array,
    slots_BTJ: jax.Array,
    counts_BT: jax.Array,
    layer: jax.Array,
    scale: float,
) -> jax.Array:
  """Returns the weights [B,T,J], averaged over heads."""
  scores_BTHS = scale * jnp.einsum(
      "bthk,bsk->bths", wide(q_BTHK), wide(latents_LBSK[layer])
  )
  slots_BTJ, real_BTJ = mask_entries(slots_BTJ, counts_BT)
  scores_BTHJ = jnp.take_along_axis(scores_BTHS, slots_BTJ[:, :, None], -1)
  weights_BTJ = jnp.exp(scores_BTHJ - lse_BTH[..., None]).mean(2)
  return jnp.where(real_BTJ, weights_BTJ, 0.0).astype(lse_BTH.dtype)


def mask_entries(
    slots_BTJ: jax.Array, counts_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the slots, 0 from counts on, and which are before."""
  entry = jnp.arange(slots_BTJ.shape[2], dtype=jnp.int32)
  real_BTJ = entry[None, None] < counts_BT[..., None]
  return jnp.where(real_BTJ, slots_BTJ, 0), real_BTJ


def _mask(slots_BTJ, counts_BT, length):
  """Returns [B,T,S]: is slot s one of the first counts?"""
  count = lambda size: jnp.arange(size, dtype=jnp.int32)
  batch, queries, entries = slots_BTJ.shape
  real = count(entries)[None, None] < counts_BT[..., None]
  slots = jnp.where(real, slots_BTJ, length)
  at = count(batch)[:, None, None], count(queries)[None, :, None], slots
  nothing = jnp.zeros((batch, queries, length), bool)
  return nothing.at[at].set(True, mode="drop")

"""The oracle: dense masked softmax over all keys at once."""

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import wide

# Stand-ins [L,B,S,N,K] and [L,B,S,N,V] of keys and values, or none.
Sink = tuple[jax.Array, jax.Array] | None


def attend(
    q_BTHK: jax.Array,
    k_LBSNK: jax.Array,
    v_LBSNV: jax.Array,
    sink: Sink,
    q_positions_BT: jax.Array,
    k_positions_BS: jax.Array,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, Sink]:
  """Returns the output [B,T,H,V], log-sum-exp [B,T,H], and the sink."""
  kv = jax.lax.stop_gradient((k_LBSNK[layer], v_LBSNV[layer]))
  if sink is not None:
    # A zero whose cotangent is the keys'.
    zero = lambda x: x[layer] - jax.lax.stop_gradient(x[layer])
    kv = jax.tree.map(lambda x, s: x + zero(s).astype(x.dtype), kv, sink)
  k_BSNK, v_BSNV = kv
  repeats = q_BTHK.shape[2] // k_BSNK.shape[2]
  k_BSHK = jnp.repeat(wide(k_BSNK), repeats, axis=2)
  v_BSHV = jnp.repeat(wide(v_BSNV), repeats, axis=2)
  scores_BTHS = scale * jnp.einsum("bthk,bshk->bths", wide(q_BTHK), k_BSHK)
  visible_BTS = visible(q_positions_BT, k_positions_BS)
  scores_BTHS = jnp.where(visible_BTS[:, :, None], scores_BTHS, -jnp.inf)
  seen_BT11 = visible_BTS.any(-1)[..., None, None]
  # A row that sees nothing would be 0/0 below, in its gradient too.
  scores_BTHS = jnp.where(seen_BT11, scores_BTHS, 0.0)
  lse_BTH = jax.nn.logsumexp(scores_BTHS, axis=-1)
  weights_BTHS = jnp.exp(scores_BTHS - lse_BTH[..., None])
  out_BTHV = jnp.einsum("bths,bshv->bthv", weights_BTHS, v_BSHV)
  out_BTHV = jnp.where(seen_BT11, out_BTHV, 0.0)
  return out_BTHV, jnp.where(seen_BT11[..., 0], lse_BTH, -jnp.inf), sink


def visible(q_positions_BT: jax.Array, k_positions_BS: jax.Array) -> jax.Array:
  """Returns [B,T,S]: may query t see key s?"""
  q_BT1, k_B1S = q_positions_BT[:, :, None], k_positions_BS[:, None, :]
  return (k_B1S >= 0) & (k_B1S <= q_BT1)

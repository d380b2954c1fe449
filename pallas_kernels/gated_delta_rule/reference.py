"""The oracle: one token at a time, as the recurrence is written."""

import jax
import jax.numpy as jnp

from pallas_kernels.varying import vary_like

_HIGHEST = jax.lax.Precision.HIGHEST


def run(q_BTUK, k_BTUK, v_BTUV, g_BTU, beta_BTU, state_BUKV):
  """Returns the outputs [B,T,U,V] and the last state [B,U,K,V]."""

  def step(state, token):
    q, k, v, g, beta = token
    state *= jnp.exp(g)[..., None, None]
    recalled = jnp.einsum("bukv,buk->buv", state, k, precision=_HIGHEST)
    error = beta[..., None] * (v - recalled)
    state += k[..., :, None] * error[..., None, :]
    return state, jnp.einsum("bukv,buk->buv", state, q, precision=_HIGHEST)

  tokens = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0),
      (q_BTUK, k_BTUK, v_BTUV, g_BTU, beta_BTU),
  )
  state_BUKV = vary_like(state_BUKV, *tokens)
  state_BUKV, out_TBUV = jax.lax.scan(step, state_BUKV, tokens)
  return jnp.moveaxis(out_TBUV, 0, 1), state_BUKV

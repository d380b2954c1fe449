"""The chunked form: matmuls inside a chunk, a scan over chunks.

With G the running sum of g inside a chunk, D_ij = exp(G_i - G_j) for i >= j:

    A = I + strict_lower(diag(beta) K K^T * D)
    U = A^-1 (beta V),  W = A^-1 (beta exp(G) K)        all chunks at once
    N = U - W S
    O = (exp(G) Q) S + (Q K^T * D) N                    chunk after chunk
    S <- exp(G_C) S + (exp(G_C - G) K)^T N

Source: arXiv 2412.06464, section 3.3. The inverse is built from the inverses of
its two diagonal blocks, by matmuls; products keep full precision, because
near-dependent keys make A ill-conditioned.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.varying import vary_like

_CHUNK = 64
_SMALL = 8  # blocks of this size are inverted by a product of powers

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def run(q_BTUK, k_BTUK, v_BTUV, g_BTU, beta_BTU, state_BUKV):
  """Returns the outputs [B,T,U,V] and the last state [B,U,K,V]."""
  tokens = q_BTUK.shape[1]
  size = min(_CHUNK, 1 << (tokens - 1).bit_length())
  q, k, v, g, beta = (
      _to_chunks(x, size) for x in (q_BTUK, k_BTUK, v_BTUV, g_BTU, beta_BTU)
  )
  total = jnp.cumsum(g, axis=-1)
  lower = jnp.tril(jnp.ones((size, size), bool))
  span = total[..., :, None] - total[..., None, :]
  # -inf before exp: the upper half would overflow, and poison the gradient.
  decay = jnp.exp(jnp.where(lower, span, -jnp.inf))
  overlap = _einsum("nbuck,nbudk->nbucd", k, k) * decay * beta[..., None]
  inverse = unit_lower_inverse(jnp.tril(overlap, -1))
  values = _einsum("nbucd,nbudv->nbucv", inverse, beta[..., None] * v)
  k_in = (beta * jnp.exp(total))[..., None] * k
  weights = _einsum("nbucd,nbudk->nbuck", inverse, k_in)
  scores = _einsum("nbuck,nbudk->nbucd", q, k) * decay
  q_in = q * jnp.exp(total)[..., None]
  k_out = k * jnp.exp(total[..., -1:] - total)[..., None]

  def step(state, chunk):
    values, weights, scores, q_in, k_out, last = chunk
    news = values - _einsum("buck,bukv->bucv", weights, state)
    out = _einsum("buck,bukv->bucv", q_in, state)
    out += _einsum("bucd,budv->bucv", scores, news)
    state *= jnp.exp(last)[..., None, None]
    state += _einsum("buck,bucv->bukv", k_out, news)
    return state, out

  chunks = (values, weights, scores, q_in, k_out, total[..., -1])
  state_BUKV = vary_like(state_BUKV, *chunks)
  state_BUKV, out = jax.lax.scan(step, state_BUKV, chunks)
  out_BTUV = jnp.moveaxis(out, (0, 3), (1, 2))
  out_BTUV = out_BTUV.reshape(out_BTUV.shape[0], -1, *out_BTUV.shape[3:])
  return out_BTUV[:, :tokens], state_BUKV


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
  """Returns (I + a)^-1 for strictly lower a [..., C, C], C a power of two.

  [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], both halves at once.
  """
  size = a.shape[-1]
  if size <= _SMALL:
    return _small_inverse(a)
  half = size // 2
  upper, lower = a[..., :half, :half], a[..., half:, half:]
  p_inv, q_inv = unit_lower_inverse(jnp.stack([upper, lower]))
  corner = -_einsum(
      "...ij,...jk,...kl->...il", q_inv, a[..., half:, :half], p_inv
  )
  top = jnp.concatenate([p_inv, jnp.zeros_like(corner)], axis=-1)
  bottom = jnp.concatenate([corner, q_inv], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def _small_inverse(a):
  """(I - a)(I + a^2)(I + a^4): exact, since a^8 = 0; its terms stay small."""
  square = _einsum("...ij,...jk->...ik", a, a)
  fourth = _einsum("...ij,...jk->...ik", square, square)
  inverse = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape) - a
  inverse += _einsum("...ij,...jk->...ik", inverse, square)
  return inverse + _einsum("...ij,...jk->...ik", inverse, fourth)


def _inverse_forward(a):
  inverse = unit_lower_inverse(a)
  return inverse, inverse


def _inverse_backward(inverse, d_inverse):
  d_a = -_einsum("...ji,...jk,...lk->...il", inverse, d_inverse, inverse)
  return (jnp.tril(d_a, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _to_chunks(x_BTU, size):
  """[B, T, U, ...] -> [T/C, B, U, C, ...], padded with zeros."""
  padded = pad_to_multiple(x_BTU, size, axis=1)
  chunks = padded.reshape(x_BTU.shape[0], -1, size, *x_BTU.shape[2:])
  return jnp.moveaxis(chunks, (1, 2), (0, 3))

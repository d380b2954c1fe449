"""Attention by blocks of keys with a running softmax, forward and backward.

Follows FlashAttention-2 (arXiv 2307.08691), with two differences: the
log-sum-exp is an output with a gradient of its own, so that parts merge
differentiably; and a block of keys that no query sees is skipped, so that the
empty slots of a bucketed state cost nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.prefix_attention.reference import visible
from pallas_kernels.shapes import wide_dtype
from pallas_kernels.varying import vary_like

_BLOCK = 512  # keys a step; scores are [B, N, T, H/N, _BLOCK]


def _attend(
    q_BTHK: jax.Array,
    k_BSNK: jax.Array,
    v_BSNV: jax.Array,
    q_positions_BT: jax.Array,
    k_positions_BS: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B,T,H,V] and log-sum-exp [B,T,H]."""
  with jax.named_scope("prefix_attention"):
    dtype = wide_dtype(q_BTHK.dtype)
    q = _group_heads(q_BTHK, k_BSNK.shape[2])
    keys = _Blocks(k_BSNK, v_BSNV, q_positions_BT, k_positions_BS)

    def step(carry, index):
      k, v, mask = keys.load(index)

      def update(carry):
        out, peak, total = carry
        scores = _scores(q, k, mask, scale, dtype)
        new_peak = jnp.maximum(peak, scores.max(-1))
        safe = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)
        weights = jnp.exp(scores - safe[..., None])
        decay = jnp.exp(peak - safe)
        out = out * decay[..., None] + jnp.einsum(
            "bntgs,bsnv->bntgv",
            weights.astype(v.dtype),
            v,
            preferred_element_type=dtype,
        )
        return out, new_peak, total * decay + weights.sum(-1)

      return jax.lax.cond(mask.any(), update, lambda same: same, carry), None

    rows = q.shape[:-1]
    empty = (
        jnp.zeros((*rows, v_BSNV.shape[-1]), dtype),
        jnp.full(rows, -jnp.inf, dtype),
        jnp.zeros(rows, dtype),
    )
    empty = vary_like(empty, q, k_BSNK, v_BSNV, q_positions_BT, k_positions_BS)
    (out, peak, total), _ = jax.lax.scan(step, empty, keys.indices)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
    return _join_heads(out / safe[..., None]), _join_heads(lse)


def _forward(q, k, v, q_positions, k_positions, scale):
  # Not `_attend`: jax.checkpoint differentiates this function as well, and its
  # scan would then keep the scores of every block of keys.
  out, lse = attend(q, k, v, q_positions, k_positions, scale)
  return (out, lse), (q, k, v, q_positions, k_positions, out, lse)


def _backward(scale, residuals, cotangents):
  """Recomputes the weights from the log-sum-exp, block by block."""
  q_BTHK, k_BSNK, v_BSNV, q_positions, k_positions, out, lse = residuals
  dtype = out.dtype
  with jax.named_scope("prefix_attention_backward"):
    heads = k_BSNK.shape[2]
    q = _group_heads(q_BTHK, heads)
    d_out, d_lse = (_group_heads(x, heads) for x in cotangents)
    out, lse = _group_heads(out, heads), _group_heads(lse, heads)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    # d scores = weights * (d weights - row), with both outputs' share in row.
    row = (d_out * out).sum(-1) - d_lse
    keys = _Blocks(k_BSNK, v_BSNV, q_positions, k_positions)
    d_out = d_out.astype(v_BSNV.dtype)

    def step(d_q, index):
      k, v, mask = keys.load(index)

      def update(d_q):
        weights = jnp.exp(_scores(q, k, mask, scale, dtype) - lse[..., None])
        d_weights = jnp.einsum(
            "bntgv,bsnv->bntgs", d_out, v, preferred_element_type=dtype
        )
        d_scores = scale * weights * (d_weights - row[..., None])
        d_scores = d_scores.astype(k.dtype)
        d_v = jnp.einsum("bntgs,bntgv->bsnv", weights.astype(v.dtype), d_out)
        d_k = jnp.einsum("bntgs,bntgk->bsnk", d_scores, q)
        d_q += jnp.einsum(
            "bntgs,bsnk->bntgk", d_scores, k, preferred_element_type=dtype
        )
        return d_q, (d_k, d_v)

      def skip(d_q):
        return d_q, vary_like((jnp.zeros_like(k), jnp.zeros_like(v)), d_q)

      return jax.lax.cond(mask.any(), update, skip, d_q)

    nothing = vary_like(
        jnp.zeros(q.shape, dtype), q, k_BSNK, q_positions, k_positions, d_out
    )
    d_q, (d_k, d_v) = jax.lax.scan(step, nothing, keys.indices)
    d_q = _join_heads(d_q).astype(q_BTHK.dtype)
    return d_q, keys.join(d_k), keys.join(d_v), None, None


attend = jax.custom_vjp(_attend, nondiff_argnums=(5,))
attend.defvjp(_forward, _backward)


class _Blocks:
  """Keys and values cut into blocks; the last one is padded with no key."""

  def __init__(self, k_BSNK, v_BSNV, q_positions_BT, k_positions_BS):
    self.slots = k_BSNK.shape[1]
    self.size = max(1, min(_BLOCK, self.slots))
    count = -(-self.slots // self.size)
    self.indices = jnp.arange(count, dtype=jnp.int32)
    # A stored state is a multiple of the block: nothing is copied here.
    pad = partial(pad_to_multiple, size=self.size, axis=1)
    self.k, self.v = pad(k_BSNK), pad(v_BSNV)
    self.k_positions = pad(k_positions_BS, value=-1)
    self.q_positions = q_positions_BT

  def load(self, index):
    k, v, positions = (
        jax.lax.dynamic_slice_in_dim(x, index * self.size, self.size, axis=1)
        for x in (self.k, self.v, self.k_positions)
    )
    return k, v, visible(self.q_positions, positions)

  def join(self, blocks):
    """[blocks, B, size, ...] -> [B, S, ...]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    joined = joined.reshape(joined.shape[0], -1, *joined.shape[3:])
    return joined[:, : self.slots]


def _scores(q_BNTGK, k_BSNK, mask_BTS, scale, dtype):
  scores = scale * jnp.einsum(
      "bntgk,bsnk->bntgs", q_BNTGK, k_BSNK, preferred_element_type=dtype
  )
  return jnp.where(mask_BTS[:, None, :, None, :], scores, -jnp.inf)


def _group_heads(x_BTH, heads):
  """[B, T, H, ...] -> [B, N, T, H/N, ...]."""
  grouped = x_BTH.reshape(*x_BTH.shape[:2], heads, -1, *x_BTH.shape[3:])
  return jnp.moveaxis(grouped, 2, 1)


def _join_heads(x_BNTG):
  """[B, N, T, H/N, ...] -> [B, T, H, ...]."""
  moved = jnp.moveaxis(x_BNTG, 1, 2)
  return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])

"""Attention by blocks of keys with a running softmax, forward and backward.

Follows FlashAttention-2 (arXiv 2307.08691), with three differences:

1. The log-sum-exp is an output with a gradient of its own, so that parts merge
   differentiably.
2. A block of keys that no query sees is skipped, so that the empty slots of a
   bucketed state cost nothing.
3. Keys are read from the stack of all layers, a block at a time, and so are
   their gradients' sums written: no array holds one layer of either.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.prefix_attention.reference import Sink, visible
from pallas_kernels.shapes import wide_dtype
from pallas_kernels.staging import read, write
from pallas_kernels.varying import vary_like

KEY_BLOCK = 512  # keys a step; scores are [B, N, T, H/N, KEY_BLOCK]


def _attend(
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
  with jax.named_scope("prefix_attention"):
    dtype = wide_dtype(q_BTHK.dtype)
    q = _group_heads(q_BTHK, k_LBSNK.shape[3])
    keys = _Blocks(k_LBSNK, v_LBSNV, q_positions_BT, k_positions_BS, layer)

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
        jnp.zeros((*rows, v_LBSNV.shape[-1]), dtype),
        jnp.full(rows, -jnp.inf, dtype),
        jnp.zeros(rows, dtype),
    )
    empty = vary_like(
        empty, q, k_LBSNK, v_LBSNV, q_positions_BT, k_positions_BS
    )
    (out, peak, total), _ = jax.lax.scan(step, empty, keys.indices)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
    return _join_heads(out / safe[..., None]), _join_heads(lse), sink


def _forward(q, k, v, sink, q_positions, k_positions, layer, scale):
  # Not `_attend`: jax.checkpoint differentiates this function as well, and its
  # scan would then keep the scores of every block of keys.
  out, lse, sink = attend(q, k, v, sink, q_positions, k_positions, layer, scale)
  kept = (q, k, v, q_positions, k_positions, layer, out, lse)
  return (out, lse, sink), kept


def _backward(scale, kept, cotangents):
  """Recomputes the weights from the log-sum-exp, block by block."""
  q_BTHK, k_LBSNK, v_LBSNV, q_positions, k_positions, layer, out, lse = kept
  d_out, d_lse, sums = cotangents
  dtype = out.dtype
  with jax.named_scope("prefix_attention_backward"):
    heads = k_LBSNK.shape[3]
    q, out, lse, d_out, d_lse = (
        _group_heads(x, heads) for x in (q_BTHK, out, lse, d_out, d_lse)
    )
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    # d scores = weights * (d weights - row), with both outputs' share in row.
    row = (d_out * out).sum(-1) - d_lse
    keys = _Blocks(k_LBSNK, v_LBSNV, q_positions, k_positions, layer)
    d_out = d_out.astype(v_LBSNV.dtype)
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def step(carry, index):
      d_q, sums = carry
      k, v, mask = keys.load(index)

      def update(d_q):
        weights = jnp.exp(_scores(q, k, mask, scale, dtype) - lse[..., None])
        d_weights = product("bntgv,bsnv->bntgs", d_out, v)
        d_scores = scale * weights * (d_weights - row[..., None])
        d_scores = d_scores.astype(k.dtype)
        d_q += product("bntgs,bsnk->bntgk", d_scores, k)
        if sums is None:
          return d_q, None
        d_k = product("bntgs,bntgk->bsnk", d_scores, q)
        d_v = product("bntgs,bntgv->bsnv", weights.astype(v.dtype), d_out)
        return d_q, (d_k, d_v)

      def skip(d_q):
        if sums is None:
          return d_q, None
        nothing = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
        return d_q, vary_like(nothing, d_q)

      d_q, d_block = jax.lax.cond(mask.any(), update, skip, d_q)
      if sums is not None:
        sums = jax.tree.map(partial(keys.add, index), sums, d_block)
      return (d_q, sums), None

    nothing = vary_like(
        jnp.zeros(q.shape, dtype), q, k_LBSNK, q_positions, k_positions, d_out
    )
    (d_q, sums), _ = jax.lax.scan(step, (nothing, sums), keys.indices)
    d_q = _join_heads(d_q).astype(q_BTHK.dtype)
    return d_q, None, None, sums, None, None, None


attend = jax.custom_vjp(_attend, nondiff_argnums=(7,))
attend.defvjp(_forward, _backward)


class _Blocks:
  """The keys and values of one layer, a block at a time.

  Where the blocks do not divide the slots, the last one begins earlier and
  hides what the one before it had: a pad would copy all layers.
  """

  def __init__(self, k_LBSNK, v_LBSNV, q_positions_BT, k_positions_BS, layer):
    self.slots = k_LBSNK.shape[2]
    self.size = max(1, min(KEY_BLOCK, self.slots))
    self.indices = jnp.arange(-(-self.slots // self.size), dtype=jnp.int32)
    self.k, self.v = k_LBSNK, v_LBSNV
    self.q_positions, self.k_positions = q_positions_BT, k_positions_BS
    self.layer = layer

  def load(self, index):
    """Returns keys and values [B, size, N, ...], and who sees them."""
    start = self._start(index)
    positions = jax.lax.dynamic_slice_in_dim(
        self.k_positions, start, self.size, axis=1
    )
    slot = start + jnp.arange(self.size, dtype=jnp.int32)
    positions = jnp.where((slot >= index * self.size)[None], positions, -1)
    k, v = (self._read(x, start)[0] for x in (self.k, self.v))
    return k, v, visible(self.q_positions, positions)

  def add(self, index, sums, block):
    """Adds [B, size, N, ...] to sums of all layers, in place."""
    start = self._start(index)
    new = self._read(sums, start).astype(block.dtype) + block[None]
    return write(sums, new, self._at(start))

  def _read(self, x, start):
    sizes = (1, x.shape[1], self.size, *x.shape[3:])
    return read(x, self._at(start), sizes)

  def _at(self, start):
    zero = jnp.int32(0)  # the indices must have one dtype
    return self.layer, zero, start, zero, zero

  def _start(self, index):
    return jnp.minimum(index * self.size, self.slots - self.size)


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

"""Attention to gathered latents, a tile of queries and of entries at a time.

Queries of a tile take as many steps as the largest of their counts needs, so
that time follows what is chosen on this shard, and nothing is ever dropped.
Each step gathers its rows from the stack of all layers. The backward pass walks
the same steps, recomputes the weights from the log-sum-exp, and adds the rows'
gradient to the sums in place.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import query_tiles
from pallas_kernels.entries import Entries
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.prefix_attention import Partial, merge
from pallas_kernels.shapes import wide_dtype
from pallas_kernels.staging import layer_stack, put_layer
from pallas_kernels.varying import vary_like


def _attend(
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
  with jax.named_scope("latent_attention"):
    stack, index = layer_stack(latents_LBSK, layer)
    dtype = wide_dtype(q_BTHK.dtype)

    def of_tile(tile):
      row, q_THK, slots_TJ, counts_T = tile
      entries = Entries(slots_TJ, counts_T)

      def step(number, total):
        slots, mask = entries.load(number)
        latents = _gather(stack, index, row, slots)
        scores = _scores(q_THK, latents, mask, scale, dtype)
        lse = jax.nn.logsumexp(scores, axis=-1)
        out = jnp.einsum(
            "thj,tjv->thv",
            _weights(scores, lse).astype(latents.dtype),
            latents[..., :value_dim],
            preferred_element_type=dtype,
        )
        return merge([total, Partial(out, lse)])

      heads = q_THK.shape[:-1]
      nothing = Partial(
          jnp.zeros((*heads, value_dim), dtype),
          jnp.full(heads, -jnp.inf, dtype),
      )
      nothing = vary_like(nothing, q_THK)
      return jax.lax.fori_loop(0, entries.steps, step, nothing)

    tiles = query_tiles.key_rows(q_BTHK), *map(
        query_tiles.split, (q_BTHK, slots_BTJ, counts_BT)
    )
    part = jax.lax.map(of_tile, tiles)
    out, lse = (query_tiles.join(x, q_BTHK) for x in part)
    return out, lse, sink


def _forward(q, latents, sink, slots, counts, layer, scale, value_dim):
  # Not `_attend`, for the reason that prefix attention has.
  out, lse, sink = attend(
      q, latents, sink, slots, counts, layer, scale, value_dim
  )
  return (out, lse, sink), (q, latents, slots, counts, layer, out, lse)


def _backward(scale, value_dim, kept, cotangents):
  q_BTHK, latents_LBSK, slots_BTJ, counts_BT, layer, out, lse = kept
  d_out, d_lse, sums_LBSK = cotangents
  dtype = out.dtype
  product = partial(jnp.einsum, preferred_element_type=dtype)
  with jax.named_scope("latent_attention_backward"):
    stack, index = layer_stack(latents_LBSK, layer)
    sums, sums_index = None, None
    if sums_LBSK is not None:
      sums, sums_index = layer_stack(sums_LBSK, layer)
    # d scores = weights * (d weights - rest), with both outputs' share in rest.
    rest = (d_out * out).sum(-1) - d_lse

    def of_tile(sums, tile):
      row, q_THK, slots_TJ, counts_T, d_out_THV, lse_TH, rest_TH = tile
      entries = Entries(slots_TJ, counts_T)

      def step(number, carry):
        d_q, sums = carry
        slots, mask = entries.load(number)
        latents = _gather(stack, index, row, slots)
        values = latents[..., :value_dim]
        weights = _weights(_scores(q_THK, latents, mask, scale, dtype), lse_TH)
        d_weights = product("thv,tjv->thj", d_out_THV, values)
        d_scores = scale * weights * (d_weights - rest_TH[..., None])
        d_scores = d_scores.astype(stack.dtype)
        d_q += product("thj,tjk->thk", d_scores, latents)
        if sums is None:
          return d_q, None
        d_latents = product("thj,thk->tjk", d_scores, q_THK)
        weights = weights.astype(stack.dtype)
        d_values = product("thj,thv->tjv", weights, d_out_THV)
        d_latents += pad_to_multiple(d_values, latents.shape[-1], axis=2)
        # Dropped: zeros that would queue up at the slot of what is none.
        slots = jnp.where(mask, slots, sums.shape[2])
        sums = sums.at[sums_index, row, slots].add(
            d_latents.astype(sums.dtype), mode="drop"
        )
        return d_q, sums

      nothing = vary_like(jnp.zeros(q_THK.shape, dtype), q_THK)
      d_q, sums = jax.lax.fori_loop(0, entries.steps, step, (nothing, sums))
      return sums, d_q.astype(q_THK.dtype)

    per_query = q_BTHK, slots_BTJ, counts_BT, d_out.astype(stack.dtype)
    per_query = map(query_tiles.split, (*per_query, lse, rest))
    tiles = query_tiles.key_rows(q_BTHK), *per_query
    sums, d_q = jax.lax.scan(of_tile, sums, tiles)
    put = lambda whole, stack: put_layer(whole, stack, layer)
    sums = jax.tree.map(put, sums_LBSK, sums)  # or both are None
    return query_tiles.join(d_q, q_BTHK), None, sums, None, None, None


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
  with jax.named_scope("latent_attention_weights"):
    stack, index = layer_stack(latents_LBSK, layer)

    def of_tile(tile):
      row, q_THK, lse_TH, slots_TJ, counts_T = tile

      def value(slots, mask):
        latents = _gather(stack, index, row, slots)
        scores = _scores(q_THK, latents, mask, scale, lse_TH.dtype)
        return _weights(scores, lse_TH).mean(1)

      nothing = jnp.zeros(slots_TJ.shape, lse_TH.dtype)
      nothing = vary_like(nothing, q_THK, slots_TJ)
      return Entries(slots_TJ, counts_T).map(value, nothing)

    tiles = query_tiles.key_rows(q_BTHK), *map(
        query_tiles.split, (q_BTHK, lse_BTH, slots_BTJ, counts_BT)
    )
    return query_tiles.join(jax.lax.map(of_tile, tiles), q_BTHK)


attend = jax.custom_vjp(_attend, nondiff_argnums=(6, 7))
attend.defvjp(_forward, _backward)


def _gather(stack_LBSK, layer, row, slots_TJ):
  return stack_LBSK.at[layer, row, slots_TJ].get(mode="clip")


def _scores(q_THK, latents_TJK, mask_TJ, scale, dtype):
  scores_THJ = scale * jnp.einsum(
      "thk,tjk->thj", q_THK, latents_TJK, preferred_element_type=dtype
  )
  return jnp.where(mask_TJ[:, None], scores_THJ, -jnp.inf)


def _weights(scores_THJ, lse_TH):
  lse_TH = jnp.where(jnp.isfinite(lse_TH), lse_TH, 0.0)
  return jnp.exp(scores_THJ - lse_TH[..., None])

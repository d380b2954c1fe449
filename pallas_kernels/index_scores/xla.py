"""Scores of gathered keys, a tile of queries and of entries at a time.

The backward pass walks the same tiles, makes the products again, and adds the
keys' gradient to the sums in place.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import query_tiles
from pallas_kernels.entries import Entries
from pallas_kernels.staging import layer_stack, put_layer
from pallas_kernels.varying import vary_like


def _score(
    q_BTIK: jax.Array,
    weights_BTI: jax.Array,
    keys_LBSK: jax.Array,
    sink: jax.Array | None,
    slots_BTJ: jax.Array,
    counts_BT: jax.Array,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the scores [B,T,J], and the sink."""
  with jax.named_scope("index_scores"):
    stack, index = layer_stack(keys_LBSK, layer)

    def of_tile(tile):
      row, q_TIK, weights_TI, slots_TJ, counts_T = tile

      def value(slots, mask):
        keys = stack.at[index, row, slots].get(mode="clip")
        heads_TIJ = jax.nn.relu(_products(q_TIK, keys, scale, weights_TI.dtype))
        scores = (weights_TI[..., None] * heads_TIJ).sum(1)
        return jnp.where(mask, scores, -jnp.inf)

      nothing = jnp.full(slots_TJ.shape, -jnp.inf, weights_TI.dtype)
      nothing = vary_like(nothing, q_TIK, slots_TJ)
      return Entries(slots_TJ, counts_T).map(value, nothing)

    tiles = query_tiles.key_rows(q_BTIK), *map(
        query_tiles.split, (q_BTIK, weights_BTI, slots_BTJ, counts_BT)
    )
    scores = query_tiles.join(jax.lax.map(of_tile, tiles), q_BTIK)
    return scores, sink


def _forward(q, weights, keys, sink, slots, counts, layer, scale):
  outputs = score(q, weights, keys, sink, slots, counts, layer, scale)
  return outputs, (q, weights, keys, slots, counts, layer)


def _backward(scale, kept, cotangents):
  q_BTIK, weights_BTI, keys_LBSK, slots_BTJ, counts_BT, layer = kept
  d_scores_BTJ, sums_LBSK = cotangents
  dtype = weights_BTI.dtype
  product = partial(jnp.einsum, preferred_element_type=dtype)
  with jax.named_scope("index_scores_backward"):
    stack, index = layer_stack(keys_LBSK, layer)
    sums, sums_index = None, None
    if sums_LBSK is not None:
      sums, sums_index = layer_stack(sums_LBSK, layer)

    def of_tile(sums, tile):
      row, q_TIK, weights_TI, slots_TJ, counts_T, d_scores_TJ = tile
      entries = Entries(slots_TJ, counts_T)

      def step(number, carry):
        d_q, d_weights, sums = carry
        slots, mask = entries.load(number)
        keys = stack.at[index, row, slots].get(mode="clip")
        products = _products(q_TIK, keys, scale, dtype)
        d_scores = jnp.where(mask, entries.cut(d_scores_TJ, number), 0.0)
        d_scores = d_scores[:, None]
        d_weights += (d_scores * jax.nn.relu(products)).sum(-1)
        d_products = jnp.where(
            products > 0, scale * weights_TI[..., None] * d_scores, 0.0
        ).astype(stack.dtype)
        d_q += product("tij,tjk->tik", d_products, keys)
        if sums is None:
          return d_q, d_weights, None
        d_keys = product("tij,tik->tjk", d_products, q_TIK)
        # Dropped: zeros that would queue up at the slot of what is none.
        slots = jnp.where(mask, slots, sums.shape[2])
        sums = sums.at[sums_index, row, slots].add(
            d_keys.astype(sums.dtype), mode="drop"
        )
        return d_q, d_weights, sums

      nothing = jnp.zeros(q_TIK.shape, dtype), jnp.zeros_like(weights_TI)
      nothing = vary_like(nothing, q_TIK)
      d_q, d_weights, sums = jax.lax.fori_loop(
          0, entries.steps, step, (*nothing, sums)
      )
      return sums, (d_q.astype(q_TIK.dtype), d_weights)

    per_query = q_BTIK, weights_BTI, slots_BTJ, counts_BT, d_scores_BTJ
    tiles = query_tiles.key_rows(q_BTIK), *map(query_tiles.split, per_query)
    sums, found = jax.lax.scan(of_tile, sums, tiles)
    d_q, d_weights = (query_tiles.join(x, q_BTIK) for x in found)
    put = lambda whole, stack: put_layer(whole, stack, layer)
    sums = jax.tree.map(put, sums_LBSK, sums)  # or both are None
    return d_q, d_weights, None, sums, None, None, None


score = jax.custom_vjp(_score, nondiff_argnums=(7,))
score.defvjp(_forward, _backward)


def _products(q_TIK, keys_TJK, scale, dtype):
  return scale * jnp.einsum(
      "tik,tjk->tij", q_TIK, keys_TJK, preferred_element_type=dtype
  )

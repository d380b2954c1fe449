"""The oracle: the scores of all keys at once, and one sort."""

import jax
import jax.numpy as jnp

from pallas_kernels.index_topk.candidates import NO_POSITION, Candidates, rank
from pallas_kernels.prefix_attention.reference import visible
from pallas_kernels.shapes import wide_dtype


def search(
    q_BTIK: jax.Array,
    weights_BTI: jax.Array,
    keys_LBSK: jax.Array,
    q_positions_BT: jax.Array,
    k_positions_BS: jax.Array,
    layer: jax.Array,
    k: int,
    scale: float,
) -> Candidates:
  """Returns the min(k, S) best of each query, [B,T,J]."""
  slots_S = jnp.arange(keys_LBSK.shape[2], dtype=jnp.int32)
  found = score(
      q_BTIK,
      weights_BTI,
      keys_LBSK[layer],
      q_positions_BT,
      k_positions_BS,
      slots_S,
      scale,
  )
  return Candidates(*rank(*found, count=k))


def score(
    q_BTIK: jax.Array,
    weights_BTI: jax.Array,
    keys_BSK: jax.Array,
    q_positions_BT: jax.Array,
    k_positions_BS: jax.Array,
    slots_S: jax.Array,
    scale: float,
) -> Candidates:
  """Returns an entry for each key [B,T,S], in order of the slots."""
  dtype = wide_dtype(q_BTIK.dtype)
  products_BTIS = jnp.einsum(
      "btik,bsk->btis", q_BTIK, keys_BSK, preferred_element_type=dtype
  )
  weights_BTI1 = weights_BTI.astype(dtype)[..., None]
  # A sum, not a product of matrices, which may round its factors.
  scores_BTS = (weights_BTI1 * jax.nn.relu(scale * products_BTIS)).sum(2)
  scores_BTS = jnp.where(scores_BTS == 0, 0.0, scores_BTS)  # no -0.0
  mask_BTS = visible(q_positions_BT, k_positions_BS)
  return Candidates(
      jnp.where(mask_BTS, scores_BTS, -jnp.inf),
      jnp.where(mask_BTS, k_positions_BS[:, None], NO_POSITION),
      jnp.where(mask_BTS, slots_S[None, None], 0),
  )

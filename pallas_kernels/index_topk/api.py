"""Public function of the indexer's search over one source on one shard."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.index_topk import reference, xla
from pallas_kernels.index_topk.candidates import Candidates
from pallas_kernels.prefix_attention.api import Implementation
from pallas_kernels.shapes import typed, wide_dtype


@typed
def index_topk(
    q: Float[Array, "B T I K"],
    weights: Float[Array, "B T I"],
    keys: Float[Array, "L M S K"],
    *,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "M S"],
    k: int,
    scale: float,
    implementation: Implementation = None,
) -> Candidates:
  """Finds the k keys that score highest for each query, exactly.

      score(t, s) = sum_i weights_ti relu(scale q_ti.k_s)

  among the keys with 0 <= pos(s) <= pos(t). Of equal scores, which are common
  as a ReLU makes exact zeros, the lower position comes first: the result
  depends on no slot order, tile, or split. It is a constant for gradients.

  Args:
    q: queries of the indexer's heads.
    weights: of the heads, of any sign.
    keys: of all layers; of those in host memory one layer at a time comes to
      the device. Each of the M rows serves B / M consecutive query rows. S may
      be 0.
    layer: which of the layers.
    q_positions: position of each query; -1 for padding, which sees nothing.
    k_positions: position of each key; -1 for an empty slot. A row has no
      position twice.
    k: how many, at least 1.
    scale: factor on the products.
    implementation: "xla" works by tiles, "reference" holds the [T, I, S]
      products; None picks the best.

  Returns:
    J = min(k, S) candidates of each query, with scores in float32 or wider.

  Raises:
    ValueError: if k < 1, or B is no multiple of M.

  Source: the lightning indexer of DeepSeek-V3.2-Exp, equation 1. Deviations:
    `scale`, and the order of equal scores.
  """
  batch, rows = q.shape[0], keys.shape[1]
  if batch % rows:
    raise ValueError(
        f"q.shape={q.shape} has {batch} rows: want a multiple of the {rows} key"
        f" rows of keys.shape={keys.shape}"
    )
  if k < 1:
    raise ValueError(f"k={k}: want at least 1")
  if not keys.shape[2]:  # a prompt of one token
    none = jnp.zeros((*q.shape[:2], 0), jnp.int32)
    return Candidates(none.astype(wide_dtype(q.dtype)), none, none)
  search = reference.search if implementation == "reference" else xla.search
  q, weights, keys = jax.lax.stop_gradient((q, weights, keys))
  found = search(
      q.reshape(rows, -1, *q.shape[2:]),
      weights.reshape(rows, -1, q.shape[2]),
      keys,
      q_positions.reshape(rows, -1),
      k_positions,
      layer,
      k,
      scale,
  )
  return jax.tree.map(lambda x: x.reshape(*q.shape[:2], -1), found)

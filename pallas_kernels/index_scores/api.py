"""Public function of an indexer's scores of chosen slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.index_scores import reference, xla
from pallas_kernels.prefix_attention.api import Implementation
from pallas_kernels.shapes import typed, wide_dtype
from pallas_kernels.varying import vary_like


@typed
def index_scores(
    q: Float[Array, "B T I K"],
    weights: Float[Array, "B T I"],
    keys: Float[Array, "L M S K"],
    sink: Float[Array, "L M S K"] | None,
    *,
    layer: Int[Array, ""],
    slots: Int[Array, "B T J"],
    counts: Int[Array, "B T"],
    scale: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T J"], jax.Array | None]:
  """Scores, for each query, the keys in the first `counts` of its `slots`.

      score_tj = sum_i weights_ti relu(scale q_ti.k_j)

  the score of `index_topk`, but with a gradient: to q, to the weights, and to
  the keys, whose share is summed into the sink as in `latent_attention`.

  Args:
    q: queries of the indexer's heads.
    weights: of the heads, of any sign.
    keys: of all layers. Each of the M rows serves B / M consecutive query rows.
    sink: a stand-in for the keys whose values are never read; None if their
      gradient is not wanted.
    layer: which of the layers.
    slots: what each query chose, none twice; entries from counts on are of no
      meaning. J may be 0.
    counts: in [0, J].
    scale: factor on the products.
    implementation: "xla" gathers a tile of entries at a time, "reference" all;
      None picks the best.

  Returns:
    The scores in float32 or wider, -inf from counts on, and the sink.

  Raises:
    ValueError: if B is no multiple of M.

  Source: the lightning indexer of DeepSeek-V3.2-Exp, equation 1. Deviation:
    `scale`.
  """
  batch, rows = q.shape[0], keys.shape[1]
  if batch % rows:
    raise ValueError(
        f"q.shape={q.shape} has {batch} rows: want a multiple of the {rows} key"
        f" rows of keys.shape={keys.shape}"
    )
  dtype = wide_dtype(q.dtype)
  if not slots.shape[2]:  # a prompt of one token
    return jnp.zeros(slots.shape, dtype), sink
  score = reference.score if implementation == "reference" else xla.score
  q, weights, sink = vary_like(
      (q, weights.astype(dtype), sink), q, weights, keys, slots, counts
  )
  by_row = lambda x: x.reshape(rows, -1, *x.shape[2:])
  scores, sink = score(
      *(by_row(q), by_row(weights), keys, sink, by_row(slots), by_row(counts)),
      layer,
      scale,
  )
  return scores.reshape(slots.shape), sink

"""Public function of absorbed latent attention to chosen slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_attention import reference, xla
from pallas_kernels.prefix_attention import Partial
from pallas_kernels.prefix_attention.api import Implementation
from pallas_kernels.shapes import typed, wide_dtype
from pallas_kernels.varying import vary_like


@typed
def latent_attention(
    q: Float[Array, "B T H K"],
    latents: Float[Array, "L M S K"],
    sink: Float[Array, "L M S K"] | None,
    *,
    layer: Int[Array, ""],
    slots: Int[Array, "B T J"],
    counts: Int[Array, "B T"],
    scale: float,
    value_dim: int,
    implementation: Implementation = None,
) -> tuple[Partial, jax.Array | None]:
  """Attends, for each query, to the first `counts` of its `slots`.

      out_t = sum_j softmax_j(scale q_t.c_j) c_j[:value_dim],   c_j the latent
      in slot slots_tj,   j < counts_t

  All heads share a latent, whose first entries are the value as well. Stored
  latents are constants; their gradient is summed into the sink, as in
  `prefix_attention.stored_attention`. Whoever wants it as an ordinary gradient
  passes the latents themselves, cast to the dtype of the sums, as the sink.

  Where they lie in host memory, one layer at a time comes to the device.

  Args:
    q: absorbed queries.
    latents: of all layers. Each of the M rows serves B / M consecutive query
      rows.
    sink: a stand-in for the latents whose values are never read; None if their
      gradient is not wanted, which then costs nothing.
    layer: which of the layers.
    slots: what each query attends to, none twice; entries from counts on are
      of no meaning. J may be 0.
    counts: in [0, J].
    scale: factor on the scores.
    value_dim: how many of a latent's K entries are its value.
    implementation: "xla" gathers a tile of entries at a time, as many tiles as
      the counts need; "reference" holds the [T, S] scores; None picks the best.

  Returns:
    The part, with out [B, T, H, value_dim], and the sink. A query whose count
    is 0 has out 0 and lse -inf.

  Raises:
    ValueError: if B is no multiple of M, or value_dim not in [1, K].

  Source: Multi-head Latent Attention of DeepSeek-V2 (arXiv 2405.04434), with
    the up-projections absorbed.
  """
  _check_rows(q, latents)
  if not 1 <= value_dim <= q.shape[3]:
    raise ValueError(
        f"value_dim={value_dim}: want one in [1, {q.shape[3]}], the entries of"
        " a latent"
    )
  if not slots.shape[2]:  # a prompt of one token
    dtype = wide_dtype(q.dtype)
    out = jnp.zeros((*q.shape[:3], value_dim), dtype)
    return Partial(out, jnp.full(q.shape[:3], -jnp.inf, dtype)), sink
  attend = reference.attend if implementation == "reference" else xla.attend
  # Cotangents are summed over the mesh here, and not for every tile; those of a
  # sink that was threaded through an earlier layer, there.
  q, sink = vary_like((q, sink), q, latents, slots, counts)
  by_row = lambda x: x.reshape(latents.shape[1], -1, *x.shape[2:])
  out, lse, sink = attend(
      by_row(q),
      latents,
      sink,
      by_row(slots),
      by_row(counts),
      layer,
      scale,
      value_dim,
  )
  out = out.reshape(*q.shape[:3], value_dim)
  return Partial(out, lse.reshape(q.shape[:3])), sink


@typed
def latent_attention_weights(
    q: Float[Array, "B T H K"],
    latents: Float[Array, "L M S K"],
    lse: Float[Array, "B T H"],
    *,
    layer: Int[Array, ""],
    slots: Int[Array, "B T J"],
    counts: Int[Array, "B T"],
    scale: float,
    implementation: Implementation = None,
) -> Float[Array, "B T J"]:
  """Returns the weight of each entry, averaged over the heads.

      w_tj = mean_h exp(scale q_th.c_j - lse_th),   j < counts_t

  It is a constant for gradients.

  Args:
    q: as in `latent_attention`, like the others.
    latents: of all layers.
    lse: log-sum-exp of the scores, over whatever the weights are shared among:
      those of all sources and shards.
    layer: which of the layers.
    slots: what each query attends to.
    counts: how many of them.
    scale: factor on the scores.
    implementation: as in `latent_attention`.

  Returns:
    The weights, in the dtype of `lse`; from counts on they are 0.

  Raises:
    ValueError: if B is no multiple of M.
  """
  _check_rows(q, latents)
  if not slots.shape[2]:
    return jnp.zeros(slots.shape, lse.dtype)
  weights = reference.weights if implementation == "reference" else xla.weights
  q, latents, lse = jax.lax.stop_gradient((q, latents, lse))
  by_row = lambda x: x.reshape(latents.shape[1], -1, *x.shape[2:])
  found = weights(
      *(by_row(q), latents, by_row(lse), by_row(slots), by_row(counts)),
      layer,
      scale,
  )
  return found.reshape(slots.shape)


def _check_rows(q, latents):
  batch, rows = q.shape[0], latents.shape[1]
  if batch % rows:
    raise ValueError(
        f"q.shape={q.shape} has {batch} rows: want a multiple of the {rows}"
        f" latent rows of latents.shape={latents.shape}"
    )

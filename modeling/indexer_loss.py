"""What trains an indexer: to score as the attention that it serves weighs.

    loss_t = KL(p_t || softmax(score_t)),   both over what t attends to,
    p_t    = the weights of the layer's attention, averaged over heads

The attention teaches and does not learn: its weights are constants, and so is
what the indexer reads. Only an indexer's own weights have a gradient. It also
comes through the index keys of earlier segments, by their sinks.

Source: DeepSeek-V3.2-Exp, equation 4 (the sparse stage). The teacher is the
attention of the layer that has the indexer, not of those that share its choice.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from modeling.indexer import Choice, choice_specs
from modeling.layer_state import Prefix
from modeling.mla import MLA
from modeling.rope import Rotation
from modeling.sharding import spec
from pallas_kernels.index_scores import index_scores
from pallas_kernels.latent_attention import (
    latent_attention,
    latent_attention_weights,
)
from pallas_kernels.shapes import wide

_OF_HEADS = ("batch", "time", None, None)
_OF_TOKENS = ("batch", "time", None)


def indexer_loss(
    attention: MLA,
    x_BTD: jax.Array,
    query_latent_BTZ: jax.Array,
    key_BTK: jax.Array,
    *,
    rotation: Rotation,
    prefixes: Sequence[Prefix],
    layer: jax.Array,
    index: jax.Array,
    choice: Choice,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
  """Returns the loss [B,T] of a layer's tokens, in nats, and the sinks.

  Args:
    attention: of a layer with an indexer.
    x_BTD: its input, normed; a constant, like the next.
    query_latent_BTZ: the latents of its queries, normed.
    key_BTK: its index keys, made of that input.
    rotation: rope at the tokens' positions.
    prefixes: what they follow. Sinks are those of index keys.
    layer: [] int32, number of the layer.
    index: [] int32, its number among those with an indexer.
    choice: what each token attends to. One that attends to nothing, as padding
      does, has loss 0.
  """
  indexer = attention.indexer
  assert indexer is not None, "made with one"
  x_BTD, query_latent_BTZ = jax.lax.stop_gradient((x_BTD, query_latent_BTZ))
  q_index, weights = indexer.queries(x_BTD, query_latent_BTZ, rotation)
  taught = attention.absorbed_query(query_latent_BTZ, rotation)
  latent = attention.latents(x_BTD, rotation)
  taught, latent = jax.lax.stop_gradient((taught, latent))
  stored = tuple(prefixes)

  def on_shard(
      q, latent, q_index, weights, key, prefixes, layer, index, choice
  ):
    q, q_index, weights = map(_of_all_shards, (q, q_index, weights))
    own = jnp.zeros_like(layer)
    # Of each: latents, their layer; index keys, their sink, their layer.
    sources = [(latent[None], own, key[None], wide(key)[None], own)]
    for prefix in prefixes:
      slots, sink = prefix.slots, prefix.sink and prefix.sink.index_key
      sources.append((slots.latent, layer, slots.index_key, sink, index))
    entries = [
        dict(slots=slots[0], counts=counts[0, ..., 0])
        for slots, counts in zip(choice.slots, choice.counts, strict=True)
    ]
    scale = attention.config.qk_head_dim**-0.5
    parts, scores, sinks = [], [], []
    for (latents, layer_, keys, sink, index_), chosen in zip(
        sources, entries, strict=True
    ):
      # Of its output only the log-sum-exp is wanted, of the fewest values.
      part, _ = latent_attention(
          q, latents, None, layer=layer_, scale=scale, value_dim=1, **chosen
      )
      parts.append(part.lse)
      score, sink = index_scores(
          q_index,
          weights,
          keys,
          sink,
          layer=index_,
          scale=indexer.size**-0.5,
          **chosen,
      )
      scores.append(score)
      sinks.append(sink)
    lse = _log_sum_exp(jnp.stack(parts, -1))
    score_lse = _log_sum_exp(jnp.concatenate(scores, -1))
    total = jnp.zeros_like(score_lse)
    for (latents, layer_, *_), chosen, score in zip(
        sources, entries, scores, strict=True
    ):
      p = latent_attention_weights(
          q, latents, lse, layer=layer_, scale=scale, **chosen
      )
      total += _divergence(p, score, score_lse[..., None]).sum(-1)
    loss = jax.lax.psum_scatter(
        total, "context", scatter_dimension=1, tiled=True
    )
    return loss, tuple(sinks[1:])

  specs = tuple(prefix.specs for prefix in stored)
  of_heads, of_tokens = spec(_OF_HEADS), spec(_OF_TOKENS)
  scalar = spec(())
  with jax.named_scope("indexer_loss"):
    return jax.shard_map(
        on_shard,
        mesh=attention.mesh,
        in_specs=(
            *(of_heads, of_tokens, of_heads, of_tokens, of_tokens),
            *(specs, scalar, scalar, choice_specs()),
        ),
        out_specs=(spec(("batch", "time")), tuple(x.sink for x in specs)),
    )(
        *(taught, latent, q_index, weights, key_BTK),
        *(stored, layer, index, choice),
    )


def _divergence(p, score, score_lse):
  """Returns p (log p - log softmax(score)), 0 where p is; p is a constant."""
  return jnp.where(p > 0, p * (jnp.log(p) - (score - score_lse)), 0.0)


def _of_all_shards(x_BT):
  return jax.lax.all_gather(x_BT, "context", axis=1, tiled=True)


def _log_sum_exp(x):
  """Sums over the last axis and all shards; 0 where all entries are -inf."""
  peak = jax.lax.pmax(jax.lax.stop_gradient(x.max(-1)), "context")
  peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
  total = jax.lax.psum(jnp.exp(x - peak[..., None]).sum(-1), "context")
  return peak + jnp.log(jnp.where(total > 0, total, 1.0))

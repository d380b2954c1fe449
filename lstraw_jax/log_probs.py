"""Log-probabilities of given tokens, without logits for all of them at once.

1. Tokens that carry loss are moved to the front; the others are never
   projected.
2. The head runs on a few tokens at a time, in float32, rematerialised in the
   backward pass: no [T, vocab] array exists, forward or backward. Over a mesh
   each shard has all these tokens and its part of the vocabulary.
3. Results go back to their places; the others are 0.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from modeling.models import Model
from modeling.sharding import constrain
from pallas_kernels.padding import pad_to_multiple
from pallas_kernels.shapes import typed, wide_dtype


class TokenScores(NamedTuple):
  """Scores of each token, 0 where nothing was asked."""

  log_probs: jax.Array  # [B, T] float32 or wider, <= 0, nats
  entropy: jax.Array  # [B, T] same, of the whole distribution, nats


@typed
def token_log_probs(
    model: Model,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
    *,
    temperature: float,
    chunk_tokens: int,
) -> TokenScores:
  """Returns log softmax(logits / temperature)[target] and the entropy.

  Args:
    model: owner of the head.
    hidden: output of the model's last norm.
    targets: the token predicted from each hidden state.
    keep: False where no score is needed.
    temperature: that of the sampler, > 0.
    chunk_tokens: tokens of each row projected at once; the result does not
      depend on it.
  """
  batch, count = keep.shape
  chunk = min(chunk_tokens, count)
  hidden = constrain(hidden, model.mesh, ("batch", None, None))
  order = jnp.argsort(~keep, axis=1, stable=True)

  def by_chunk(x_BT):
    # Padding repeats token 0 and keeps nothing.
    padded = pad_to_multiple(x_BT, chunk, axis=1)
    return jnp.moveaxis(padded.reshape(batch, -1, chunk), 1, 0)

  @partial(jax.checkpoint, prevent_cse=False)
  def scores(inputs):
    index, kept = inputs
    x = jnp.take_along_axis(hidden, index[..., None], axis=1)
    # Masked going in as well: a zero cotangent times NaN would be NaN.
    x = jnp.where(kept[..., None], x, 0.0)
    target = jnp.take_along_axis(targets, index, axis=1)

    def project():
      logits = model.logits(x) / temperature
      logits = constrain(logits, model.mesh, ("batch", None, "vocab"))
      total = jax.nn.logsumexp(logits, axis=-1)
      picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
      # Not total - E[logits]: of large logits that is the difference of two
      # large numbers, and may be negative.
      log_shares = logits - total[..., None]
      entropy = -(jnp.exp(log_shares) * log_shares).sum(-1)
      return TokenScores(
          jnp.where(kept, picked - total, 0.0), jnp.where(kept, entropy, 0.0)
      )

    zeros = jnp.zeros(kept.shape, wide_dtype(x.dtype))
    return jax.lax.cond(kept.any(), project, lambda: TokenScores(zeros, zeros))

  kept = jnp.take_along_axis(keep, order, axis=1)
  with jax.named_scope("token_log_probs"):
    found = jax.lax.map(scores, (by_chunk(order), by_chunk(kept)))
  back = jnp.argsort(order, axis=1)

  def in_place(x_nBC):
    x_BT = jnp.moveaxis(x_nBC, 0, 1).reshape(batch, -1)
    return jnp.take_along_axis(x_BT, back, axis=1)

  return jax.tree.map(in_place, found)

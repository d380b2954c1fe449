"""Log-probabilities of given tokens, without logits for all of them at once.

1. Rows that carry loss are moved to the front; the others are never projected.
2. The head runs on a few rows at a time, in float32, rematerialised in the
   backward pass: no [T, vocab] array exists, forward or backward.
3. Results go back to their places; the others are 0.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from modeling.qwen3_5 import Qwen3_5
from pallas_kernels.shapes import typed, wide_dtype


class TokenScores(NamedTuple):
  """Scores of each token, 0 where nothing was asked."""

  log_probs: jax.Array  # [B, T] float32 or wider, <= 0, nats
  entropy: jax.Array  # [B, T] same, of the whole distribution, nats


@typed
def token_log_probs(
    model: Qwen3_5,
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
    chunk_tokens: rows projected at once; the result does not depend on it.
  """
  rows = hidden.reshape(-1, hidden.shape[-1])
  count = rows.shape[0]
  chunk = min(chunk_tokens, count)
  order = jnp.argsort(~keep.reshape(-1), stable=True)
  # Padding repeats row 0 and keeps nothing.
  padded = jnp.pad(order, (0, -count % chunk))
  kept = jnp.pad(keep.reshape(-1)[order], (0, -count % chunk))
  by_chunk = lambda x: x.reshape(-1, chunk, *x.shape[1:])

  @partial(jax.checkpoint, prevent_cse=False)
  def scores(inputs):
    index, kept = inputs
    # Masked going in as well: a zero cotangent times NaN would be NaN.
    x = jnp.where(kept[:, None], rows[index], 0.0)
    target = targets.reshape(-1)[index]

    def project():
      logits = model.logits(x) / temperature
      total = jax.nn.logsumexp(logits, axis=-1)
      picked = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
      # Not total - E[logits]: of large logits that is the difference of two
      # large numbers, and may be negative.
      log_shares = logits - total[:, None]
      entropy = -(jnp.exp(log_shares) * log_shares).sum(-1)
      return TokenScores(
          jnp.where(kept, picked - total, 0.0), jnp.where(kept, entropy, 0.0)
      )

    zeros = jnp.zeros((chunk,), wide_dtype(x.dtype))
    return jax.lax.cond(kept.any(), project, lambda: TokenScores(zeros, zeros))

  with jax.named_scope("token_log_probs"):
    found = jax.lax.map(scores, (by_chunk(padded), by_chunk(kept)))
  back = jnp.argsort(order)
  return jax.tree.map(
      lambda x: x.reshape(-1)[:count][back].reshape(keep.shape), found
  )

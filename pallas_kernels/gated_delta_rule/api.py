"""Public function of the gated delta rule."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_delta_rule import reference, xla
from pallas_kernels.shapes import typed, wide


@typed
def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T U V"],
    *,
    g: Float[Array, "B T U"],
    beta: Float[Array, "B T U"],
    initial_state: Float[Array, "B U K V"],
    implementation: Literal["xla", "reference"] | None = None,
) -> tuple[Float[Array, "B T U V"], Float[Array, "B U K V"]]:
  """Runs, for every value head, the recurrence

      S   <- exp(g_t) S
      S   <- S + k_t (beta_t (v_t - S^T k_t))^T
      o_t  = S^T q_t

  A token with g = 0, beta = 0 leaves the state as it is: that is padding.

  Args:
    q: queries, already normalised and scaled.
    k: keys, already normalised.
    v: values. Value head u uses key head u // (U / H).
    g: log-decay, <= 0.
    beta: how much of the old value is replaced, in [0, 1].
    initial_state: S before the first token, float32 or wider.
    implementation: "xla" works by chunks of 64 tokens, "reference" token by
      token; None picks the best.

  Returns:
    o and the state after the last token, both in float32 or wider.

  Raises:
    ValueError: if U is no multiple of H.

  Source: Yang et al., Gated Delta Networks (arXiv 2412.06464).
  """
  if v.shape[2] % q.shape[2]:
    raise ValueError(
        f"v.shape={v.shape} has {v.shape[2]} value heads: want a multiple of"
        f" the {q.shape[2]} key heads of q.shape={q.shape}"
    )
  run = reference.run if implementation == "reference" else xla.run
  repeats = v.shape[2] // q.shape[2]
  q, k = (jnp.repeat(wide(x), repeats, axis=2) for x in (q, k))
  with jax.named_scope("gated_delta_rule"):
    return run(q, k, wide(v), wide(g), wide(beta), wide(initial_state))

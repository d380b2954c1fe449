"""Partial attention with its log-sum-exp, and the exact merge of such parts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import shapes
from pallas_kernels.prefix_attention import reference, xla


class Partial(NamedTuple):
  """Attention over some of the keys: normalised output and log-sum-exp.

  Rows that see no key have `out` 0 and `lse` -inf.
  """

  out: jax.Array  # [B, T, H, V] float32 or wider
  lse: jax.Array  # [B, T, H] same dtype


@shapes.typed
def prefix_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "M S N K"],
    v: Float[Array, "M S N V"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "M S"],
    scale: float,
    implementation: Literal["xla", "reference"] | None = None,
) -> Partial:
  """Attends to every key whose position is in [0, position of the query].

      out_t = sum_s softmax_s(scale q_t.k_s) v_s,   0 <= pos(s) <= pos(t)

  Masks are read from positions and never from indices, so that padding
  (position -1), empty slots, any slot order and any split of the keys over
  several calls need no other argument. Head h uses key head h // (H / N).

  Args:
    q: queries.
    k: keys. Each of the M rows serves B / M consecutive query rows, so that a
      group's branches share one stored prompt without a copy.
    v: values.
    q_positions: position of each query; -1 for padding, which sees nothing.
    k_positions: position of each key; -1 for an empty slot.
    scale: factor on the scores.
    implementation: "xla" works by blocks of keys in O(T + S) memory,
      "reference" holds the [T, S] scores; None picks the best.

  Returns:
    The part's output and log-sum-exp, in float32 or wider.

  Raises:
    ValueError: if B is no multiple of M, or H none of N.
  """
  batch, rows = q.shape[0], k.shape[0]
  if batch % rows or q.shape[2] % k.shape[2]:
    raise ValueError(
        f"q.shape={q.shape} does not fit k.shape={k.shape}: the query rows"
        " must be a multiple of the key rows, and the query heads of the key"
        " heads"
    )
  attend = reference.attend if implementation == "reference" else xla.attend
  out, lse = attend(
      q.reshape(rows, -1, *q.shape[2:]),
      k,
      v,
      q_positions.reshape(rows, -1),
      k_positions,
      scale,
  )
  return Partial(
      out.reshape(*q.shape[:3], v.shape[-1]), lse.reshape(q.shape[:3])
  )


def merge(parts: Sequence[Partial]) -> Partial:
  """Combines attention over disjoint sets of keys, exactly.

      lse = log sum_r exp(lse_r),   out = sum_r exp(lse_r - lse) out_r

  Source: the merge of Ring Attention and FlashAttention-2, kept in float32.
  """
  outs = jnp.stack([part.out for part in parts])
  lses = jnp.stack([part.lse for part in parts])
  peak = jax.lax.stop_gradient(lses.max(0))
  peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
  weights = jnp.exp(lses - peak[None])
  total = weights.sum(0)
  seen = total > 0
  out = (weights[..., None] * outs).sum(0)
  safe = jnp.where(seen, total, 1.0)
  lse = jnp.where(seen, peak + jnp.log(safe), -jnp.inf)
  return Partial(out / safe[..., None], lse)

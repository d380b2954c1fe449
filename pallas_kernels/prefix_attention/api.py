"""Partial attention with its log-sum-exp, and the exact merge of such parts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import shapes
from pallas_kernels.prefix_attention import reference, xla
from pallas_kernels.prefix_attention.reference import Sink

Implementation = Literal["xla", "reference"] | None


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
    implementation: Implementation = None,
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
  part, _ = stored_attention(
      q,
      k[None],
      v[None],
      (k[None], v[None]),
      layer=jnp.int32(0),
      q_positions=q_positions,
      k_positions=k_positions,
      scale=scale,
      implementation=implementation,
  )
  return part


@shapes.typed
def stored_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "L M S N K"],
    v: Float[Array, "L M S N V"],
    sink: tuple[Float[Array, "L M S N K"], Float[Array, "L M S N V"]] | None,
    *,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "M S"],
    scale: float,
    implementation: Implementation = None,
) -> tuple[Partial, Sink]:
  """Attends to one layer of keys and values that are stored for all.

  Stored keys are constants, and may lie in host memory: a block of them at a
  time comes to the device. Their gradient is summed into the sink, which is
  handed through unchanged: in the backward pass the cotangent of the sink that
  went out comes in, this layer's share is added to it in place, and it leaves
  as the cotangent of the sink that came in. The sums have the sink's dtype.

  Args:
    q: queries.
    k: keys of all layers.
    v: values of all layers.
    sink: stand-ins for k and v whose values are never read; None if their
      gradient is not wanted, which then costs nothing.
    layer: which of the layers.
    q_positions: as in `prefix_attention`.
    k_positions: as in `prefix_attention`.
    scale: as in `prefix_attention`.
    implementation: as in `prefix_attention`.

  Returns:
    The part, and the sink.

  Raises:
    ValueError: as `prefix_attention`.
  """
  batch, rows = q.shape[0], k.shape[1]
  if batch % rows or q.shape[2] % k.shape[3]:
    raise ValueError(
        f"q.shape={q.shape} does not fit k.shape={k.shape[1:]}: the query rows"
        " must be a multiple of the key rows, and the query heads of the key"
        " heads"
    )
  attend = reference.attend if implementation == "reference" else xla.attend
  out, lse, sink = attend(
      q.reshape(rows, -1, *q.shape[2:]),
      k,
      v,
      sink,
      q_positions.reshape(rows, -1),
      k_positions,
      layer,
      scale,
  )
  out = out.reshape(*q.shape[:3], v.shape[-1])
  return Partial(out, lse.reshape(q.shape[:3])), sink


def merge(parts: Sequence[Partial]) -> Partial:
  """Combines attention over disjoint sets of keys, exactly.

      lse = log sum_r exp(lse_r),   out = sum_r exp(lse_r - lse) out_r

  Source: the merge of Ring Attention and FlashAttention-2, kept in float32.
  """
  outs = jnp.stack([part.out for part in parts])
  lses = jnp.stack([part.lse for part in parts])
  peak = _finite(jax.lax.stop_gradient(lses.max(0)))
  weights = jnp.exp(lses - peak[None])
  total = weights.sum(0)
  seen = total > 0
  out = (weights[..., None] * outs).sum(0)
  safe = jnp.where(seen, total, 1.0)
  lse = jnp.where(seen, peak + jnp.log(safe), -jnp.inf)
  return Partial(out / safe[..., None], lse)


def merge_shards(part: Partial, *, axis_name: str) -> jax.Array:
  """Combines the parts of the shards of a mesh axis, inside `jax.shard_map`.

  The same sum as `merge`, by a reduce-scatter in float32 or wider: n shards
  that each hold a part for all T queries get the output of T / n queries each,
  in order. Nothing but queries' rows is sent, so that the traffic does not
  grow with the number of keys.

  Args:
    part: this shard's, [B, T, H, V]; T is a multiple of n.
    axis_name: the mesh axis that the keys are split over.

  Returns:
    The output [B, T / n, H, V]; 0 for queries that see no key on any shard.
  """
  peak = jax.lax.pmax(jax.lax.stop_gradient(part.lse), axis_name)
  weights = jnp.exp(part.lse - _finite(peak))
  scatter = lambda x: jax.lax.psum_scatter(
      x, axis_name, scatter_dimension=1, tiled=True
  )
  total = scatter(weights)
  out = scatter(weights[..., None] * part.out)
  return out / jnp.where(total > 0, total, 1.0)[..., None]


def _finite(peak):
  return jnp.where(jnp.isfinite(peak), peak, 0.0)

"""Gated full attention of a segment to its prefixes and to itself."""

from collections.abc import Sequence
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.layer_state import KvState, Prefix
from modeling.linear import Linear
from modeling.norm import ZeroCentredRMSNorm
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.rope import Rotation, rotate
from modeling.sharding import spec
from pallas_kernels import prefix_attention


class Attention(nnx.Module):
  """o_proj(sigmoid(gate) * attention); q_proj holds [q | gate] of each head.

  Queries and keys are normalised per head, before rope.

  Over a mesh this is pass-Q: each shard of `context` gathers all queries of the
  segment, attends to the keys that it owns, and gets its own queries' outputs
  by an exact merge. Keys never move.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    hidden, size = config.hidden_size, config.head_dim
    queries = config.num_attention_heads * size
    keys = config.num_key_value_heads * size
    linear = partial(Linear, config=config, mesh=mesh, rngs=rngs)
    self.q_proj = linear("q_proj", hidden, 2 * queries, axes=("embed", "heads"))
    self.k_proj = linear("k_proj", hidden, keys, axes=("embed", "kv_heads"))
    self.v_proj = linear("v_proj", hidden, keys, axes=("embed", "kv_heads"))
    self.o_proj = linear("o_proj", queries, hidden, axes=("heads", "embed"))
    norm = partial(
        ZeroCentredRMSNorm, eps=config.rms_norm_eps, dtype=config.param_dtype
    )
    self.q_norm = norm(size)
    self.k_norm = norm(size)
    self.head_dim = size

  def __call__(
      self,
      x_BTD: jax.Array,
      *,
      positions_BT: jax.Array,
      rotation: Rotation,
      prefixes: Sequence[Prefix],
      layer: jax.Array,
  ) -> tuple[jax.Array, KvState, tuple[KvState | None, ...]]:
    """Returns the output [B,T,D], the segment's own keys, and the sinks.

    Args:
      x_BTD: the segment.
      positions_BT: its positions; -1 is padding.
      rotation: rope at these positions.
      prefixes: what the segment follows, [L, M, S, N, K] for all layers. Each
        of the M rows serves B / M rows of the segment.
      layer: [] int32, number of this layer among them.
    """
    batch, steps, _ = x_BTD.shape
    heads = lambda y: y.reshape(batch, steps, -1, self.head_dim)
    q_and_gate = self.q_proj(x_BTD).reshape(batch, steps, -1, 2, self.head_dim)
    q, gate = q_and_gate[..., 0, :], q_and_gate[..., 1, :]
    q = rotate(self.q_norm(q), rotation)
    k = rotate(self.k_norm(heads(self.k_proj(x_BTD))), rotation)
    own = KvState(k=k, v=heads(self.v_proj(x_BTD)))

    out, sinks = self._attend(q, positions_BT, own, tuple(prefixes), layer)
    out = out.astype(x_BTD.dtype) * jax.nn.sigmoid(gate)
    return self.o_proj(out.reshape(batch, steps, -1)), own, sinks

  def _attend(self, q_BTHK, positions_BT, own, prefixes, layer):
    """Passes the queries around; keys stay with the shard that owns them."""
    queries = spec(("batch", "time", "heads", None))
    stored = tuple(prefix.specs for prefix in prefixes)

    @partial(
        jax.shard_map,
        mesh=self.mesh,
        in_specs=(
            queries,
            spec(("batch", "time")),
            spec(own.AXES[1:]),
            stored,
            spec(()),
        ),
        out_specs=(queries, tuple(specs.sink for specs in stored)),
    )
    def attend(q, positions, own, prefixes, layer):
      collect = partial(
          jax.lax.all_gather, axis_name="context", axis=1, tiled=True
      )
      q = collect(q)
      asked = dict(q_positions=collect(positions), scale=self.head_dim**-0.5)
      parts = [
          prefix_attention.prefix_attention(
              q, own.k, own.v, k_positions=positions, **asked
          )
      ]
      sinks = []
      for prefix in prefixes:
        sink = prefix.sink
        if prefix.positions.shape[1]:  # a prompt of one token fills no slot
          part, handed_on = prefix_attention.stored_attention(
              q,
              prefix.slots.k,
              prefix.slots.v,
              sink and (sink.k, sink.v),
              layer=layer,
              k_positions=prefix.positions,
              **asked,
          )
          parts.append(part)
          sink = handed_on and KvState(*handed_on)
        sinks.append(sink)
      merged = prefix_attention.merge(parts)
      out = prefix_attention.merge_shards(merged, axis_name="context")
      return out, tuple(sinks)

    return attend(q_BTHK, positions_BT, own, prefixes, layer)

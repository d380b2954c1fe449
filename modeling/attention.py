"""Gated full attention of a segment to its prefixes and to itself."""

from collections.abc import Sequence
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.layer_state import KvState, Prefix, prefix_specs
from modeling.linear import Linear
from modeling.norm import RMSNorm
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
    norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=config.param_dtype)
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
  ) -> tuple[jax.Array, KvState]:
    """Returns the output [B,T,D] and the segment's own keys and values.

    Args:
      x_BTD: the segment.
      positions_BT: its positions; -1 is padding.
      rotation: rope at these positions.
      prefixes: what the segment follows, for this layer alone: leaves are
        [M, S, N, K], where each of the M rows serves B / M rows of the segment.
    """
    batch, steps, _ = x_BTD.shape
    heads = lambda y: y.reshape(batch, steps, -1, self.head_dim)
    q_and_gate = self.q_proj(x_BTD).reshape(batch, steps, -1, 2, self.head_dim)
    q, gate = q_and_gate[..., 0, :], q_and_gate[..., 1, :]
    q = rotate(self.q_norm(q), rotation)
    k = rotate(self.k_norm(heads(self.k_proj(x_BTD))), rotation)
    own = KvState(k=k, v=heads(self.v_proj(x_BTD)))

    keys = (*prefixes, Prefix(slots=own, positions=positions_BT))
    keys = tuple(part for part in keys if part.positions.shape[1])
    out = self._attend(q, positions_BT, keys).astype(x_BTD.dtype)
    out *= jax.nn.sigmoid(gate)
    return self.o_proj(out.reshape(batch, steps, -1)), own

  def _attend(self, q_BTHK, positions_BT, keys: tuple[Prefix, ...]):
    """Passes the queries around; keys stay with the shard that owns them."""
    queries = spec(("batch", "time", "heads", None))

    @partial(
        jax.shard_map,
        mesh=self.mesh,
        in_specs=(
            queries,
            spec(("batch", "time")),
            (prefix_specs(),) * len(keys),
        ),
        out_specs=queries,
    )
    def attend(q, positions, keys):
      collect = partial(
          jax.lax.all_gather, axis_name="context", axis=1, tiled=True
      )
      q, positions = collect(q), collect(positions)
      parts = [
          prefix_attention.prefix_attention(
              q,
              part.slots.k,
              part.slots.v,
              q_positions=positions,
              k_positions=part.positions,
              scale=self.head_dim**-0.5,
          )
          for part in keys
      ]
      return prefix_attention.merge_shards(
          prefix_attention.merge(parts), axis_name="context"
      )

    return attend(q_BTHK, positions_BT, keys)

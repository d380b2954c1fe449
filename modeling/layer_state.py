"""What each kind of layer keeps of the tokens it has seen.

Slots grow by one a token, and lie over `context`. The leaves of a kind of slots
have like axes, so that one tuple of logical names serves them all. A recurrent
state is of one size, whatever was seen; a model without one has None.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import DecoderConfig
from modeling.parameter import IndexerParam
from modeling.sharding import Axes, sharding, spec

POSITION_AXES: Axes = ("batch", "slots")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvState:
  """Keys and values of full attention."""

  AXES: ClassVar[Axes] = ("layers", "batch", "slots", "kv_heads", None)

  k: jax.Array  # [L, B, S, N, K] model dtype, after norm and rope
  v: jax.Array  # [L, B, S, N, K] model dtype

  def learned(self, kind: type[nnx.Variable]) -> "KvState":
    """Returns what gradients of such weights come through: all of it."""
    del kind
    return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentState:
  """Latents of all layers, and the index keys of those that select."""

  AXES: ClassVar[Axes] = ("layers", "batch", "slots", None)

  # In what gradients come through, the other one is None.
  latent: jax.Array | None  # [L, B, S, Z + K] model dtype: latent, roped key
  index_key: jax.Array | None  # [l, B, S, K] model dtype, after norm and rope

  def learned(self, kind: type[nnx.Variable]) -> "LatentState":
    """Returns what gradients of such weights come through.

    Those of an indexer come through the index keys alone, and those of all
    other weights through the latents, since a choice has no gradient.
    """
    if kind is IndexerParam:
      return LatentState(latent=None, index_key=self.index_key)
    return LatentState(latent=self.latent, index_key=None)


Slots = KvState | LatentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
  """State of Gated DeltaNet layers.

  Stacked over blocks, then over the linear layers of a block. The last inputs
  of the convolution are kept by heads, so that a device has those of its heads.
  """

  recurrent: jax.Array  # [L, l, B, U, K, V] float32 or wider
  conv_q: jax.Array  # [L, l, B, W, H, K] model dtype, newest last
  conv_k: jax.Array  # [L, l, B, W, H, K] model dtype
  conv_v: jax.Array  # [L, l, B, W, U, V] model dtype


Recurrent = DeltaState | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Stored slots that a segment attends to, and where they stand.

  They are constants. Who wants their gradient gives a `sink`: stand-ins whose
  values are never read, which a forward hands through, and whose cotangents
  are the sums that a backward pass adds to, in place.
  """

  slots: Slots  # stacked over the layers that have them
  positions: jax.Array  # [B, S] int32, -1 = empty slot
  sink: Slots | None = None  # as `slots.learned()`, in the dtype of the sums

  @property
  def specs(self) -> Any:
    """The mesh axes of each leaf; of a sink also where there is none."""
    slots: Any = spec(self.slots.AXES)
    positions: Any = spec(POSITION_AXES)
    return Prefix(slots=slots, positions=positions, sink=slots)


class Record(NamedTuple):
  """What a model chose for each token, so that it can be chosen again.

  Of what is None a model chooses anew.
  """

  # [l, B, T, J] int32 of layers with an indexer: positions of the tokens that
  # a token attends to, -1 where there are fewer
  selections: jax.Array | None = None
  # [l, B, T, A] int32 of layers with experts: those that a token is sent to
  experts: jax.Array | None = None


NOTHING_RECORDED = Record()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentDelta:
  """What a segment adds to the state that it follows."""

  slots: Slots  # [L, B, T, ...]: the segment's own
  recurrent: Recurrent  # after the segment's last valid token
  sinks: tuple[Slots | None, ...]  # those of its prefixes, handed through
  record: Record = NOTHING_RECORDED  # what was chosen for it
  indexer_loss: jax.Array | None = None  # [B, T] nats, summed over layers

  def learned(self, kind: type[nnx.Variable]) -> "SegmentDelta":
    """Returns what gradients of such weights come through."""
    return SegmentDelta(
        slots=self.slots.learned(kind),
        recurrent=self.recurrent,
        sinks=self.sinks,
    )


def with_sink(prefix: Prefix, sink: Slots | None) -> Prefix:
  """Returns a prefix with another sink."""
  return dataclasses.replace(prefix, sink=sink)


def empty_recurrent(
    config: DecoderConfig, *, mesh: Mesh, batch: int
) -> Recurrent:
  """Returns the recurrent states before the first token."""
  shapes = config.recurrent_shapes(batch=batch)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  # Not eagerly: that would make the whole of it on one device first.
  where = jax.tree.map(
      partial(sharding, mesh),
      config.recurrent_axes(mesh),
      is_leaf=lambda axes: isinstance(axes, tuple),
  )
  return jax.jit(zeros, out_shardings=where)()

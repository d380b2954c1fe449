"""How the slots of a state lie over the mesh: in stripes, one a frame.

A frame is a run of T tokens, some of which may be padding. It lies over the n
shards of `context` in order, T / n tokens each, and frame f fills slots
[f T / n, (f + 1) T / n) of every shard. So each token has one owner, which its
place in the sequence tells; shards fill at the same rate, whatever the length
and however the state grew; and a write moves nothing between shards.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from modeling.layer_state import Prefix, Slots
from modeling.sharding import spec
from pallas_kernels.staging import read, write


def write_frame(
    stored: Prefix, own: Prefix, *, frame: jax.Array, mesh: Mesh
) -> Prefix:
  """Writes the valid tokens of a frame in place; other slots stay as they are.

  Args:
    stored: slots [L, B, S, ...] and their positions [B, S].
    own: those of the frame, T for S; position -1 is padding.
    frame: [] int32, number of the frame: there must be room for it.
    mesh: that the state lies on.
  """

  @partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(stored.specs, own.specs, spec(())),
      out_specs=stored.specs,
  )
  def put_frame(stored, own, frame):
    share = own.positions.shape[1]
    valid = own.positions >= 0

    def put(x, new, axis):
      start = _start(x, frame * share, axis)
      trailing = range(axis + 1, x.ndim)
      mask = jnp.expand_dims(valid, (*range(axis - 1), *trailing))
      return write(x, jnp.where(mask, new, read(x, start, new.shape)), start)

    return Prefix(
        slots=jax.tree.map(partial(put, axis=2), stored.slots, own.slots),
        positions=put(stored.positions, own.positions, axis=1),
    )

  return put_frame(stored, own, frame)


def read_frame(
    slots: Slots, *, frame: jax.Array, frame_tokens: int, mesh: Mesh
) -> Slots:
  """Returns a frame of the slots [L,B,S,...] on the device, as [L,B,T,...]."""
  share = frame_tokens // mesh.shape["context"]

  @partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(spec(slots.AXES), spec(())),
      out_specs=spec(slots.AXES),
  )
  def take_frame(slots, frame):
    def take(x):
      sizes = (*x.shape[:2], share, *x.shape[3:])
      return read(x, _start(x, frame * share, 2), sizes)

    return jax.tree.map(take, slots)

  # Read for good: XLA would read some of it again after the slots were written
  # to, and keep a copy of them all for that.
  return jax.lax.optimization_barrier(take_frame(slots, frame))


def _start(x, index, axis):
  """Indices of one dtype of a slice that is cut along one axis."""
  return [index if i == axis else jnp.int32(0) for i in range(x.ndim)]

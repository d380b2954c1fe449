"""Every token has one owner, and shards fill alike."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.stripes import read_frame, write_frame
from modeling.layer_state import POSITION_AXES, KvState, Prefix
from modeling.sharding import make_mesh, sharding
from tests import programs

LAYERS, HEADS, SIZE = 2, 2, 3
FRAME, FRAMES = 16, 3
MESHES = {
    "context=8": dict(context=8),
    "data=2 context=4": dict(data=2, context=4),
    "context=4 tensor=2": dict(context=4, tensor=2),
    "one device": {},
}
of_every_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
write = jax.jit(write_frame, static_argnames="mesh", donate_argnames="stored")
read = jax.jit(read_frame, static_argnames=("frame_tokens", "mesh"))


def prefix(mesh, positions, *, seed=0):
  """Random keys and values of those positions, on the mesh."""
  rng = np.random.default_rng(seed)
  shape = (LAYERS, *np.shape(positions), HEADS, SIZE)
  put = lambda x, axes: jax.device_put(x, sharding(mesh, axes))
  draw = lambda: put(rng.normal(size=shape).astype(np.float32), KvState.AXES)
  return Prefix(
      slots=KvState(k=draw(), v=draw()),
      positions=put(np.asarray(positions, np.int32), POSITION_AXES),
  )


def nothing(mesh):
  """Two rows of empty slots: no key that was never written may be read."""
  empty = prefix(mesh, np.full((2, FRAMES * FRAME), -1))
  nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), empty.slots)
  return Prefix(slots=nan, positions=empty.positions)


def grow(mesh, ends):
  """Yields the state after each segment of a sequence of two equal rows."""
  state = nothing(mesh)
  for start, end in itertools.pairwise([0, *ends]):
    for frame in range(start // FRAME, -(-end // FRAME)):
      at = frame * FRAME + np.arange(FRAME)
      at = np.where((start <= at) & (at < end), at, -1)
      own = prefix(mesh, np.stack([at, at]), seed=end)
      state = write(state, own, frame=np.int32(frame), mesh=mesh)
    yield end, state


@of_every_mesh
def test_a_frame_is_read_as_it_was_written(sizes):
  mesh = make_mesh(**sizes)
  frames = [
      prefix(mesh, np.full((2, FRAME), frame), seed=frame)
      for frame in range(FRAMES)
  ]
  stored = nothing(mesh)
  for frame in (1, 2, 0):
    stored = write(stored, frames[frame], frame=np.int32(frame), mesh=mesh)
  for frame in range(FRAMES):
    found = read(
        stored.slots, frame=np.int32(frame), frame_tokens=FRAME, mesh=mesh
    )
    jax.tree.map(np.testing.assert_array_equal, found, frames[frame].slots)


@of_every_mesh
def test_padding_leaves_its_slots_as_they_are(sizes):
  """On both sides, other in each row, and in rows that have nothing else."""
  mesh, frame = make_mesh(**sizes), np.int32(1)
  at = np.arange(FRAME)
  runs = [(3, 9), (5, 5), (0, 16), (15, 16)]
  valid = np.stack([(start <= at) & (at < stop) for start, stop in runs])
  for rows in (valid[:2], valid[2:]):
    old = prefix(mesh, np.full((2, FRAME), 7), seed=1)
    stored = write(nothing(mesh), old, frame=frame, mesh=mesh)
    new = prefix(mesh, np.where(rows, FRAME + at, -1), seed=2)
    stored = write(stored, new, frame=frame, mesh=mesh)
    found = read(stored.slots, frame=frame, frame_tokens=FRAME, mesh=mesh)
    for ours, x, y in zip(
        *map(jax.tree.leaves, (found, new.slots, old.slots)), strict=True
    ):
      wanted = np.where(rows[None, :, :, None, None], x, y)
      np.testing.assert_array_equal(ours, wanted)
    shards = mesh.shape["context"]
    positions = np.asarray(stored.positions).reshape(2, shards, FRAMES, -1)
    np.testing.assert_array_equal(
        positions[:, :, 1].reshape(2, FRAME), np.where(rows, FRAME + at, 7)
    )


@of_every_mesh
@pytest.mark.parametrize("step", [1, 3, 7, FRAME])
def test_every_token_has_one_owner_and_shards_fill_alike(sizes, step):
  """At every length on the way, however long the segments are."""
  mesh = make_mesh(**sizes)
  shards = mesh.shape["context"]
  share = FRAME // shards
  for length, state in grow(mesh, range(step, FRAMES * FRAME + 1, step)):
    owned = np.asarray(state.positions).reshape(2, shards, -1)
    token = np.arange(length)
    shard = token % FRAME // share
    slot = token // FRAME * share + token % share
    assert (owned[:, shard, slot] == token).all()
    of_shard = (owned >= 0).sum(2)
    assert (of_shard.sum(1) == length).all()
    assert (of_shard.max(1) - of_shard.min(1) <= share).all()
    filled = np.isfinite(state.slots.k).all((0, 3, 4))
    np.testing.assert_array_equal(filled, np.asarray(state.positions) >= 0)


def test_slots_never_move_between_shards():
  """Neither to write a frame nor to read it; a write is in place."""
  mesh = make_mesh(data=2, context=4)
  stored, own = nothing(mesh), prefix(mesh, np.zeros((2, FRAME)))
  writing = write.lower(stored, own, frame=np.int32(1), mesh=mesh).compile()
  reading = read.lower(
      stored.slots, frame=np.int32(1), frame_tokens=FRAME, mesh=mesh
  ).compile()
  for program in (writing, reading):
    assert programs.collectives(program) == []
  nbytes = sum(x.nbytes for x in jax.tree.leaves(stored)) // 8
  assert writing.memory_analysis().alias_size_in_bytes == nbytes


def test_the_gradient_of_a_read_goes_to_the_slots_read(x64):
  mesh = make_mesh(context=8)
  stored = nothing(mesh).slots

  @partial(jax.jit, static_argnames="frame")
  def pulled(frame):
    _, pull_back = jax.vjp(
        lambda slots: read_frame(
            slots, frame=jnp.int32(frame), frame_tokens=FRAME, mesh=mesh
        ).k,
        stored,
    )
    return pull_back(jnp.ones((LAYERS, 2, FRAME, HEADS, SIZE), jnp.float32))

  (slots,) = pulled(1)
  per_shard = np.asarray(slots.k).reshape(LAYERS, 2, 8, FRAMES, -1)
  assert (per_shard[:, :, :, 1] == 1).all()
  assert not per_shard[:, :, :, [0, 2]].any() and not slots.v.any()

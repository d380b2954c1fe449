"""The prompt's state: its bytes, its growth, its branches."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax import prompt_state
from lstraw_jax.prompt_state import check, empty_prompt_state, nbytes
from lstraw_jax.rollouts import to_branch_batch
from modeling.layer_state import (
    DeltaState,
    SegmentDelta,
    empty_recurrent,
)
from modeling.presets import PRESETS, preset
from modeling.sharding import make_mesh
from tests import tiny

CONFIG = tiny.config(dtype="float32")
GLM = tiny.config("tiny-glm", dtype="float32")
KINDS = pytest.mark.parametrize("config", [CONFIG, GLM], ids=["dense", "glm"])
append = jax.jit(prompt_state.append)
append_to_branch = jax.jit(
    prompt_state.append_to_branch, static_argnames="steps"
)
fork = jax.jit(prompt_state.fork, static_argnames=("branches", "slots"))
next_positions = jax.jit(prompt_state.next_positions)


def empty(*, config=CONFIG, capacity=8, chunk_tokens=4, batch=1, **mesh):
  """An empty state, of two frames of four tokens on one device."""
  return empty_prompt_state(
      config,
      mesh=make_mesh(**mesh),
      capacity=capacity,
      chunk_tokens=chunk_tokens,
      batch=batch,
  )


def random_like(tree, seed):
  """Fills a pytree of floats with random numbers."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree
  )


def segment(*, rows, steps, seed, config=CONFIG):
  """What a segment might add to a state."""
  recurrent = empty_recurrent(config, mesh=make_mesh(), batch=rows)
  return SegmentDelta(
      slots=random_like(config.slot_shapes(batch=rows, slots=steps), seed),
      recurrent=random_like(recurrent, seed + 1),
      sinks=(),
  )


def positions(*rows):
  """One row of positions for each row of the segment."""
  return jnp.asarray(rows, jnp.int32)


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-moe", "qwen3.5-0.8b", "tiny-glm"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nbytes_equals_the_real_arrays_to_the_byte(name, dtype):
  config = preset(name).replace(dtype=dtype)
  state = empty(config=config, capacity=12, batch=2)
  real = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  assert nbytes(config, capacity=12, batch=2) == real


def test_keys_and_values_of_27b_take_65536_bytes_a_token():
  config = PRESETS["qwen3.6-27b"]
  slots = config.slot_shapes(batch=1, slots=1)
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots)) == 65536
  # Beside them a slot has its position; all else is of one size.
  per_slot = nbytes(config, capacity=101) - nbytes(config, capacity=100)
  assert per_slot == 65536 + 4
  # 48 Gated DeltaNet layers: a float32 state, and 3 inputs of 10,240 channels.
  recurrent = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
  assert nbytes(config, capacity=0) == recurrent + 3 * 4
  million = nbytes(config, capacity=2**20)
  assert million == 2**20 * 65540 + nbytes(config, capacity=0)


def test_latents_and_index_keys_of_glm_5_2_take_95232_bytes_a_token():
  """78 latents with their rope keys, and the index keys of 21 layers."""
  config = PRESETS["glm-5.2"]
  per_slot = 2 * (78 * 576 + 21 * 128)
  assert per_slot == 95232
  assert nbytes(config, capacity=1) - nbytes(config, capacity=0) == 95232 + 4
  assert nbytes(config, capacity=0) == 3 * 4  # there is no recurrent state


def test_an_empty_state_holds_nothing():
  state = empty(batch=2)
  check(state)
  assert (state.positions == -1).all() and (state.length == 0).all()
  assert not any(
      x.any() for x in jax.tree.leaves((state.slots, state.recurrent))
  )


@pytest.mark.parametrize(
    "sizes,message",
    [
        (dict(chunk_tokens=6), "chunk_tokens=6: want a multiple of mesh.conte"),
        (dict(capacity=12), "capacity=12: want a multiple of chunk_tokens=8, "),
        (dict(batch=3), "batch=3: want a multiple of mesh.data=2, e.g. 4"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh_are_refused(sizes, message):
  fits = dict(chunk_tokens=8, capacity=24, batch=2, data=2, context=4)
  make = lambda **sizes: jax.eval_shape(partial(empty, **(fits | sizes)))
  make()
  with pytest.raises(ValueError, match=message):
    make(**sizes)


@KINDS
def test_append_writes_a_frame_where_its_positions_say(config):
  state = empty(config=config)
  first = segment(rows=1, steps=4, seed=0, config=config)
  second = segment(rows=1, steps=4, seed=2, config=config)
  state = append(state, first, positions_BT=positions([0, 1, 2, 3]))
  state = append(state, second, positions_BT=positions([4, 5, -1, -1]))
  check(state)
  for ours, a, b in zip(
      *map(jax.tree.leaves, (state.slots, first.slots, second.slots)),
      strict=True,
  ):
    np.testing.assert_array_equal(ours[:, :, :4], a)
    np.testing.assert_array_equal(ours[:, :, 4:6], b[:, :, :2])
    assert not ours[:, :, 6:].any()
  assert state.positions.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1]]
  assert state.length.tolist() == [6]
  jax.tree.map(np.testing.assert_array_equal, state.recurrent, second.recurrent)


@KINDS
def test_padding_is_never_written_and_the_next_segment_goes_on_in_its_frame(
    config,
):
  state = empty(config=config)
  first = segment(rows=1, steps=4, seed=0, config=config)
  state = append(state, first, positions_BT=positions([0, 1, -1, -1]))
  assert state.length.tolist() == [2]
  second = segment(rows=1, steps=4, seed=2, config=config)
  state = append(state, second, positions_BT=positions([-1, -1, 2, -1]))
  assert state.positions.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]
  assert state.length.tolist() == [3]
  for ours, a, b in zip(
      *map(jax.tree.leaves, (state.slots, first.slots, second.slots)),
      strict=True,
  ):
    np.testing.assert_array_equal(ours[:, :, :2], a[:, :, :2])
    np.testing.assert_array_equal(ours[:, :, 2], b[:, :, 2])
    assert not ours[:, :, 3:].any()


def test_a_row_without_new_tokens_stays_as_it_is():
  state = empty(batch=2)
  first = segment(rows=2, steps=4, seed=0)
  at = positions([0, 1, 2, 3], [0, 1, 2, -1])
  before = tiny.copied(append(state, first, positions_BT=at))
  second = segment(rows=2, steps=4, seed=2)
  at = positions([4, 5, 6, -1], [-1, -1, -1, -1])
  state = append(before, second, positions_BT=at)
  assert state.length.tolist() == [7, 3]
  assert state.positions[1].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
  for ours, theirs, new in zip(
      *map(jax.tree.leaves, (state.slots, before.slots, second.slots)),
      strict=True,
  ):
    np.testing.assert_array_equal(ours[:, 1], theirs[:, 1])
    np.testing.assert_array_equal(ours[:, 0, 4:7], new[:, 0, :3])


def test_branches_start_from_their_own_row_of_the_prompt():
  state = random_like(empty(batch=2), 0)
  state = dataclasses.replace(state, length=jnp.array([3, 1], jnp.int32))
  branch = fork(state, branches=3, slots=5)
  for ours, prompt in zip(
      *map(jax.tree.leaves, (branch.recurrent, state.recurrent)), strict=True
  ):
    for row in range(6):
      np.testing.assert_array_equal(ours[:, :, row], prompt[:, :, row // 3])
  assert branch.slots.k.shape[1:3] == branch.positions.shape == (6, 5)
  assert (branch.positions == -1).all() and branch.used == 0
  valid = jnp.ones((6, 2), bool)
  starts = next_positions(state, branch, valid_BT=valid)[:, 0]
  assert starts.tolist() == [3, 3, 3, 1, 1, 1]


def test_a_branch_grows_in_slots_of_its_own():
  state = random_like(empty(), 0)
  state = dataclasses.replace(state, length=jnp.array([3], jnp.int32))
  before = tiny.copied(state)
  branch = fork(state, branches=2, slots=6)
  first = segment(rows=2, steps=3, seed=1)
  second = segment(rows=2, steps=3, seed=3)
  valid = jnp.array([[True, True, True], [True, True, False]])
  at = next_positions(state, branch, valid_BT=valid)
  assert at.tolist() == [[3, 4, 5], [3, 4, -1]]
  branch = append_to_branch(branch, first, positions_BT=at)
  valid = jnp.array([[True, True, False], [False, False, False]])
  at = next_positions(state, branch, valid_BT=valid)
  assert at.tolist() == [[6, 7, -1], [-1, -1, -1]]
  branch = append_to_branch(branch, second, positions_BT=at)
  assert branch.used == 6
  assert branch.positions.tolist() == [
      [3, 4, 5, 6, 7, -1],
      [3, 4, -1, -1, -1, -1],
  ]
  np.testing.assert_array_equal(branch.slots.v[:, 0, :3], first.slots.v[:, 0])
  np.testing.assert_array_equal(
      branch.slots.v[:, 0, 3:5], second.slots.v[:, 0, :2]
  )
  np.testing.assert_array_equal(
      branch.slots.v[:, 1, :2], first.slots.v[:, 1, :2]
  )
  assert not branch.slots.v[:, 1, 2:].any()
  assert tiny.largest_difference(branch.recurrent, second.recurrent) == 0
  jax.tree.map(np.testing.assert_array_equal, before, tiny.copied(state))


def test_a_branch_grows_token_by_token_inside_a_frame():
  """As sampling does: one place of the frame a step."""
  state = random_like(empty(), 0)
  state = dataclasses.replace(state, length=jnp.array([5], jnp.int32))
  branch, added = fork(state, branches=1, slots=4), []
  for step in range(4):
    here = jnp.arange(2) == step % 2
    at = next_positions(state, branch, valid_BT=here[None])
    assert at.max() == 5 + step
    added.append(segment(rows=1, steps=2, seed=step))
    branch = append_to_branch(branch, added[-1], positions_BT=at, steps=1)
  assert branch.used == 4
  assert branch.positions.tolist() == [[5, 6, 7, 8]]
  for step, delta in enumerate(added):
    np.testing.assert_array_equal(
        branch.slots.k[:, :, step], delta.slots.k[:, :, step % 2]
    )


def test_a_response_starts_at_the_position_of_the_last_prompt_token():
  """x_P is fed at position P - 1 and y_1 at position P."""
  prompt = tiny.tokens(7)
  group = tiny.group(prompt, (3, 2))
  batch = to_branch_batch(
      [group],
      advantages=[np.zeros(2)],
      multiple=4,
      old_log_probs_from_rollouts=False,
      mesh=make_mesh(),
  )
  state = dataclasses.replace(empty(), length=jnp.array([6], jnp.int32))
  at = next_positions(
      state, fork(state, branches=2, slots=4), valid_BT=batch.valid[0]
  )
  assert at.tolist() == [[6, 7, 8, -1], [6, 7, -1, -1]]
  assert batch.inputs[0, 0, 0] == prompt[-1]  # position P - 1
  assert batch.inputs[0, 0, 1] == group.rollouts[0].tokens[0]  # position P


@pytest.mark.parametrize("leaf", ["length", "next_token", "positions"])
def test_a_leaf_of_another_batch_is_refused(leaf):
  one, two = (jax.eval_shape(partial(empty, batch=batch)) for batch in (1, 2))
  with pytest.raises(ValueError, match=r"do not fit positions\.shape"):
    check(dataclasses.replace(one, **{leaf: getattr(two, leaf)}))


@pytest.mark.parametrize(
    "config,part,leaf",
    [
        (CONFIG, "slots", "k"),
        (CONFIG, "slots", "v"),
        (GLM, "slots", "latent"),
        (GLM, "slots", "index_key"),
        *(
            (CONFIG, "recurrent", leaf.name)
            for leaf in dataclasses.fields(DeltaState)
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("other", [{"batch": 2}, {"capacity": 16}])
def test_a_leaf_that_fits_no_other_is_refused_by_name(
    config, part, leaf, other
):
  ours, theirs = (
      jax.eval_shape(partial(empty, config=config, **sizes))
      for sizes in ({}, other)
  )
  mixed = dataclasses.replace(
      getattr(ours, part), **{leaf: getattr(getattr(theirs, part), leaf)}
  )
  state = dataclasses.replace(ours, **{part: mixed})
  if part == "recurrent" and "capacity" in other:
    check(state)  # it is of one size, whatever was seen
    return
  with pytest.raises(ValueError, match=f"state: {part}.{leaf} do not fit"):
    check(state)

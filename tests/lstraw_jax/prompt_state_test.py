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
from modeling.layer_state import empty_recurrent, empty_slots
from modeling.presets import PRESETS, preset
from modeling.qwen3_5 import SegmentDelta
from tests import tiny

CONFIG = tiny.config(dtype="float32")
append = jax.jit(prompt_state.append)
append_to_branch = jax.jit(prompt_state.append_to_branch)
fork = jax.jit(prompt_state.fork, static_argnames=("branches", "slots"))
next_positions = jax.jit(prompt_state.next_positions)


def random_like(tree, seed):
  """Fills a pytree of floats with random numbers."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree
  )


def segment(*, rows, steps, seed):
  """What a segment might add to a state."""
  return SegmentDelta(
      slots=random_like(empty_slots(CONFIG, batch=rows, slots=steps), seed),
      recurrent=random_like(empty_recurrent(CONFIG, batch=rows), seed + 1),
  )


def positions(*rows):
  """One row of positions for each row of the segment."""
  return jnp.asarray(rows, jnp.int32)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "qwen3.5-0.8b"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nbytes_equals_the_real_arrays_to_the_byte(name, dtype):
  config = preset(name).replace(dtype=dtype)
  make = jax.jit(partial(empty_prompt_state, config, capacity=12, batch=2))
  state = make()
  real = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  assert nbytes(config, capacity=12, batch=2) == real


def test_keys_and_values_of_27b_take_65536_bytes_a_token():
  config = PRESETS["qwen3.6-27b"]
  slots = jax.eval_shape(partial(empty_slots, config, batch=1, slots=1))
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots)) == 65536
  # Beside them a slot has its position; all else is of one size.
  per_slot = nbytes(config, capacity=101) - nbytes(config, capacity=100)
  assert per_slot == 65536 + 4
  # 48 Gated DeltaNet layers: a float32 state, and 3 inputs of 10,240 channels.
  recurrent = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
  assert nbytes(config, capacity=0) == recurrent + 3 * 4
  million = nbytes(config, capacity=2**20)
  assert million == 2**20 * 65540 + nbytes(config, capacity=0)


def test_an_empty_state_holds_nothing():
  state = empty_prompt_state(CONFIG, capacity=5, batch=2)
  check(state)
  assert (state.positions == -1).all() and (state.length == 0).all()
  assert not any(
      x.any() for x in jax.tree.leaves((state.slots, state.recurrent))
  )


def test_append_writes_a_segment_behind_what_is_there():
  state = empty_prompt_state(CONFIG, capacity=8)
  first = segment(rows=1, steps=3, seed=0)
  second = segment(rows=1, steps=2, seed=2)
  state = append(state, first, positions_BT=positions([0, 1, 2]))
  state = append(state, second, positions_BT=positions([3, 4]))
  check(state)
  for ours, a, b in zip(
      *map(jax.tree.leaves, (state.slots, first.slots, second.slots)),
      strict=True,
  ):
    np.testing.assert_array_equal(ours[:, :, :3], a)
    np.testing.assert_array_equal(ours[:, :, 3:5], b)
    assert not ours[:, :, 5:].any()
  assert state.positions.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]
  assert state.length.tolist() == [5]
  assert tiny.largest_difference(state.recurrent, second.recurrent) == 0


def test_padding_at_the_end_of_a_segment_is_overwritten_by_the_next():
  state = empty_prompt_state(CONFIG, capacity=8)
  padded = segment(rows=1, steps=4, seed=0)
  state = append(state, padded, positions_BT=positions([0, 1, -1, -1]))
  assert state.length.tolist() == [2]
  after = segment(rows=1, steps=4, seed=2)
  state = append(state, after, positions_BT=positions([2, 3, 4, -1]))
  assert state.positions.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]
  assert state.length.tolist() == [5]
  np.testing.assert_array_equal(
      state.slots.k[:, :, :2], padded.slots.k[:, :, :2]
  )
  np.testing.assert_array_equal(
      state.slots.k[:, :, 2:5], after.slots.k[:, :, :3]
  )


def test_branches_start_from_their_own_row_of_the_prompt():
  state = random_like(empty_prompt_state(CONFIG, capacity=4, batch=2), 0)
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
  state = random_like(empty_prompt_state(CONFIG, capacity=4), 0)
  state = dataclasses.replace(state, length=jnp.array([3], jnp.int32))
  before = tiny.copied(state)
  branch = fork(state, branches=2, slots=5)
  first = segment(rows=2, steps=2, seed=1)
  second = segment(rows=2, steps=3, seed=3)
  valid = jnp.array([[True, True], [True, False]])
  at = next_positions(state, branch, valid_BT=valid)
  assert at.tolist() == [[3, 4], [3, -1]]
  branch = append_to_branch(branch, first, positions_BT=at)
  valid = jnp.array([[True, True, False], [False, False, False]])
  at = next_positions(state, branch, valid_BT=valid)
  assert at.tolist() == [[5, 6, -1], [-1, -1, -1]]
  branch = append_to_branch(branch, second, positions_BT=at)
  assert branch.used == 5
  assert branch.positions.tolist() == [[3, 4, 5, 6, -1], [3, -1, -1, -1, -1]]
  np.testing.assert_array_equal(branch.slots.v[:, :, :2], first.slots.v)
  np.testing.assert_array_equal(branch.slots.v[:, :, 2:], second.slots.v)
  assert tiny.largest_difference(branch.recurrent, second.recurrent) == 0
  jax.tree.map(np.testing.assert_array_equal, before, tiny.copied(state))


def test_a_response_starts_at_the_position_of_the_last_prompt_token():
  """x_P is fed at position P - 1 and y_1 at position P."""
  prompt = tiny.tokens(7)
  group = tiny.group(prompt, (3, 2))
  batch = to_branch_batch(
      group,
      advantages=np.zeros(2),
      multiple=4,
      old_log_probs_from_rollouts=False,
  )
  state = dataclasses.replace(
      empty_prompt_state(CONFIG, capacity=8), length=jnp.array([6], jnp.int32)
  )
  at = next_positions(
      state, fork(state, branches=2, slots=4), valid_BT=batch.valid
  )
  assert at.tolist() == [[6, 7, 8, -1], [6, 7, -1, -1]]
  assert batch.inputs[0, 0] == prompt[-1]  # position P - 1
  assert batch.inputs[0, 1] == group.rollouts[0].tokens[0]  # position P


@pytest.mark.parametrize("leaf", ["length", "next_token", "positions"])
def test_a_leaf_of_another_batch_is_refused(leaf):
  one, two = (
      jax.eval_shape(partial(empty_prompt_state, CONFIG, capacity=4, batch=n))
      for n in (1, 2)
  )
  with pytest.raises(ValueError, match=r"do not fit positions\.shape"):
    check(dataclasses.replace(one, **{leaf: getattr(two, leaf)}))


@pytest.mark.parametrize(
    "part,leaf,name",
    [
        ("slots", "k", "slots.k"),
        ("slots", "v", "slots.v"),
        ("recurrent", "recurrent", "recurrent"),
        ("recurrent", "conv", "conv"),
    ],
)
@pytest.mark.parametrize("other", [{"batch": 2}, {"capacity": 8}])
def test_a_leaf_that_fits_no_other_is_refused_by_name(part, leaf, name, other):
  ours, theirs = (
      jax.eval_shape(partial(empty_prompt_state, CONFIG, **sizes))
      for sizes in ({"capacity": 4}, {"capacity": 4} | other)
  )
  mixed = dataclasses.replace(
      getattr(ours, part), **{leaf: getattr(getattr(theirs, part), leaf)}
  )
  state = dataclasses.replace(ours, **{part: mixed})
  if part == "recurrent" and "capacity" in other:
    check(state)  # it is of one size, whatever was seen
    return
  with pytest.raises(ValueError, match=f"prompt state: {name} do not fit"):
    check(state)

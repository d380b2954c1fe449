"""Prompts are cut as one likes; the state is that of one pass over each."""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture, capture_chunk, extend
from lstraw_jax.prompt_state import empty_prompt_state, nbytes
from lstraw_jax.rollouts import bucket
from modeling.layer_state import Recurrent, Slots, empty_recurrent
from modeling.sharding import make_mesh
from tests import programs, tiny

FLOAT64_TOLERANCE = 1e-11
CONFIG = tiny.config()
KINDS = {"dense": CONFIG, "glm": tiny.config("tiny-glm")}
TOPK = KINDS["glm"].index_topk
TOKENS = 150
PROMPTS = [tiny.tokens(TOKENS, seed=seed) for seed in range(3)]
PROMPT = PROMPTS[0]
CAPACITY = {7: 196, 64: 192}  # of a chunk: room for 150 tokens


@jax.jit
def one_pass(policy, tokens, count):
  """Runs all tokens at once, behind nothing; `count` of them are real."""
  offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  _, delta = policy.model(
      tokens[None],
      positions_BT=jnp.where(offset < count, offset, -1)[None],
      prefixes=(),
      recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=1),
  )
  return delta


@functools.cache
def oracle(kind: str, row: int, tokens: int) -> tuple[Slots, Recurrent]:
  """The state after the first tokens of a prompt, by one pass over them."""
  prompt = PROMPTS[row][:-1]
  delta = one_pass(tiny.policy(KINDS[kind]), prompt, np.int32(tokens))
  slots = jax.tree.map(lambda x: np.asarray(x)[:, 0, :tokens], delta.slots)
  return slots, jax.tree.map(
      lambda x: x[:, :, 0], jax.device_get(delta.recurrent)
  )


def assert_state(state, *, row=0, prompt_tokens: int, kind="dense") -> None:
  """Holds a row of a state against one pass over the same tokens."""
  positions = np.asarray(state.positions)[row]
  filled = np.flatnonzero(positions >= 0)
  order = filled[np.argsort(positions[filled])]
  np.testing.assert_array_equal(positions[order], np.arange(prompt_tokens - 1))
  assert int(state.length[row]) == prompt_tokens - 1
  assert int(state.next_token[row]) == PROMPTS[row][prompt_tokens - 1]
  slots, recurrent = jax.device_get((state.slots, state.recurrent))
  ours = (
      jax.tree.map(lambda x: x[:, row, order], slots),
      jax.tree.map(lambda x: x[:, :, row], recurrent),
  )
  jax.tree.map(
      partial(np.testing.assert_allclose, atol=FLOAT64_TOLERANCE, rtol=0),
      ours,
      oracle(kind, row, prompt_tokens - 1),
  )


def pieces(starts, ends):
  """Those tokens of one prompt after the other."""
  places = zip(PROMPTS, starts, ends, strict=False)
  return [prompt[start:end] for prompt, start, end in places]


def captured(*, tokens: int, chunk: int = 7, kind="dense", **settings):
  """The state of the first tokens of the prompt."""
  return capture(
      tiny.policy(KINDS[kind]),
      [PROMPT[:tokens]],
      chunk_tokens=chunk,
      capacity=CAPACITY[chunk],
      **settings,
  )


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("length", [1, 2, "chunk-1", "chunk", "chunk+1", 150])
def test_any_split_through_the_state_equals_one_pass(x64, length, chunk):
  # P tokens evaluate P - 1. "chunk" of 64 is one call without any padding.
  near = {"chunk-1": chunk, "chunk": chunk + 1, "chunk+1": chunk + 2}
  length = near.get(length, length)
  state = captured(tokens=length, chunk=chunk, policy_step=3)
  assert_state(state, prompt_tokens=length)
  assert state.policy_step == 3


@pytest.mark.parametrize(
    "kind,turns",
    [
        ("dense", [11, 23, 1, 36]),
        ("dense", [1, 1, 7, 14]),
        ("dense", [70, 80]),
        ("glm", [1, 1, TOPK - 2, 1, 1, 1, 60]),  # evaluates one token less
    ],
)
def test_extending_after_an_unaligned_length_equals_one_capture(
    x64, kind, turns
):
  seen = turns[0]
  state = captured(tokens=seen, kind=kind)
  for turn in turns[1:]:
    more = PROMPT[seen : seen + turn]
    state = extend(tiny.policy(KINDS[kind]), state, [more])
    seen += turn
    assert_state(state, prompt_tokens=seen, kind=kind)


def test_a_prompt_after_another_has_the_bits_that_it_has_alone(x64):
  """Nothing of a capture, a selection least of all, outlives it."""
  alone, _, after = (
      capture(tiny.policy(KINDS["glm"]), [prompt], chunk_tokens=7, capacity=196)
      for prompt in (PROMPTS[1], PROMPT, PROMPTS[1])
  )
  jax.tree.map(np.testing.assert_array_equal, after, alone)


def test_many_short_turns_equal_one_capture(x64):
  """Most begin and end inside a frame."""
  state, seen = captured(tokens=1), 1
  for turn in (1, 3, 5) * 8:
    more = PROMPT[seen : seen + turn]
    state = extend(tiny.policy(CONFIG), state, [more])
    seen += turn
  assert_state(state, prompt_tokens=seen)
  whole = captured(tokens=seen)
  np.testing.assert_array_equal(state.positions, whole.positions)
  assert tiny.largest_difference(state.slots, whole.slots) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_batch_are_each_as_if_alone(x64, kind):
  """Whatever their lengths: rows fill other frames, or none at all."""
  policy = tiny.policy(KINDS[kind])
  first, *later = ([1, 23, 9], [41, 24, 11], [42, 33, 81])
  settings = dict(chunk_tokens=7, capacity=CAPACITY[7])
  state = capture(policy, pieces([0, 0, 0], first), **settings)
  for row, count in enumerate(first):
    assert_state(state, row=row, prompt_tokens=count, kind=kind)
  for seen, ends in itertools.pairwise([first, *later]):
    state = extend(policy, state, pieces(seen, ends))
    for row, count in enumerate(ends):
      assert_state(state, row=row, prompt_tokens=count, kind=kind)


@pytest.mark.parametrize(
    "kind", ["dense", pytest.param("glm", marks=pytest.mark.first_class)]
)
def test_over_a_mesh_shards_fill_alike_however_the_prompts_grow(x64, kind):
  """Each token is stored once; the state is that of one device."""
  policy = tiny.policy(KINDS[kind], mesh=make_mesh(data=2, context=4))
  chunk, seen = 8, np.array([1, 30])
  before = capture_chunk._cache_size()
  state = capture(policy, pieces([0, 0], seen), chunk_tokens=chunk, capacity=88)
  for turns in zip((1, 2, 1, 3, 1, 9, 20), (1, 5, 3, 1, 7, 4, 1), strict=True):
    state = extend(policy, state, pieces(seen, seen + turns))
    seen += turns
    stored = np.asarray(state.positions).reshape(2, 4, -1) >= 0
    of_shard = stored.sum(2)
    assert of_shard.sum(1).tolist() == (seen - 1).tolist()
    assert (of_shard.max(1) - of_shard.min(1) <= chunk // 4).all()
  for row, count in enumerate(seen):
    assert_state(state, row=row, prompt_tokens=count, kind=kind)
  assert capture_chunk._cache_size() == before + 1
  for leaf in jax.tree.leaves(state.slots):
    blocks, _, slots, *_ = leaf.shape
    assert leaf.sharding.shard_shape(leaf.shape)[:3] == (blocks, 1, slots // 4)


def test_extending_consumes_the_state(x64):
  state = captured(tokens=9)
  extend(tiny.policy(CONFIG), state, [PROMPT[9:12]])
  assert state.slots.k.is_deleted() and state.recurrent.recurrent.is_deleted()


@pytest.mark.parametrize(
    "tokens,match",
    [
        ([], "want integer ids"),
        ([[1, 2]], "want integer ids"),
        ([1.0, 2.0], "want integer ids"),
        ([0, 256], "ids span 0..256; want 0..255"),
        ([-1, 3], "ids span -1..3; want 0..255"),
    ],
)
def test_wrong_tokens_are_refused_by_both(x64, tokens, match):
  policy, good = tiny.policy(CONFIG), PROMPT[:3]
  with pytest.raises(ValueError, match=match):
    capture(policy, [good, np.array(tokens)], chunk_tokens=7)
  state = captured(tokens=1)
  with pytest.raises(ValueError, match=match):
    extend(policy, state, [np.array(tokens)])
  with pytest.raises(ValueError, match="got 2 rows, want 1"):
    extend(policy, state, [good, good])
  assert not state.slots.k.is_deleted()


def test_too_little_room_is_refused_before_anything_is_written(x64):
  """Unchecked, the last chunk would be written over earlier ones."""
  policy = tiny.policy(CONFIG)
  # 15 tokens to evaluate lie in three frames of 7.
  with pytest.raises(ValueError, match="capacity=14: want at least 21 slots"):
    capture(policy, [PROMPT[:16]], chunk_tokens=7, capacity=14)
  state = captured(tokens=TOKENS)
  with pytest.raises(ValueError, match="capacity=196: want at least 203 slots"):
    extend(policy, state, [tiny.tokens(48)])
  assert not state.slots.k.is_deleted()
  state = extend(policy, state, [tiny.tokens(47)])
  assert (state.positions >= 0).all()


def test_progress_is_called_after_each_chunk(x64):
  calls = []
  progress = lambda *call: calls.append(call)
  state = captured(tokens=17, progress=progress)
  assert calls == [("capture", n, 3) for n in (1, 2, 3)]
  calls.clear()
  extend(tiny.policy(CONFIG), state, [PROMPT[17:19]], progress=progress)
  assert calls == [("capture", 1, 1)]


def test_the_default_capacity_is_a_bucket_of_the_chunk(x64, monkeypatch):
  monkeypatch.setattr(
      "lstraw_jax.capture.capture_chunk", lambda policy, state, *_: state
  )
  for length, capacity in ((1, 8), (9, 8), (10, 16), (66, 80), (81, 80)):
    prompts = [tiny.tokens(length), tiny.tokens(1)]  # the longest counts
    state = capture(tiny.policy(CONFIG), prompts, chunk_tokens=8)
    assert state.capacity == capacity


def lowered(capacity: int, chunk: int):
  """The program of one chunk, lowered from shapes."""
  shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  make = partial(
      empty_prompt_state,
      CONFIG,
      mesh=make_mesh(),
      capacity=capacity,
      chunk_tokens=chunk,
      batch=1,
  )
  shapes = jax.eval_shape(make), shape((1, chunk)), shape(()), shape((1,))
  return capture_chunk.lower(tiny.policy(CONFIG), *shapes)


def test_a_chunk_is_written_in_place(x64):
  compiled = lowered(2560, 16).compile()
  analysis = compiled.memory_analysis()
  assert analysis.alias_size_in_bytes == nbytes(CONFIG, capacity=2560)
  assert "input_output_alias" in compiled.as_text()
  # One layer's keys and values are sliced off the stack; not all are copied.
  larger = lowered(4 * 2560, 16).compile()
  growth = programs.temp_bytes(larger) - programs.temp_bytes(compiled)
  state_growth = nbytes(CONFIG, capacity=3 * 2560)
  assert growth < 1.02 * state_growth / CONFIG.num_blocks


def test_a_run_of_mixed_prompts_compiles_once_a_bucket(x64):
  policy = tiny.policy(CONFIG)
  lengths = (26, 90, 30, 27, 70, 33, 29, 121, 75, 26, 92, 72)
  buckets = {bucket(length - 1, multiple=8) for length in lengths}
  assert 1 < len(buckets) < len(set(lengths))
  before = capture_chunk._cache_size()
  for length in lengths:
    capture(policy, [tiny.tokens(length)], chunk_tokens=8)
  assert capture_chunk._cache_size() == before + len(buckets)

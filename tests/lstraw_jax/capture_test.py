"""The prompt is cut as one likes; the state is that of one pass."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture, capture_chunk, extend
from lstraw_jax.prompt_state import empty_prompt_state, nbytes
from lstraw_jax.rollouts import bucket
from modeling.layer_state import DeltaState, KvState, empty_recurrent
from tests import programs, tiny

FLOAT64_TOLERANCE = 1e-11
CONFIG = tiny.config()
PROMPT = tiny.tokens(150)
CAPACITY = 192


@jax.jit
def one_pass(policy, tokens, count):
  """Runs all tokens at once, behind nothing; `count` of them are real."""
  offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  _, delta = policy.model(
      tokens[None],
      positions_BT=jnp.where(offset < count, offset, -1)[None],
      prefixes=(),
      recurrent=empty_recurrent(policy.config, batch=1),
  )
  return delta


@functools.cache
def oracle(tokens: int) -> tuple[KvState, DeltaState]:
  """The state after the first tokens of the prompt, by one pass over them."""
  delta = one_pass(tiny.policy(CONFIG), PROMPT[:149], np.int32(tokens))
  slots = jax.tree.map(lambda x: np.asarray(x)[:, :, :tokens], delta.slots)
  return slots, jax.device_get(delta.recurrent)


def assert_state(state, *, prompt_tokens: int) -> None:
  """Holds a captured state against one pass over the same tokens."""
  filled = np.flatnonzero(np.asarray(state.positions[0]) >= 0)
  order = filled[np.argsort(np.asarray(state.positions)[0, filled])]
  at = np.asarray(state.positions)[0, order]
  np.testing.assert_array_equal(at, np.arange(prompt_tokens - 1))
  assert state.length.tolist() == [prompt_tokens - 1]
  assert state.next_token.tolist() == [PROMPT[prompt_tokens - 1]]
  slots, recurrent = oracle(prompt_tokens - 1)
  for ours, wanted in (
      (jax.tree.map(lambda x: np.asarray(x)[:, :, order], state.slots), slots),
      (state.recurrent, recurrent),
  ):
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=FLOAT64_TOLERANCE, rtol=0),
        jax.device_get(ours),
        wanted,
    )


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("length", [1, 2, "chunk-1", "chunk", "chunk+1", 150])
def test_any_split_through_the_state_equals_one_pass(x64, length, chunk):
  # P tokens evaluate P - 1. "chunk" of 64 is one call without any padding.
  near = {"chunk-1": chunk, "chunk": chunk + 1, "chunk+1": chunk + 2}
  length = near.get(length, length)
  state = capture(
      tiny.policy(CONFIG),
      PROMPT[:length],
      chunk_tokens=chunk,
      capacity=CAPACITY,
      policy_step=3,
  )
  assert_state(state, prompt_tokens=length)
  assert state.policy_step == 3


@pytest.mark.parametrize("turns", [[11, 23, 1, 36], [1, 1, 7, 14], [70, 80]])
def test_extending_after_an_unaligned_length_equals_one_capture(x64, turns):
  policy, first = tiny.policy(CONFIG), turns[0]
  settings = dict(chunk_tokens=7)
  state = capture(policy, PROMPT[:first], capacity=CAPACITY, **settings)
  seen = first
  for turn in turns[1:]:
    state = extend(policy, state, PROMPT[seen : seen + turn], **settings)
    seen += turn
    assert_state(state, prompt_tokens=seen)


def test_extending_consumes_the_state(x64):
  policy = tiny.policy(CONFIG)
  state = capture(policy, PROMPT[:9], chunk_tokens=7, capacity=CAPACITY)
  extend(policy, state, PROMPT[9:12], chunk_tokens=7)
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
  policy = tiny.policy(CONFIG)
  with pytest.raises(ValueError, match=match):
    capture(policy, np.array(tokens), chunk_tokens=7)
  state = empty_prompt_state(CONFIG, capacity=CAPACITY)
  with pytest.raises(ValueError, match=match):
    extend(policy, state, np.array(tokens), chunk_tokens=7)
  assert not state.slots.k.is_deleted()


def test_too_little_room_is_refused_before_anything_is_written(x64):
  """Unchecked, the last chunk would be written over earlier ones."""
  policy = tiny.policy(CONFIG)
  # 15 tokens to evaluate fit 20 slots, but not the padding of the third chunk.
  with pytest.raises(ValueError, match="capacity=20: want at least 21 slots"):
    capture(policy, PROMPT[:16], chunk_tokens=7, capacity=20)
  state = capture(policy, PROMPT, chunk_tokens=7, capacity=CAPACITY)
  with pytest.raises(ValueError, match="capacity=192: want at least"):
    extend(policy, state, tiny.tokens(50), chunk_tokens=7)
  assert not state.slots.k.is_deleted()


def test_progress_is_called_after_each_chunk(x64):
  policy, calls = tiny.policy(CONFIG), []
  settings = dict(chunk_tokens=7, progress=lambda *call: calls.append(call))
  state = capture(policy, PROMPT[:17], capacity=CAPACITY, **settings)
  assert calls == [("capture", n, 3) for n in (1, 2, 3)]
  calls.clear()
  extend(policy, state, PROMPT[17:19], **settings)
  assert calls == [("capture", 1, 1)]


def test_the_default_capacity_is_a_bucket_of_the_chunk(x64, monkeypatch):
  monkeypatch.setattr(
      "lstraw_jax.capture.capture_chunk", lambda policy, state, *_: state
  )
  for length, capacity in ((1, 8), (9, 8), (10, 16), (66, 80), (81, 80)):
    prompt = tiny.tokens(length)
    state = capture(tiny.policy(CONFIG), prompt, chunk_tokens=8)
    assert state.capacity == capacity


def lowered(capacity: int, chunk: int):
  """The program of one chunk, lowered from shapes."""
  shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  state = jax.eval_shape(partial(empty_prompt_state, CONFIG, capacity=capacity))
  policy = tiny.policy(CONFIG)
  return capture_chunk.lower(policy, state, shape((chunk,)), shape(()))


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
    capture(policy, tiny.tokens(length), chunk_tokens=8)
  assert capture_chunk._cache_size() == before + len(buckets)

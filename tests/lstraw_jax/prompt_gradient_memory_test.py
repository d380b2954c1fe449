"""What the exact gradient holds: the state, its cotangent, and one chunk.

Temporaries are read off programs in float32: in bfloat16 the CPU compiler keeps
a float32 copy of all keys and values, which no accelerator does.
"""

import jax
import pytest

from tests import programs
from tests.large import (
    BLOCK,
    CHUNK,
    LARGE,
    SLOTS,
    compiled_replay,
    compiled_sweep,
    shapes,
)

pytestmark = pytest.mark.first_class


def nbytes(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def exact_replay(**changes):
  return compiled_replay(exact=True, **changes)


@pytest.mark.parametrize("compile", [exact_replay, compiled_sweep])
def test_activations_do_not_depend_on_the_prompt(compile):
  """But for a copy of its positions: which of them a chunk sees."""
  small, large = compile(slots=SLOTS), compile(slots=4 * SLOTS)
  growth = programs.temp_bytes(large) - programs.temp_bytes(small)
  tokens = 3 * SLOTS
  print(f"{compile.__name__}: {growth / tokens:.3f} bytes a prompt token")
  assert growth < 4.1 * tokens
  assert growth < 0.01 * programs.temp_bytes(small)


def test_memory_does_not_grow_with_the_group_either():
  few, many = exact_replay(), exact_replay(group_size=16)
  one_branch = programs.temp_bytes(few)
  print(f"bytes: G=2 {one_branch:,}, G=16 {programs.temp_bytes(many):,}")
  assert abs(programs.temp_bytes(many) / one_branch - 1) < 0.01


def test_a_prompt_token_takes_at_most_three_times_its_state_in_bfloat16():
  """Keys and values in bfloat16, their cotangents in float32."""
  config = LARGE.replace(dtype="bfloat16")
  tokens = 3 * SLOTS
  small, large = (
      shapes(config=config, slots=n) for n in (SLOTS, SLOTS + tokens)
  )
  state = nbytes(large.prompt) - nbytes(small.prompt)
  cotangent = nbytes(large.cotangent) - nbytes(small.cotangent)
  temporaries = max(
      programs.temp_bytes(compile(slots=SLOTS + tokens))
      - programs.temp_bytes(compile(slots=SLOTS))
      for compile in (exact_replay, compiled_sweep)
  )
  growth = state + cotangent + temporaries
  print(
      f"{growth / tokens:.1f} bytes a token, {growth / state:.4f} x the state"
  )
  assert growth <= 3 * state
  halved = jax.tree.leaves(small.prompt.slots)
  assert all(leaf.dtype.itemsize == 2 for leaf in halved)


@pytest.mark.parametrize("compile", [exact_replay, compiled_sweep])
def test_gradients_and_cotangents_are_summed_in_place(compile):
  memory = compile().memory_analysis()
  consumed = shapes().gradients, shapes().cotangent
  assert memory.alias_size_in_bytes >= nbytes(consumed)


def test_no_buffer_holds_the_scores_of_a_chunk():
  assert programs.buffers_with(compiled_sweep(), CHUNK, 512)
  assert not programs.buffers_with(compiled_sweep(), CHUNK, SLOTS)
  assert not programs.buffers_with(exact_replay(), BLOCK, SLOTS)

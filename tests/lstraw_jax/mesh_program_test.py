"""What the compiled programs of a mesh send, and what they write in place."""

import functools

import jax
import pytest

from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.sharding import make_mesh
from tests import programs, tiny

# Sizes that occur nowhere else: a shape then tells what an array holds.
CONFIG = tiny.config(
    "tiny-moe",
    dtype="float32",
    num_hidden_layers=8,
    full_attention_interval=2,
    linear_num_key_heads=8,
    linear_num_value_heads=8,
)
CHUNK, SLOTS, BLOCK = 1024, 5120, 88
SHARDS = 8


def stage_programs(slots: int = SLOTS) -> StagePrograms:
  """Returns the programs of an update on a mesh of eight shards."""
  workload = Workload(
      model=CONFIG,
      context=SHARDS,
      prompt_tokens=slots + 1,
      response_tokens=2 * BLOCK,
      group_size=2,
      update=UpdateConfig(
          prompt_gradient="dropped",
          replay=ReplayConfig(block_tokens=BLOCK, head_chunk_tokens=16),
          capture_chunk_tokens=CHUNK,
          response_multiple=2 * BLOCK,
      ),
  )
  assert workload.capacity == slots, "slots: a step of the ladder of buckets"
  return StagePrograms(workload, make_mesh(context=SHARDS))


@functools.cache
def compiled_capture(slots: int = SLOTS):
  return stage_programs(slots).lower("capture").compile()


@functools.cache
def compiled_replay(slots: int = SLOTS):
  return stage_programs(slots).lower("replay").compile()


def sent(program):
  """Returns kind and bytes of each operation that sends."""
  return sorted((x.kind, x.bytes) for x in programs.collectives(program))


def bytes_on_a_device(tree) -> int:
  return sum(
      x.dtype.itemsize
      * functools.reduce(lambda a, b: a * b, x.sharding.shard_shape(x.shape), 1)
      for x in jax.tree.leaves(tree)
  )


@pytest.mark.first_class
def test_what_a_replay_sends_does_not_depend_on_the_prompt():
  small, large = compiled_replay(SLOTS), compiled_replay(4 * SLOTS)
  kinds = {kind for kind, _ in sent(small)}
  assert {"all-gather", "reduce-scatter", "all-to-all"} <= kinds
  assert sent(small) == sent(large)
  total = sum(count for _, count in sent(small))
  print(f"{len(sent(small))} operations send {total:,} bytes, each once")


@pytest.mark.parametrize("compile", [compiled_capture, compiled_replay])
def test_neither_keys_nor_state_are_ever_gathered(compile):
  """An array that is sent has neither the slots' size nor a state's shape."""
  moved = programs.collectives(compile())
  assert moved
  state = stage_programs().prompt
  share = SLOTS // SHARDS
  for operation in moved:
    for shape in operation.shapes:
      assert not {SLOTS, share, CONFIG.num_blocks * share} & set(
          shape
      ), operation
  heads, size = CONFIG.linear_num_value_heads, CONFIG.linear_key_head_dim
  gathered = [x for x in moved if x.kind in ("all-gather", "all-reduce")]
  for operation in gathered:
    for shape in operation.shapes:
      assert shape[-3:] != (heads, size, size), operation
  assert state.recurrent.recurrent.shape[-3:] == (heads, size, size)


def test_capture_writes_its_state_in_place():
  """All of its output is its input's memory, but for 8 bytes that stay."""
  state = stage_programs().prompt
  leaves = len(jax.tree.leaves(state))
  analysis = compiled_capture().memory_analysis()
  assert analysis.alias_size_in_bytes >= bytes_on_a_device(state) - 8
  pointers = 8 * leaves
  fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  assert fresh <= pointers + 8  # the numbers of the next token and the step

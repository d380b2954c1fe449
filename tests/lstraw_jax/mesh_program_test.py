"""What the compiled programs of a mesh send, and what they write in place."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lstraw_jax.capture import capture_chunk
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.policy import make_policy
from lstraw_jax.prompt_state import empty_prompt_state
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import BranchBatch
from modeling.qwen3_5 import abstract_model
from modeling.sharding import make_mesh, shardings
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


def on_mesh(tree, where):
  """Returns shapes with these shardings."""
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      tree,
      where,
  )


@functools.cache
def arguments(slots: int):
  """Returns policy and prompt state as shapes on a mesh of eight shards."""
  mesh = make_mesh(context=SHARDS)
  policy = make_policy(abstract_model(CONFIG, mesh=mesh))
  lowered = empty_prompt_state.lower(
      CONFIG, mesh=mesh, capacity=slots, chunk_tokens=CHUNK, batch=1
  )
  return (
      on_mesh(policy, shardings(policy, mesh)),
      on_mesh(lowered.out_info, lowered.compile().output_shardings),
      lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(
          shape, dtype, sharding=NamedSharding(mesh, PartitionSpec())
      ),
  )


@functools.cache
def compiled_capture(slots: int = SLOTS):
  policy, state, array = arguments(slots)
  lowered = capture_chunk.lower(
      policy, state, array(1, CHUNK), array(), array(1)
  )
  return lowered.compile()


@functools.cache
def compiled_replay(slots: int = SLOTS):
  policy, state, array = arguments(slots)
  shape = (1, 2, 2 * BLOCK)
  branches = BranchBatch(
      inputs=array(*shape),
      targets=array(*shape),
      valid=array(*shape, dtype=bool),
      loss_mask=array(*shape, dtype=bool),
      old_log_probs=None,
      ref_log_probs=None,
      advantages=array(1, 2, dtype=jnp.float32),
  )
  gradients = jax.eval_shape(zero_gradients, policy)
  return replay.lower(
      policy,
      state,
      branches,
      on_mesh(gradients, shardings(gradients, policy.mesh)),
      None,
      config=ReplayConfig(block_tokens=BLOCK, head_chunk_tokens=16),
  ).compile()


def sent(program):
  """Returns kind and bytes of each operation that sends."""
  return sorted((x.kind, x.bytes) for x in programs.collectives(program))


def bytes_on_a_device(tree) -> int:
  return sum(
      x.dtype.itemsize
      * functools.reduce(lambda a, b: a * b, x.sharding.shard_shape(x.shape), 1)
      for x in jax.tree.leaves(tree)
  )


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
  _, state, _ = arguments(SLOTS)
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
  _, state, _ = arguments(SLOTS)
  leaves = len(jax.tree.leaves(state))
  analysis = compiled_capture().memory_analysis()
  assert analysis.alias_size_in_bytes >= bytes_on_a_device(state) - 8
  pointers = 8 * leaves
  fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  assert fresh <= pointers + 8  # the numbers of the next token and the step

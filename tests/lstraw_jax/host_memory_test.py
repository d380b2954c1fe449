"""Slots in host memory: the same bits, and a part of a layer on the device."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture, capture_chunk
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.prompt_state import empty_prompt_state
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.sampling import SamplingConfig, sample
from modeling.sharding import make_mesh
from tests import programs, tiny

CONFIG = tiny.config(dtype="float32")
GLM = tiny.config("tiny-glm", dtype="float32")
CONFIGS = {"dense": CONFIG, "glm": GLM}
CHUNK, CAPACITY, CONTEXT = 8, 4096, 4  # two blocks of 512 slots a shard
REPLAY = ReplayConfig(block_tokens=8)
SAMPLING = SamplingConfig(max_tokens=5)
KINDS = ("device", "pinned_host")
SHARE = CHUNK // CONTEXT  # tokens of a chunk on a shard
BLOCK = (512, CONFIG.num_key_value_heads, CONFIG.head_dim)
# Rows are gathered of what is chosen: a layer at a time comes to the device.
LATENTS = (CAPACITY // CONTEXT, GLM.latent_dim)
INDEX_KEYS = (CAPACITY // CONTEXT, GLM.index_head_dim)
# What each stage reads, and a chunk writes. Replay walks blocks forwards,
# rebuilds each graph, recomputes it layer by layer, and reads slots for the
# gradient; of the two kinds of layers of GLM, one searches index keys, and it
# does not search again.
READ = {
    "dense": {
        "capture": [BLOCK] * 2,  # keys and values
        "replay": [BLOCK] * 2 * 4,
        "sample": [BLOCK] * 2,
    },
    "glm": {
        "capture": [LATENTS] * 2 + [INDEX_KEYS],
        "replay": [LATENTS] * 2 * 4 + [INDEX_KEYS] * 2,
        "sample": [LATENTS] * 2 + [INDEX_KEYS],
    },
}
WRITTEN = {
    "dense": [(CONFIG.num_blocks, 1, SHARE, *BLOCK[1:])] * 2,
    "glm": [
        (GLM.num_hidden_layers, 1, SHARE, GLM.latent_dim),
        (GLM.num_indexers, 1, SHARE, GLM.index_head_dim),
    ],
}


@functools.cache
def policy(config=CONFIG):
  return tiny.policy(config, mesh=make_mesh(context=CONTEXT))


def branches(policy):
  return tiny.branches(tiny.group(tiny.tokens(38), (3, 9)), mesh=policy.mesh)


def crossings(jaxpr) -> list[tuple]:
  """Returns (from, to, shape) of each value that changes memory.

  A compiled CPU program has no trace of it but in its entry's layout: there,
  moving a value to another memory costs nothing.
  """
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name == "device_put":
      pairs = zip(equation.invars, equation.outvars, strict=True)
      for before, after in pairs:
        sides = [x.aval.memory_space.name for x in (before, after)]
        if sides[0] != sides[1]:
          found.append((*sides, after.aval.shape))
    is_program = lambda x: isinstance(x, jax.extend.core.Jaxpr)
    for value in jax.tree.leaves(equation.params, is_leaf=is_program):
      inner = getattr(value, "jaxpr", value)
      if is_program(inner):
        found += crossings(inner)
  return found


def traced(stage, kind, *, model="dense"):
  """Returns a stage traced behind a prompt state of that kind."""
  ours = policy(CONFIGS[model])
  state = capture(
      ours,
      [tiny.tokens(38)],
      chunk_tokens=CHUNK,
      capacity=CAPACITY,
      memory_kind=kind,
  )
  match stage:
    case "capture":
      tokens = np.zeros((1, CHUNK), np.int32)
      ends = np.full((1,), 8, np.int32)
      return capture_chunk.trace(ours, state, tokens, np.int32(0), ends)
    case "replay":
      gradients = zero_gradients(ours)
      return replay.trace(
          ours, state, branches(ours), gradients, None, config=REPLAY
      )
    case "sample":
      keys = jax.random.split(jax.random.key(0), 1)
      return sample.trace(ours, state, keys, group_size=2, config=SAMPLING)


@pytest.mark.first_class
@pytest.mark.parametrize("model", ["dense", "glm"])
def test_every_result_is_bitwise_that_of_device_memory(model):
  found = {}
  for kind in KINDS:
    ours = policy(CONFIGS[model])
    state = capture(
        ours,
        [tiny.tokens(38)],
        chunk_tokens=CHUNK,
        capacity=CAPACITY,
        memory_kind=kind,
    )
    for leaf in jax.tree.leaves(state.slots):
      assert leaf.sharding.memory_kind == kind
    replayed = replay(
        ours, state, branches(ours), zero_gradients(ours), None, config=REPLAY
    )
    keys = jax.random.split(jax.random.key(0), 1)
    samples = sample(ours, state, keys, group_size=2, config=SAMPLING)
    found[kind] = jax.device_get(
        (state.slots, state.recurrent, replayed, samples)
    )
  for leaf in jax.tree.leaves(found["device"][0]):
    assert np.abs(leaf).max() > 0
  jax.tree.map(
      np.testing.assert_array_equal, found["device"], found["pinned_host"]
  )


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("stage", ["capture", "replay", "sample"])
def test_a_part_of_one_layer_at_a_time_comes_to_the_device(stage, model):
  """And of what a chunk writes, its own slots go back."""
  wanted = [("Host", "Device", part) for part in READ[model][stage]]
  if stage == "capture":
    for own in WRITTEN[model]:
      wanted.append(("Host", "Device", own))
      # In two forms, of which a platform takes one.
      wanted += [("Device", "Host", own)] * 2
  found = crossings(traced(stage, "pinned_host", model=model).jaxpr)
  assert sorted(found) == sorted(wanted)
  assert crossings(traced(stage, "device", model=model).jaxpr) == []


@pytest.mark.parametrize("model", CONFIGS)
def test_the_program_takes_its_slots_from_host_memory_and_leaves_them_there(
    model,
):
  compiled = traced("capture", "pinned_host", model=model).lower().compile()
  entry = compiled.as_text().split("\n", 1)[0]
  assert entry.count("S(5)") == 4  # two kinds of slots, in and out
  for where in jax.tree.leaves(compiled.output_shardings.slots):
    assert where.memory_kind == "pinned_host"
  on_device = traced("capture", "device", model=model)
  on_device = on_device.lower().compile().as_text()
  assert "S(5)" not in on_device


def test_capture_writes_host_slots_in_place():
  ours = policy()
  state = empty_prompt_state(
      CONFIG,
      mesh=ours.mesh,
      capacity=CAPACITY,
      chunk_tokens=CHUNK,
      batch=1,
      memory_kind="pinned_host",
  )
  where = lambda x: [
      s.data.unsafe_buffer_pointer() for s in x.addressable_shards
  ]
  before = where(state.slots.k)
  tokens = jnp.zeros((1, CHUNK), jnp.int32)
  after = capture_chunk(
      ours, state, tokens, jnp.int32(0), jnp.array([8], jnp.int32)
  )
  assert state.slots.k.is_deleted() and where(after.slots.k) == before


def test_staged_blocks_are_not_kept_for_the_backward_pass():
  """Replay's temporaries do not grow with the layers' slots."""
  temporaries = {}
  for layers in (6, 12):
    ours = policy(tiny.config(dtype="float32", num_hidden_layers=layers))
    state = empty_prompt_state(
        ours.config,
        mesh=ours.mesh,
        capacity=1 << 14,
        chunk_tokens=CHUNK,
        batch=1,
        memory_kind="pinned_host",
    )
    lowered = replay.lower(
        ours, state, branches(ours), zero_gradients(ours), None, config=REPLAY
    )
    temporaries[layers] = programs.temp_bytes(lowered.compile())
    one_layer = state.slots.k.nbytes // ours.config.num_blocks // CONTEXT
  growth = temporaries[12] - temporaries[6]
  assert growth < one_layer  # two layers more, with keys and values each


@pytest.mark.parametrize("kind", ["unpinned_host", "hbm", ""])
def test_a_memory_that_is_not_there_is_refused(kind):
  with pytest.raises(ValueError, match=f"memory_kind='{kind}': want one of"):
    capture(policy(), [tiny.tokens(9)], chunk_tokens=8, memory_kind=kind)

"""Indexers trained over chunks and shards, against one graph a sequence."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lstraw_jax.capture import TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.policy import make_policy
from lstraw_jax.prompt_gradient import PromptLoss, add_prompt_gradient
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.sequences import with_loss_everywhere
from lstraw_jax.sft_step import SftConfig, sft_step
from lstraw_jax.state_cotangent import zero_cotangent
from lstraw_jax.train_state import make_train_state
from modeling import checkpoint_names
from modeling.models import abstract_model
from modeling.parameter import Buffer, IndexerParam
from modeling.sharding import make_mesh
from tests import programs, tiny
from tests.large import LARGE_GLM, SLOTS, shapes

TOLERANCE = 1e-12  # float64, relative to the largest entry of a leaf
CONFIG = tiny.config(
    "tiny-glm",
    indexer_types=("full", "shared")
    * 3,  # the second one is of the third layer
    mlp_layer_types=("dense", "sparse") * 3,
    train_indexers=True,
)
CHUNK, CAPACITY = 16, 80
ONE = (1, 1, 1)
# A multiple of no chunk; the second one ends chunks before.
PROMPTS = [tiny.tokens(count, seed=count) for count in (75, 41)]


def weights_of(prompt):
  """A weight of each token; a third of them carry no loss."""
  rng = np.random.default_rng(len(prompt))
  weights = rng.normal(size=prompt.size) * (rng.random(prompt.size) > 0.3)
  return np.append(0.0, weights[1:])


class Found(NamedTuple):
  """Summed over the prompts."""

  gradients: nnx.State
  loss: float


def by_chunks(sizes=ONE, *, chunk_tokens=CHUNK, memory_kind="device") -> Found:
  """As the library does it, as many prompts a turn as there are replicas."""
  data, context, tensor = sizes
  mesh = make_mesh(data=data, context=context, tensor=tensor)
  policy = tiny.policy(CONFIG, mesh=mesh)
  gradients, loss = zero_gradients(policy), 0.0
  for first in range(0, len(PROMPTS), data):
    turn = PROMPTS[first : first + data]
    prompt, tape = capture_with_tape(
        policy,
        turn,
        tape=TapeConfig(),
        chunk_tokens=chunk_tokens,
        capacity=CAPACITY,
        memory_kind=memory_kind,
    )
    cotangent = zero_cotangent(policy, prompt)
    for leaf in jax.tree.leaves((prompt.slots, cotangent.slots)):
      assert leaf.sharding.memory_kind == memory_kind
    gradients, of_turn = add_prompt_gradient(
        policy,
        prompt,
        tape,
        gradients,
        cotangent,
        policy_step=0,
        loss=PromptLoss(list(map(weights_of, turn)), head_chunk_tokens=8),
    )
    loss += float(of_turn)
  return Found(jax.device_get(gradients), loss)


@jax.jit
def one_graph(policy, tokens, positions, weights):
  """Gradient and loss of whole sequences [B, T], without a state or a chunk.

  Nothing of the update is used but the model.
  """

  def loss(trainable):
    _, delta = policy.replace(trainable=trainable).model(
        tokens,
        positions_BT=positions,
        prefixes=(),
        recurrent=None,
        indexer_loss=True,
    )
    return (weights * delta.indexer_loss).sum()

  value, gradients = jax.value_and_grad(loss)(policy.trainable)
  return gradients, value


def inputs():
  """Padded tokens, positions and weights; a token's is that of the next."""
  length = max(map(len, PROMPTS)) - 1
  pad = lambda x, fill: np.pad(x, (0, length - len(x)), constant_values=fill)
  stack = lambda rows, fill=0: np.stack([pad(x, fill) for x in rows])
  return (
      stack([x[:-1] for x in PROMPTS]),
      stack([np.arange(len(x) - 1, dtype=np.int32) for x in PROMPTS], -1),
      stack([weights_of(x)[1:] for x in PROMPTS]),
  )


@functools.cache
def wanted() -> Found:
  """Of one device."""
  gradients, loss = one_graph(tiny.policy(CONFIG), *inputs())
  return Found(jax.device_get(gradients), float(loss))


def assert_equal(found, wanted):
  error = tiny.largest_difference(found.gradients, wanted.gradients)
  print(f"{error:.1e} relative, loss {abs(found.loss / wanted.loss - 1):.1e}")
  assert error < TOLERANCE
  assert abs(found.loss - wanted.loss) < TOLERANCE * abs(wanted.loss)


@pytest.mark.parametrize("chunk_tokens", [CHUNK, CAPACITY // 2])
def test_chunks_have_the_gradient_of_one_graph(x64, chunk_tokens):
  assert_equal(by_chunks(chunk_tokens=chunk_tokens), wanted())
  for leaf in jax.tree.leaves(wanted().gradients):
    assert np.abs(leaf).max() > 1e-3


def test_index_keys_in_host_memory_give_the_same_gradient(x64):
  assert_equal(by_chunks(memory_kind="pinned_host"), wanted())


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1)], ids=str)
def test_meshes_have_the_gradient_of_one_device(x64, sizes):
  assert_equal(by_chunks(sizes), wanted())


def test_sums_are_those_of_index_keys_alone(x64):
  policy = tiny.policy(CONFIG)
  prompt, _ = capture_with_tape(
      policy,
      PROMPTS[:1],
      tape=TapeConfig(),
      chunk_tokens=CHUNK,
      capacity=CAPACITY,
  )
  cotangent = zero_cotangent(policy, prompt)
  assert cotangent.slots.latent is None and cotangent.recurrent is None
  keys, sums = prompt.slots.index_key, cotangent.slots.index_key
  assert (sums.shape, sums.dtype) == (keys.shape, jnp.float64)
  assert keys.any() and not sums.any()


@pytest.mark.first_class
def test_temporaries_do_not_depend_on_the_prompt():
  """Index keys and latents are read, and sums are added to, where they lie."""
  compiled = {}
  for slots in (SLOTS, 4 * SLOTS):
    config = LARGE_GLM.replace(train_indexers=True)
    stages = shapes(slots=slots, config=config, group_size=0)
    compiled[slots] = stages.lower("prompt_gradient").compile()
  one, four = map(programs.temp_bytes, compiled.values())
  print(f"{one:,} bytes, {four:,} with 4 times the slots")
  assert four - one < 9 * 3 * SLOTS  # two copies of the positions
  stored = config.slot_shapes(batch=1, slots=slots)
  found = programs.buffers_with(compiled[slots], slots)
  assert {*found} == {(1, slots), stored.latent.shape, stored.index_key.shape}


def test_steps_change_indexers_alone_and_lower_their_loss(x64):
  sequence = with_loss_everywhere(PROMPTS[0])
  optimizer = optax.adam(1e-2)
  state = make_train_state(
      tiny.fresh(tiny.policy(CONFIG)), optimizer, seed=0, with_reference=False
  )
  before, losses = tiny.copied(state.policy), []
  for _ in range(4):
    state, metrics = sft_step(
        state,
        [[sequence]],
        optimizer=optimizer,
        config=SftConfig(
            tape=TapeConfig(), capture_chunk_tokens=CHUNK, head_chunk_tokens=8
        ),
        clock=PhaseClock(),
    )
    losses.append(metrics.loss)
  given = inputs()
  mean = np.zeros_like(given[-1])
  mean[0] = 1 / mean.shape[1]
  _, loss = one_graph(tiny.policy(CONFIG), *given[:2], mean)
  np.testing.assert_allclose(losses[0], loss, rtol=TOLERANCE)
  print(losses)
  assert losses[-1] < 0.9 * losses[0]
  after = tiny.copied(state.policy)
  jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
  for x, y in zip(
      *(jax.tree.leaves(x.trainable) for x in (before, after)), strict=True
  ):
    assert (x != y).any()


@pytest.mark.parametrize("train", [False, True])
def test_indexers_are_trained_alone_or_not_at_all(train):
  config = tiny.config("tiny-glm", dtype="float32", train_indexers=train)
  policy = make_policy(abstract_model(config))
  kinds = lambda state: {
      type(x) for x in checkpoint_names.variables(state).values()
  }
  if train:
    assert kinds(policy.trainable) == {IndexerParam}
    assert kinds(policy.frozen) == {nnx.Param, Buffer}
  else:
    assert kinds(policy.trainable) == {nnx.Param}
    assert kinds(policy.frozen) == {IndexerParam, Buffer}


def test_replay_refuses_to_train_indexers():
  config = tiny.config("tiny-glm", dtype="float32", train_indexers=True)
  policy = tiny.policy(config)
  group = tiny.group(tiny.tokens(9), (3,))
  with pytest.raises(ValueError, match="train_indexers=True: want False"):
    replay(
        policy,
        tiny.captured(policy, group.prompt_tokens),
        tiny.branches(group),
        zero_gradients(policy),
        None,
        config=ReplayConfig(),
    )

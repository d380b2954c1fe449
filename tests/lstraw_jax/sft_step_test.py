"""Supervised training against one ordinary graph over whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lstraw_jax.capture import TapeConfig
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.sequences import TokenSequence, with_loss_everywhere
from lstraw_jax.sft_step import SftConfig, sft_step
from lstraw_jax.train_state import make_train_state
from modeling.layer_state import empty_recurrent
from modeling.sharding import MeshConfig
from tests import tiny

TOLERANCE = 1e-9  # float64, relative to the largest entry of a leaf
LAYERS = dict(num_hidden_layers=2, full_attention_interval=2)
KINDS = {name: tiny.config(name, **LAYERS) for name in ("tiny", "tiny-moe")}
KINDS["tiny-glm"] = tiny.config(
    "tiny-glm",
    num_hidden_layers=2,
    indexer_types=("full", "shared"),
    mlp_layer_types=("dense", "sparse"),
)
CONFIG = SftConfig(
    tape=TapeConfig(),
    capture_chunk_tokens=16,
    head_chunk_tokens=8,
)
LENGTHS = (75, 41)  # no multiple of a chunk
SGD = optax.sgd(1.0)  # its update is the gradient


def sequence(length, *, seed=0, kept=0.4):
  """Returns a sequence a share of whose tokens carries loss."""
  mask = np.random.default_rng(seed).random(length) < kept
  mask[0] = False
  return TokenSequence(tokens=tiny.tokens(length, seed=seed), loss_mask=mask)


def two_sequences():
  return [sequence(n, seed=seed) for seed, n in enumerate(LENGTHS)]


def train_state(policy, optimizer=SGD):
  return make_train_state(
      tiny.fresh(policy), optimizer, seed=0, with_reference=False
  )


def step(state, turns, *, config=CONFIG, clock=None, progress=None):
  return sft_step(
      state,
      turns,
      optimizer=SGD,
      config=config,
      clock=clock or PhaseClock(),
      progress=progress,
  )


def gradient(policy, turns, config=CONFIG):
  """The mean gradient of a step, as SGD applies it, and the metrics."""
  before = tiny.copied(policy.trainable)
  after, metrics = step(train_state(policy), turns, config=config)
  after = jax.device_get(after.policy.trainable)
  return jax.tree.map(np.subtract, before, after), metrics


@functools.cache
def one_by_one(kind):
  """The gradient of two sequences of unequal length, in turns of their own."""
  return gradient(tiny.policy(KINDS[kind]), [[x] for x in two_sequences()])


@jax.jit
def ordinary(policy, tokens, mask):
  """Gradient and mean cross entropy of padded [B, T] tokens, in one graph.

  Nothing of the update is used but the model.
  """
  rows, count = tokens.shape

  def loss(trainable):
    model = policy.replace(trainable=trainable).model
    positions = jnp.arange(count, dtype=jnp.int32)
    hidden, _ = model(
        tokens,
        positions_BT=jnp.broadcast_to(positions, (rows, count)),
        prefixes=(),
        recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=rows),
    )
    log_probs = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    return -(picked[..., 0] * mask[:, 1:]).sum() / mask.sum()

  value, gradients = jax.value_and_grad(loss)(policy.trainable)
  return gradients, value


def padded(sequences):
  """Returns tokens and masks; padding follows, where nothing can see it."""
  pad = lambda x: np.pad(x, (0, max(LENGTHS) - x.size))
  tokens = np.stack([pad(x.tokens) for x in sequences])
  masks = np.stack([pad(x.loss_mask) for x in sequences])
  return jnp.asarray(tokens), jnp.asarray(masks, jnp.float64)


@pytest.mark.parametrize(
    "kind",
    [
        "tiny",
        pytest.param("tiny-moe", marks=pytest.mark.first_class),
        pytest.param("tiny-glm", marks=pytest.mark.first_class),
    ],
)
def test_a_step_is_that_of_ordinary_training(x64, kind):
  found, metrics = one_by_one(kind)
  wanted, loss = ordinary(tiny.policy(KINDS[kind]), *padded(two_sequences()))
  error = tiny.largest_difference(found, wanted)
  print(kind, error, abs(metrics.loss / loss - 1))
  assert error < TOLERANCE
  assert abs(metrics.loss / loss - 1) < TOLERANCE
  squares = sum((g**2).sum() for g in jax.tree.leaves(jax.device_get(wanted)))
  np.testing.assert_allclose(metrics.grad_norm, squares**0.5, rtol=TOLERANCE)


def test_tokens_are_counted(x64):
  _, metrics = one_by_one("tiny")
  assert metrics.tokens == sum(LENGTHS)
  kept = sum(int(x.loss_mask.sum()) for x in two_sequences())
  assert metrics.loss_tokens == kept < 0.6 * metrics.tokens


def test_sequences_of_one_turn_are_those_of_turns_of_their_own(x64):
  """On a mesh, a sequence a replica, its tokens over two devices."""
  policy = tiny.policy(KINDS["tiny"], mesh=MeshConfig(data=2, context=2).make())
  together, metrics = gradient(policy, [two_sequences()])
  wanted, wanted_metrics = one_by_one("tiny")
  assert tiny.largest_difference(together, wanted) < TOLERANCE
  np.testing.assert_allclose(metrics, wanted_metrics, rtol=TOLERANCE)


def test_a_step_counts_up_and_tells_its_phases_and_chunks(x64):
  clock, told = PhaseClock(), []
  state, _ = step(
      train_state(tiny.policy(KINDS["tiny"])),
      [[sequence(LENGTHS[1])]],
      clock=clock,
      progress=lambda *call: told.append(call),
  )
  assert int(state.step) == 1
  assert clock.seconds.keys() == {"capture", "prompt", "optimizer"}
  assert told == [
      *(("capture", n, 3) for n in (1, 2, 3)),
      *(("prompt gradient", n, 3) for n in (1, 2, 3)),
  ]


def test_a_gradient_that_is_not_finite_raises(x64):
  policy = tiny.policy(KINDS["tiny"])
  broken = jax.tree.map(lambda x: x * jnp.nan, policy.trainable)
  state = train_state(policy.replace(trainable=broken))
  with pytest.raises(FloatingPointError, match="step 0: the gradient norm is"):
    step(state, [[sequence(LENGTHS[1])]])


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("capture_chunk_tokens", 0, "capture_chunk_tokens=0: want at least 1"),
        ("head_chunk_tokens", 0, "head_chunk_tokens=0: want at least 1"),
        ("cotangent_dtype", "int8", "cotangent_dtype='int8'"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **{name: value})


@pytest.mark.parametrize(
    "mask,message",
    [
        ([0, 1], r"loss_mask.shape=\(2,\): wanted \(3,\)"),
        ([1, 0, 1], "2 tokens that carry loss, .* not the first"),
        ([0, 0, 0], "0 tokens that carry loss, wanted at least one"),
    ],
)
def test_a_sequence_has_a_loss_behind_its_first_token(mask, message):
  with pytest.raises(ValueError, match=message):
    TokenSequence(tokens=tiny.tokens(3), loss_mask=np.array(mask, bool))


def test_every_token_but_the_first_may_carry_loss():
  mask = with_loss_everywhere(tiny.tokens(4)).loss_mask
  assert mask.tolist() == [False, True, True, True]

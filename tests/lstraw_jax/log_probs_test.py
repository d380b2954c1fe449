"""The chunked head against a dense softmax, and what it never makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lstraw_jax.log_probs import TokenScores, token_log_probs
from lstraw_jax.policy import make_policy
from modeling.qwen3_5 import Qwen3_5
from tests import programs, tiny
from tests.random_model import random_model

FLOAT64_TOLERANCE = 1e-12
BF16_TOLERANCE = 1e-5  # measured 1e-6; logits in bfloat16 would be 7e-3 off
VOCAB = 257
HEAD = tiny.config(vocab_size=VOCAB, hidden_size=48)
ADAPTED = HEAD.replace(lora=tiny.ALL_ADAPTERS)
TIED = HEAD.replace(tie_word_embeddings=True)


def problem(config, *, rows=23, batch=1, keep=0.6, seed=0):
  """Hidden states, targets and a random keep mask."""
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(batch, rows, config.hidden_size))
  return (
      jnp.asarray(hidden, config.dtype),
      jnp.asarray(rng.integers(0, config.vocab_size, (batch, rows)), jnp.int32),
      jnp.asarray(rng.random((batch, rows)) < keep),
  )


def dense(model, hidden, targets, keep, *, temperature, chunk_tokens=None):
  """The same scores by a softmax of all rows at once."""
  del chunk_tokens
  log_probs = jax.nn.log_softmax(model.logits(hidden) / temperature)
  picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
  return TokenScores(jnp.where(keep, picked, 0), jnp.where(keep, entropy, 0))


@functools.cache
def value_and_gradients(scores, config, **settings):
  """Compiles scores and gradients of a random sum of both, head included."""
  graphdef = tiny.policy(config).graphdef

  @jax.jit
  def run(trainable, frozen, hidden, targets, keep):
    def loss(trainable, hidden):
      model = nnx.merge(graphdef, trainable, frozen)
      found = scores(model, hidden, targets, keep, **settings)
      rng = np.random.default_rng(1)
      weigh = lambda x: (x * rng.normal(size=x.shape)).sum()
      return weigh(found.log_probs) + weigh(found.entropy), found

    gradients, found = jax.grad(loss, (0, 1), has_aux=True)(trainable, hidden)
    return found, gradients

  policy = tiny.policy(config)
  return lambda *inputs: run(policy.trainable, policy.frozen, *inputs)


@pytest.mark.parametrize(
    "chunk,temperature", [(1, 0.6), (5, 1.0), (5, 0.6), (23, 1.0), (64, 0.6)]
)
def test_scores_and_gradients_equal_a_dense_softmax(x64, chunk, temperature):
  chunked = value_and_gradients(
      token_log_probs, HEAD, temperature=temperature, chunk_tokens=chunk
  )
  whole = value_and_gradients(dense, HEAD, temperature=temperature)
  for seed, keep in enumerate((0.0, 0.1, 0.5, 0.9, 1.0)):
    inputs = problem(HEAD, keep=keep, seed=seed)
    found, gradients = chunked(*inputs)
    wanted, wanted_gradients = whole(*inputs)
    assert tiny.largest_difference(found, wanted) < FLOAT64_TOLERANCE
    assert (
        tiny.largest_difference(gradients, wanted_gradients) < FLOAT64_TOLERANCE
    )


@pytest.mark.parametrize("config", [ADAPTED, TIED], ids=["adapted", "tied"])
def test_every_kind_of_head_gets_the_dense_gradient(x64, config):
  inputs = problem(config, batch=2, rows=11)
  settings = dict(temperature=0.8, chunk_tokens=4)
  chunked = value_and_gradients(token_log_probs, config, **settings)(*inputs)
  whole = value_and_gradients(dense, config, **settings)(*inputs)
  assert tiny.largest_difference(chunked, whole) < FLOAT64_TOLERANCE
  reached = [np.any(g) for g in jax.tree.leaves(jax.device_get(chunked[1][0]))]
  assert sum(reached) == (2 if config.lora else 1)


def test_a_row_that_is_not_kept_scores_zero(x64):
  hidden, targets, keep = problem(HEAD, batch=2)
  found, _ = value_and_gradients(
      token_log_probs, HEAD, temperature=1.0, chunk_tokens=5
  )(hidden, targets, keep)
  for scores in found:
    assert (scores[~keep] == 0).all() and (scores[keep] != 0).all()


@pytest.mark.parametrize("chunk", [4, 7])
def test_rows_that_are_not_kept_may_hold_nan(x64, chunk):
  """In chunks of 7 some of them share a chunk with kept rows."""
  hidden, targets, _ = problem(HEAD)
  keep = jnp.arange(23)[None] % 3 == 0  # 8 rows
  run = value_and_gradients(
      token_log_probs, HEAD, temperature=1.0, chunk_tokens=chunk
  )
  found, (d_head, d_hidden) = run(hidden, targets, keep)
  poisoned = jnp.where(keep[..., None], hidden, jnp.nan)
  again, gradients = run(poisoned, targets, keep)
  for ours, wanted in zip(
      jax.tree.leaves((again, gradients)),
      jax.tree.leaves((found, (d_head, d_hidden))),
      strict=True,
  ):
    np.testing.assert_array_equal(ours, wanted)
  assert not d_hidden[~keep].any()


@pytest.mark.parametrize(
    "kept,projections",
    [([0], 0), ([1], 1), ([8], 2), ([9], 3), ([9, 1], 3), ([0, 4], 1)],
)
def test_only_tokens_that_carry_loss_are_projected(
    x64, monkeypatch, kept, projections
):
  """A chunk holds as many of each row of the batch, so the fullest counts."""
  calls = []
  logits = Qwen3_5.logits

  def counted(model, hidden):
    jax.debug.callback(lambda rows=hidden.shape[:2]: calls.append(rows))
    return logits(model, hidden)

  monkeypatch.setattr(Qwen3_5, "logits", counted)
  hidden, targets, _ = problem(HEAD, rows=40, batch=len(kept))
  keep, rng = np.zeros((len(kept), 40), bool), np.random.default_rng(0)
  for row, count in enumerate(kept):
    keep[row, rng.permutation(40)[:count]] = True

  @jax.jit
  def scores(model, hidden, targets, keep):
    return token_log_probs(
        model, hidden, targets, keep, temperature=1.0, chunk_tokens=4
    )

  jax.block_until_ready(
      scores(tiny.policy(HEAD).model, hidden, targets, jnp.asarray(keep))
  )
  jax.effects_barrier()
  assert calls == [(len(kept), 4)] * projections


def test_log_probs_of_large_bfloat16_logits_are_never_positive():
  config = tiny.config(vocab_size=VOCAB, hidden_size=48, dtype="bfloat16")
  model = random_model(config)
  hidden, _, _ = problem(config, rows=64)
  keep = jnp.ones((1, 64), bool)

  @jax.jit
  def scores(model, hidden):
    targets = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
    return token_log_probs(
        model, hidden, targets, keep, temperature=1.0, chunk_tokens=7
    )

  for scale in (1e-3, 1.0, 30.0, 1e3, 1e6, 1e18, 1e30):
    # In every other row all logits are equal, or nearly so.
    scaled = hidden * jnp.asarray(scale, jnp.bfloat16)
    scaled = scaled.at[:, ::2].multiply(jnp.asarray(1e-30, jnp.bfloat16))
    found = scores(model, scaled)
    assert found.log_probs.dtype == jnp.float32
    assert (found.log_probs <= 0).all() and jnp.isfinite(found.log_probs).all()
    assert (found.entropy >= 0).all()


def test_a_bfloat16_head_accumulates_in_float32():
  narrow = tiny.config(vocab_size=VOCAB, hidden_size=512, dtype="bfloat16")
  model = random_model(narrow)
  hidden, targets, keep = problem(narrow, rows=64, keep=1.0)
  lowered = jax.jit(
      lambda model, *inputs: token_log_probs(
          model, *inputs, temperature=1.0, chunk_tokens=16
      )
  ).lower(model, hidden, targets, keep)
  scores = lowered.compile()(model, hidden, targets, keep)
  head = model.lm_head.kernel[...]
  logits = np.asarray(hidden[0], np.float64) @ np.asarray(head, np.float64)
  logits -= logits.max(-1, keepdims=True)
  wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  error = scores.log_probs[0] - wanted[np.arange(64), targets[0]]
  assert np.abs(error).max() < BF16_TOLERANCE
  # XLA may leave out a rounding to bfloat16, as it does on CPUs: what is asked
  # for is read as well.
  text = lowered.as_text().splitlines()
  products = [line for line in text if "dot_general" in line]
  assert products and all(line.endswith("xf32>") for line in products)


def test_no_buffer_holds_the_vocabulary_for_more_rows_than_a_chunk():
  """Forward and backward; 48 is the width of the head."""
  config = tiny.config(vocab_size=VOCAB, hidden_size=48, dtype="float32")
  policy = make_policy(random_model(config))
  inputs = problem(config, rows=1031)

  def loss(policy, hidden, targets, keep):
    found = token_log_probs(
        policy.model, hidden, targets, keep, temperature=1.0, chunk_tokens=64
    )
    return found.log_probs.sum() + found.entropy.sum()

  gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
  compiled = gradient.lower(policy, *inputs).compile()
  with_vocab = programs.buffers_with(compiled, VOCAB)
  assert (1, 64, VOCAB) in with_vocab
  rows = [np.prod(shape) // VOCAB for shape in with_vocab]
  assert max(rows) == 64

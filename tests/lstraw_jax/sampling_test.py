"""Responses are drawn from the distribution that is scored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture
from lstraw_jax.rollouts import RolloutGroup
from lstraw_jax.sampling import SamplingConfig, sample, to_rollouts
from lstraw_jax.scoring import score
from modeling.layer_state import empty_recurrent
from tests import tiny

VOCAB = 11
DTYPES = {"float32": 1e-5, "float64": 1e-11}  # tolerance against scoring
PROMPT = tiny.tokens(13, vocab_size=VOCAB)
OTHER = tiny.tokens(10, seed=9, vocab_size=VOCAB)
STOPS = (5, 6)
ONE = SamplingConfig(max_tokens=1, temperature=1.5)
MANY = SamplingConfig(max_tokens=12, temperature=1.2, stop_tokens=STOPS)
UNIFORM = SamplingConfig(max_tokens=12, temperature=1e9)
GREEDY = SamplingConfig(max_tokens=12, temperature=0.0)
DRAWS = 1000


def policy(dtype="float64", *, name="tiny"):
  """A model of few tokens, so that frequencies can be counted."""
  return tiny.policy(tiny.config(name, dtype=dtype, vocab_size=VOCAB))


@functools.cache
def captured(dtype="float64", *, name="tiny"):
  """The prompt's state."""
  return tiny.captured(policy(dtype, name=name), PROMPT)


@functools.cache
def samples(config, *, group_size=8, seed=0, dtype="float64", name="tiny"):
  """Samples behind the prompt, on the host: leaves [G, ...]."""
  drawn = sample(
      policy(dtype, name=name),
      captured(dtype, name=name),
      jax.random.key(seed)[None],
      group_size=group_size,
      config=config,
  )
  return jax.tree.map(lambda x: x[0], jax.device_get(drawn))


@jax.jit
def all_logits(policy, sequences):
  """Logits of every position, by one pass without any state."""
  positions = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
  hidden, _ = policy.model(
      sequences,
      positions_BT=jnp.broadcast_to(positions, sequences.shape),
      prefixes=(),
      recurrent=empty_recurrent(
          policy.config, mesh=policy.mesh, batch=sequences.shape[0]
      ),
  )
  return policy.model.logits(hidden)


@functools.cache
def first_shares() -> np.ndarray:
  """The distribution of the first token at temperature 1.5."""
  logits = np.asarray(all_logits(policy(), PROMPT[None])[0, -1]) / 1.5
  shares = np.exp(logits - logits.max())
  return shares / shares.sum()


def assert_drawn_from(tokens, shares) -> None:
  """Every count is within four standard deviations of its mean."""
  counts = np.bincount(tokens, minlength=VOCAB)
  std = np.sqrt(len(tokens) * shares * (1 - shares))
  assert (np.abs(counts - len(tokens) * shares) <= 4 * std).all()


def test_frequencies_are_those_of_the_softmax_at_the_temperature(x64):
  drawn = samples(ONE, group_size=DRAWS)
  tokens = drawn.tokens[:, 0]
  assert (first_shares() > 0.02).all()  # every token can be drawn
  assert_drawn_from(tokens, first_shares())
  np.testing.assert_allclose(
      drawn.log_probs[:, 0], np.log(first_shares())[tokens], atol=1e-11
  )


@pytest.mark.parametrize("top_p", [0.05, 0.6])
def test_top_p_draws_from_the_smallest_set_that_reaches_it(x64, top_p):
  config = SamplingConfig(max_tokens=1, temperature=1.5, top_p=top_p)
  tokens = samples(config, group_size=DRAWS).tokens[:, 0]
  order = np.argsort(-first_shares())
  size = np.searchsorted(np.cumsum(first_shares()[order]), top_p) + 1
  kept = order[:size]
  assert size == (1 if top_p == 0.05 else 4)
  assert set(tokens) == set(kept)
  shares = np.where(np.isin(np.arange(VOCAB), kept), first_shares(), 0)
  assert_drawn_from(tokens, shares / shares.sum())
  # Before truncation: what scoring will find.
  np.testing.assert_allclose(
      samples(config, group_size=DRAWS).log_probs[:, 0],
      np.log(first_shares())[tokens],
      atol=1e-11,
  )


def test_a_response_ends_with_its_first_stop_token(x64):
  drawn = samples(MANY)
  assert 0 < drawn.stopped.sum() < len(drawn.stopped)
  rows = (drawn.tokens, drawn.log_probs, drawn.lengths, drawn.stopped)
  for tokens, log_probs, length, stopped in zip(*rows, strict=True):
    is_stop = np.isin(tokens[:length], STOPS)
    assert is_stop[:-1].sum() == 0 and is_stop[-1] == stopped
    assert stopped or length == MANY.max_tokens
    # After a stop nothing changes any more.
    assert not tokens[length:].any() and not log_probs[length:].any()
    assert (log_probs[:length] < 0).all()


def test_a_response_does_not_depend_on_its_siblings(x64):
  many, few = samples(MANY, group_size=8), samples(MANY, group_size=3)
  np.testing.assert_array_equal(many.tokens[:3], few.tokens)
  np.testing.assert_array_equal(many.lengths[:3], few.lengths)
  np.testing.assert_allclose(many.log_probs[:3], few.log_probs, atol=1e-11)
  assert len({row.tobytes() for row in many.tokens}) >= 7


def test_prompts_of_a_batch_are_sampled_as_each_alone(x64):
  """Each by its key, whatever the other's length."""
  prompts = (OTHER, PROMPT)
  keys = jax.random.split(jax.random.key(3))
  draw = lambda prompt, keys: jax.device_get(
      sample(policy(), prompt, keys, group_size=8, config=MANY)
  )
  both = draw(capture(policy(), prompts, chunk_tokens=8), keys)
  for row, prompt in enumerate(prompts):
    alone = draw(tiny.captured(policy(), prompt), keys[row : row + 1])
    jax.tree.map(
        lambda ours, theirs, row=row: np.testing.assert_allclose(
            ours[row], theirs[0], atol=1e-11, rtol=0
        ),
        both,
        alone,
    )
  assert (both.tokens[0] != both.tokens[1]).any(1).all()


def test_every_token_of_every_response_is_drawn_anew(x64):
  """At a temperature where the logits do not matter."""
  drawn = samples(UNIFORM, group_size=8)
  assert_drawn_from(drawn.tokens.reshape(-1), np.full(VOCAB, 1 / VOCAB))
  assert all(len(set(row)) > 4 for row in drawn.tokens)
  assert all(len(set(column)) > 2 for column in drawn.tokens.T)


def test_another_key_gives_other_responses(x64):
  first, other = samples(MANY, seed=0), samples(MANY, seed=1)
  assert (first.tokens != other.tokens).any(1).sum() >= 6
  again = samples.__wrapped__(MANY, seed=0)
  jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.parametrize(
    "name,dtype",
    [("tiny", "float32"), ("tiny", "float64"), ("tiny-glm", "float64")],
)
def test_sampled_log_probs_are_those_of_scoring(x64, name, dtype):
  drawn = samples(MANY, dtype=dtype, name=name)
  rollouts = to_rollouts(drawn, np.arange(8.0))
  group = RolloutGroup(group_id="a", prompt_tokens=PROMPT, rollouts=rollouts)
  scores = score(
      policy(dtype, name=name),
      captured(dtype, name=name),
      tiny.branches(group, multiple=12),
      temperature=MANY.temperature,
      block_tokens=12,
      head_chunk_tokens=4,
  )
  assert scores.log_probs.dtype == drawn.log_probs.dtype == dtype
  np.testing.assert_allclose(
      drawn.log_probs, scores.log_probs[0], atol=DTYPES[dtype], rtol=0
  )


def test_greedy_takes_the_likeliest_token_of_one_pass(x64):
  drawn = samples(GREEDY)
  assert (drawn.tokens == drawn.tokens[:1]).all()
  sequence = np.concatenate([PROMPT, drawn.tokens[0]])[:-1]
  logits = np.asarray(all_logits(policy(), sequence[None])[0])
  likeliest = logits[len(PROMPT) - 1 :].argmax(-1)
  np.testing.assert_array_equal(drawn.tokens[0], likeliest)
  # Nothing divides by a temperature of 0.
  log_probs = jax.nn.log_softmax(logits[len(PROMPT) - 1 :])
  np.testing.assert_allclose(drawn.log_probs[0], log_probs.max(-1), atol=1e-11)


def test_sampling_leaves_the_prompt_bitwise_as_it_was(x64):
  before = tiny.copied(captured())
  samples.__wrapped__(MANY, seed=2)
  assert not any(x.is_deleted() for x in jax.tree.leaves(captured()))
  jax.tree.map(np.testing.assert_array_equal, tiny.copied(captured()), before)


def test_rollouts_hold_what_was_sampled(x64):
  drawn = samples(MANY)
  rollouts = to_rollouts(drawn, np.arange(8.0))
  assert [rollout.reward for rollout in rollouts] == list(range(8))
  for index, rollout in enumerate(rollouts):
    length = drawn.lengths[index]
    assert rollout.tokens.tolist() == drawn.tokens[index, :length].tolist()
    np.testing.assert_array_equal(
        rollout.log_probs, drawn.log_probs[index, :length]
    )
    assert rollout.loss_mask.tolist() == [True] * length
  with pytest.raises(ValueError, match="zip"):
    to_rollouts(drawn, [0.0])


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.9}])
def test_a_distribution_that_is_not_scored_is_refused_for_training(settings):
  with pytest.raises(ValueError, match="want temperature > 0 and top_p=1"):
    SamplingConfig(max_tokens=1, **settings).check_trainable()
  SamplingConfig(max_tokens=1, temperature=0.5).check_trainable()


@pytest.mark.parametrize(
    "name,value",
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"{name}={value}: want"):
    SamplingConfig(**({"max_tokens": 1} | {name: value}))

"""The drift of a reused state: what it is, and what tells it cheaply."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from lstraw_jax.metrics import PhaseClock
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.prompt_states import make_prompt_states
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.scoring import log_probs_behind
from lstraw_jax.staleness import (
    capture_witness,
    drift_nats,
    estimate_drift,
    loss_change_percent,
)
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import Request, train_step
from lstraw_jax.update_config import UpdateConfig
from modeling.sharding import make_mesh
from tests import tiny

SCORING = ReplayConfig(block_tokens=8, head_chunk_tokens=8)
PROMPT = tiny.tokens(60, seed=5)
GROUP = tiny.group(PROMPT, (6, 2, 4), masked=0.2)


def branches(**changes):
  """The responses, with old log-probs that no policy has."""
  made = tiny.branches(GROUP, multiple=8)
  old = jax.numpy.full(made.targets.shape, -5.0)
  return dataclasses.replace(made, old_log_probs=old, **changes)


def nudged(policy, *, size=0.03):
  """The policy after a step in a random direction."""
  leaves, structure = jax.tree.flatten(policy.trainable)
  rng = np.random.default_rng(0)
  moved = [x + size * rng.normal(size=x.shape) for x in leaves]
  return policy.replace(trainable=jax.tree.unflatten(structure, moved))


def behind(policy, prompt):
  """Log-probs of the responses behind a state."""
  return log_probs_behind(policy, prompt, branches(), config=SCORING)


def estimated(policy, witness):
  """The estimate for the state of a witness."""
  return estimate_drift(policy, witness, branches(), config=SCORING)


@functools.cache
def scores(name="tiny"):
  """Log-probs under moved weights, behind the old state and a new one."""
  old = tiny.policy(tiny.config(name))
  new = nudged(old)
  stale = behind(new, tiny.captured(old, PROMPT))
  fresh = behind(new, tiny.captured(new, PROMPT))
  return stale, fresh


def test_the_drift_of_a_fresh_state_is_exactly_zero(x64):
  policy = nudged(tiny.policy(tiny.config()))
  one, other = (behind(policy, tiny.captured(policy, PROMPT)) for _ in range(2))
  assert drift_nats(branches(), stale=one, fresh=other) == 0.0
  assert (
      loss_change_percent(
          branches(), stale=one, fresh=other, objective=SCORING.objective
      )
      == 0.0
  )
  witness = capture_witness(policy, [PROMPT], tokens=16, chunk_tokens=8)
  assert estimated(policy, witness) == 0.0


def test_the_drift_is_a_mean_over_the_tokens_that_carry_loss(x64):
  stale, fresh = scores()
  mask = np.asarray(branches().loss_mask)
  assert 0 < mask.sum() < np.asarray(branches().valid).sum()
  wanted = np.abs(np.asarray(stale) - np.asarray(fresh))[mask].mean()
  elsewhere = jax.numpy.where(mask, stale, 99.0)
  got = drift_nats(branches(), stale=elsewhere, fresh=fresh)
  np.testing.assert_allclose(got, wanted, rtol=1e-12)
  assert wanted > 0.01


def test_without_a_token_that_carries_loss_the_drift_is_unknown(x64):
  stale, fresh = scores()
  nothing = branches(loss_mask=jax.numpy.zeros_like(branches().loss_mask))
  assert np.isnan(drift_nats(nothing, stale=stale, fresh=fresh))


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean"])
def test_the_loss_is_that_of_an_update(x64, aggregation):
  """By hand, with a clip that some tokens run into."""
  objective = ObjectiveConfig(aggregation=aggregation, clip_eps_high=0.1)
  made, losses = branches(), []
  mask = np.asarray(made.loss_mask)[0]
  for log_probs in scores():
    ratio = np.exp(np.asarray(log_probs)[0] + 5.0)
    advantages = np.asarray(made.advantages, np.float64)[0][:, None]
    terms = -np.minimum(
        ratio * advantages, np.clip(ratio, 0.8, 1.1) * advantages
    )
    terms = np.where(mask, terms, 0)
    if aggregation == "response_mean":
      losses.append((terms.sum(1) / mask.sum(1)).mean())
    else:
      losses.append(terms.sum() / mask.sum())
  stale, fresh = scores()
  got = loss_change_percent(made, stale=stale, fresh=fresh, objective=objective)
  wanted = 100 * abs(losses[0] - losses[1]) / abs(losses[1])
  np.testing.assert_allclose(got, wanted, rtol=1e-9)
  assert got > 0.01


def test_a_loss_against_the_policy_s_own_log_probs_is_refused(x64):
  stale, fresh = scores()
  with pytest.raises(ValueError, match="old_log_probs=None: want those of"):
    loss_change_percent(
        tiny.branches(GROUP, multiple=8),
        stale=stale,
        fresh=fresh,
        objective=SCORING.objective,
    )


@pytest.mark.parametrize(
    "name", ["tiny", pytest.param("tiny-glm", marks=pytest.mark.first_class)]
)
def test_a_witness_of_the_whole_prompt_is_the_oracle(x64, name):
  """To the last bit: it is the same program on the same arrays."""
  old = tiny.policy(tiny.config(name))
  stale, fresh = scores(name)
  witness = capture_witness(old, [PROMPT], tokens=64, chunk_tokens=8)
  oracle = drift_nats(branches(), stale=stale, fresh=fresh)
  assert estimated(nudged(old), witness) == oracle > 0


def test_a_witness_is_the_end_of_each_prompt_whatever_their_lengths(x64):
  policy = tiny.policy(tiny.config())
  short = tiny.tokens(5, seed=6)
  witness = capture_witness(policy, [PROMPT, short], tokens=8, chunk_tokens=32)
  assert witness.state.chunk_tokens == 8
  assert witness.state.length.tolist() == [7, 4]
  assert witness.state.next_token.tolist() == [PROMPT[-1], short[-1]]
  np.testing.assert_array_equal(witness.prompts[0], PROMPT[-8:])


@pytest.mark.first_class
def test_on_a_mesh_the_estimate_is_that_of_one_device(x64):
  """Two prompts of different lengths on two replicas of two devices."""
  mesh = make_mesh(data=2, context=2)
  groups = [GROUP, tiny.group(tiny.tokens(9, seed=7), (3, 5), seed=4)]
  prompts = [group.prompt_tokens for group in groups]
  estimates = []
  for where in (make_mesh(), mesh):
    old = tiny.policy(tiny.config(), mesh=where)
    witness = capture_witness(old, prompts, tokens=15, chunk_tokens=16)
    new = old.replace(trainable=jax.tree.map(lambda x: 1.1 * x, old.trainable))
    made = tiny.branches(*groups, multiple=8, mesh=where)
    estimates.append(estimate_drift(new, witness, made, config=SCORING))
  np.testing.assert_allclose(*estimates, rtol=1e-9)
  assert estimates[0] > 0.01


UPDATE = UpdateConfig(
    prompt_gradient="dropped",
    replay=SCORING,
    capture_chunk_tokens=8,
    response_multiple=8,
    refresh=RefreshConfig(rule="every_n", every_n=100),
)


def drifts(learning_rate):
  """True and estimated drift after 1, 2, 4 and 8 steps behind one state."""
  optimizer = optax.adam(learning_rate)
  policy = tiny.policy(tiny.config())
  state = make_train_state(
      tiny.fresh(policy), optimizer, seed=0, with_reference=False
  )
  stale = tiny.captured(policy, PROMPT)
  witness = capture_witness(policy, [PROMPT], tokens=16, chunk_tokens=8)
  states = make_prompt_states(UPDATE)
  request = Request((PROMPT,), lambda *_: [GROUP])
  found = []
  for step in range(1, 9):
    state, _ = train_step(
        state,
        [request],
        optimizer=optimizer,
        config=UPDATE,
        clock=PhaseClock(),
        states=states,
    )
    if step in (1, 2, 4, 8):
      oracle = drift_nats(
          branches(),
          stale=behind(state.policy, stale),
          fresh=behind(state.policy, tiny.captured(state.policy, PROMPT)),
      )
      found.append((oracle, estimated(state.policy, witness)))
  return found


def test_the_estimate_follows_the_oracle_over_steps_and_learning_rates(x64):
  """From a quarter of the prompt, without a correction."""
  found = [drifts(rate) for rate in (1e-4, 5e-4, 2e-3)]
  oracle, estimate = np.array(found).reshape(-1, 2).T
  rank = lambda x: x.argsort().argsort()
  correlation = np.corrcoef(rank(oracle), rank(estimate))[0, 1]
  print(f"rank correlation {correlation:.3f}, ratios {estimate / oracle}")
  assert oracle.max() > 20 * oracle.min()
  assert correlation > 0.95
  assert (np.abs(np.log2(estimate / oracle)) < 1).all(), estimate / oracle

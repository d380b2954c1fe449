"""The states of a run: which are served again, and which are captured."""

import math
import weakref

import jax
import numpy as np
import pytest

from lstraw_jax import prompt_states
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.prompt_states import PromptStates
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.staleness import (
    capture_witness,
    drift_nats,
    estimate_drift,
    log_probs_behind,
)
from tests import tiny

SCORING = ReplayConfig(block_tokens=8, head_chunk_tokens=8)
GROUP = tiny.group(tiny.tokens(30, seed=5), (6, 2, 4))
PROMPTS = (GROUP.prompt_tokens,)
OTHER = (tiny.tokens(30, seed=6),)
THIRD = (tiny.tokens(30, seed=7),)


def states(rule, **changes):
  """An empty store."""
  return PromptStates(
      RefreshConfig(rule=rule, witness_tokens=16, **changes),
      chunk_tokens=8,
      memory_kind="device",
      tape=None,
      scoring=SCORING,
  )


def get(store, step, *, prompts=PROMPTS, policy=None):
  """Asks for a state, and tells the responses to it."""
  served = store.get(
      policy or tiny.policy(tiny.config()),
      prompts,
      step=step,
      clock=PhaseClock(),
  )
  store.responded(prompts, tiny.branches(GROUP, multiple=8))
  return served


def ages(store, steps, **asked):
  return [get(store, step, **asked).staleness.steps for step in steps]


def moved(scale):
  """A policy whose trained weights are scaled."""
  policy = tiny.policy(tiny.config())
  return policy.replace(
      trainable=jax.tree.map(lambda x: x * scale, policy.trainable)
  )


def estimate_and_truth(scale):
  """Drift of a state of the first policy, under the moved one."""
  old, new = tiny.policy(tiny.config()), moved(scale)
  branches = tiny.branches(GROUP, multiple=8)
  witness = capture_witness(old, PROMPTS, tokens=16, chunk_tokens=8)
  stale, fresh = (
      log_probs_behind(
          new, tiny.captured(p, PROMPTS[0]), branches, config=SCORING
      )
      for p in (old, new)
  )
  return (
      estimate_drift(new, witness, branches, config=SCORING),
      drift_nats(branches, stale=stale, fresh=fresh),
  )


def test_by_default_nothing_is_kept(x64):
  store = states("every_step")
  served = get(store, 0)
  assert len(store) == 0
  held = weakref.ref(served.prompt.slots.k)
  del served
  assert held() is None
  assert ages(store, [0, 0, 1, 5]) == [0, 0, 0, 0]


def test_every_third_step_captures_again(x64):
  store = states("every_n", every_n=3)
  assert ages(store, range(8)) == [0, 1, 2, 0, 1, 2, 0, 1]
  assert int(get(store, 8).prompt.policy_step) == 6


def test_steps_count_and_not_the_times_that_a_state_was_served(x64):
  store = states("every_n", every_n=3)
  assert ages(store, [4, 4, 6, 6, 9, 20]) == [0, 0, 2, 2, 0, 0]


def test_a_served_state_is_the_captured_one(x64):
  store = states("every_n", every_n=3)
  first = get(store, 0).prompt
  before = tiny.copied(first.slots)
  again = get(store, 2, policy=moved(1.1)).prompt
  assert again is first
  jax.tree.map(np.testing.assert_array_equal, before, tiny.copied(again.slots))


def test_other_prompts_have_states_of_their_own(x64):
  store = states("every_n", every_n=9, keep_prompts=2)
  assert ages(store, [0, 1]) == [0, 1]
  assert ages(store, [2, 3], prompts=OTHER) == [0, 1]
  assert ages(store, [4]) == [4]
  both = tuple(np.split(np.concatenate([PROMPTS[0], OTHER[0]]), [30]))
  assert ages(store, [5, 6], prompts=both) == [0, 1]
  moved_border = tuple(np.split(np.concatenate(both), [29]))
  assert ages(store, [7], prompts=moved_border) == [0]


def test_no_more_than_the_bound_are_kept_and_the_oldest_goes(x64):
  store = states("every_n", every_n=99, keep_prompts=2)
  held = []
  for prompts in (PROMPTS, OTHER, THIRD):
    held.append(weakref.ref(get(store, 0, prompts=prompts).prompt.slots.k))
    assert len(store) == len(held[:2])
  assert [ref() is None for ref in held] == [True, False, False]
  assert ages(store, [1], prompts=OTHER) == [1]
  assert ages(store, [1], prompts=PROMPTS) == [0]
  store.clear()
  assert len(store) == 0 and all(ref() is None for ref in held)


@pytest.mark.parametrize("rule", ["every_n", "adaptive"])
def test_the_old_state_is_gone_before_the_new_one_is_made(
    x64, rule, monkeypatch
):
  refs, alive = [], []
  real = prompt_states.capture

  def watched(*args, **kwargs):
    alive.append(sum(ref() is not None for ref in refs))
    made = real(*args, **kwargs)
    refs.append(weakref.ref(made.slots.k))
    return made

  monkeypatch.setattr(prompt_states, "capture", watched)
  store = states(rule, every_n=1, keep_prompts=2)  # with room for both
  ages(store, range(3))
  assert alive == [0, 0, 0]


@pytest.mark.parametrize("factor,kept", [(1.01, True), (0.99, False)])
def test_adaptive_captures_again_if_the_estimate_exceeds_the_limit(
    x64, factor, kept
):
  estimate, truth = estimate_and_truth(1.05)
  store = states("adaptive", limit_nats=factor * estimate)
  fresh = get(store, 0)
  assert np.isnan(fresh.staleness.drift_nats)
  served = get(store, 1, policy=moved(1.05)).staleness
  assert served.drift_nats == estimate > 0.001
  assert served.steps == (1 if kept else 0)
  np.testing.assert_equal(served.measured_nats, math.nan if kept else truth)


def test_within_a_step_nothing_is_estimated(x64):
  store = states("adaptive", limit_nats=1e-9)
  first, again = get(store, 3), get(store, 3)
  assert again.prompt is first.prompt
  assert np.isnan(again.staleness.drift_nats)


def test_weights_that_stay_keep_the_state_until_the_bound(x64):
  store = states("adaptive", limit_nats=1e-9, every_n=3)
  found = [get(store, step).staleness for step in range(5)]
  assert [x.steps for x in found] == [0, 1, 2, 0, 1]
  assert [x.drift_nats for x in found[1:3]] == [0.0, 0.0]
  assert found[3].measured_nats == 0.0


def test_the_true_drift_at_a_capture_corrects_later_estimates(x64):
  estimate, truth = estimate_and_truth(1.05)
  assert truth != estimate
  store = states("adaptive", limit_nats=estimate / 2)
  get(store, 0)
  get(store, 1, policy=moved(1.05))  # captured again, by the first policy's
  store.clear()
  get(store, 2)
  assert get(store, 3, policy=moved(1.05)).staleness.drift_nats == estimate
  # Not cleared: the state of now is of the moved policy; the first one drifts.
  back = get(store, 4).staleness.drift_nats
  store.clear()
  get(store, 5, policy=moved(1.05))
  plain = get(store, 6).staleness.drift_nats
  np.testing.assert_allclose(back, plain * truth / estimate, rtol=1e-12)


def test_a_state_whose_responses_are_unknown_is_captured_again(x64):
  """There is nothing to make an estimate with."""
  store = states("adaptive", limit_nats=1e9)
  ask = lambda step: store.get(
      tiny.policy(tiny.config()), PROMPTS, step=step, clock=PhaseClock()
  )
  assert [ask(step).staleness.steps for step in (0, 1)] == [0, 0]


def test_the_seconds_of_estimates_are_told_apart(x64):
  clock, store = PhaseClock(), states("adaptive", limit_nats=1e9)
  for step in (0, 1):
    store.get(tiny.policy(tiny.config()), PROMPTS, step=step, clock=clock)
    store.responded(PROMPTS, tiny.branches(GROUP, multiple=8))
    assert set(clock.seconds) == {"capture", "drift"} if step else {"capture"}


@pytest.mark.parametrize(
    "change,message",
    [
        (
            dict(rule="sometimes"),
            "rule='sometimes': want one of every_step, ev",
        ),
        (dict(every_n=0), "every_n=0: want at least 1"),
        (dict(witness_tokens=0), "witness_tokens=0: want at least 1"),
        (dict(keep_prompts=0), "keep_prompts=0: want at least 1"),
        (dict(limit_nats=0.0), "limit_nats=0.0: want a finite number above 0"),
        (dict(limit_nats=math.nan), "limit_nats=nan: want a finite number"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
  with pytest.raises(ValueError, match=f"refresh.{message}"):
    RefreshConfig(**change)

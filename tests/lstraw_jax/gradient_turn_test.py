"""A turn of a report sees what the first update of training would."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from lstraw_jax.capture import TapeConfig
from lstraw_jax.gradient_turn import report_turn
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import Request, train_step
from lstraw_jax.update_config import UpdateConfig
from tests import tiny

pytestmark = pytest.mark.first_class

TOLERANCE = 1e-10  # float64, relative
SEED = 7
UPDATE = UpdateConfig(
    prompt_gradient="exact",
    tape=TapeConfig(boundary_every=2),
    replay=ReplayConfig(
        # The gradient of k1 is not zero at the reference, as that of k3 is.
        objective=ObjectiveConfig(kl_coef=0.5, kl_estimator="k1"),
        block_tokens=8,
        head_chunk_tokens=8,
    ),
    capture_chunk_tokens=8,
    response_multiple=8,
)
GROUP = tiny.group(tiny.tokens(30), (5, 8, 3), masked=0.2)


def request(group, keys):
  """Returns a request that adds the keys it is given to a list."""

  def respond(policy, prompt, given):
    del policy, prompt
    keys.append(np.array(jax.random.key_data(given)))
    return [group]

  return Request((group.prompt_tokens,), respond)


def turn(group, keys, *, index=0):
  clock = PhaseClock()
  _, rows = report_turn(
      tiny.policy(tiny.config()),
      request(group, keys),
      seed=SEED,
      indices=np.array([index]),
      room_tokens=30,
      config=UPDATE,
      clock=clock,
  )
  assert list(clock.seconds) == ["capture", "respond", "score", "compare"]
  return rows[-1]


def test_keys_and_gradient_are_those_of_the_first_update(x64):
  keys = []
  row = turn(GROUP, keys)
  state = make_train_state(
      tiny.fresh(tiny.policy(tiny.config())),
      optax.sgd(0.0),
      seed=SEED,
      with_reference=True,
  )
  _, metrics = train_step(
      state,
      [request(GROUP, keys)],
      optimizer=optax.sgd(0.0),
      config=UPDATE,
      clock=PhaseClock(),
  )
  np.testing.assert_array_equal(keys[0], keys[1])
  assert row.family == "all"
  assert abs(row.exact_norm - metrics.grad_norm) < TOLERANCE * row.exact_norm


def test_equal_rewards_are_refused_and_each_prompt_has_its_key():
  policy = tiny.policy(tiny.config(dtype="float32"))
  rollouts = [dataclasses.replace(r, reward=0.5) for r in GROUP.rollouts]
  equal = dataclasses.replace(GROUP, rollouts=tuple(rollouts))
  keys = []
  for index in (0, 1):
    with pytest.raises(ValueError, match=r"groups \['a'\] of \[30\] prompt"):
      report_turn(
          policy,
          request(equal, keys),
          seed=SEED,
          indices=np.array([index]),
          room_tokens=30,
          config=UPDATE,
          clock=PhaseClock(),
      )
  assert (keys[0] != keys[1]).any()

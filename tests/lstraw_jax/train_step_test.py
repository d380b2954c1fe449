"""One update: what goes into the gradient, and what is told of it."""

import dataclasses
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lstraw_jax import prompt_states
from lstraw_jax.advantages import group_relative_advantages
from lstraw_jax.capture import capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.prompt_states import make_prompt_states
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import (
    Rollout,
    RolloutGroup,
    bucket,
    to_branch_batch,
)
from lstraw_jax.scoring import score
from lstraw_jax.state_cotangent import zero_cotangent
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import Request, train_step
from lstraw_jax.update_config import UpdateConfig
from modeling.sharding import make_mesh
from tests import tiny

FLOAT64_TOLERANCE = 1e-12
CONFIG = tiny.config()
UPDATE = UpdateConfig(
    prompt_gradient="dropped",
    replay=ReplayConfig(block_tokens=8, head_chunk_tokens=8),
    capture_chunk_tokens=8,
    response_multiple=8,
)
# Scores the reference, and takes the ratio against the rollouts' log-probs.
FULL = dataclasses.replace(
    UPDATE,
    old_log_probs="rollouts",
    replay=dataclasses.replace(
        UPDATE.replay,
        objective=ObjectiveConfig(kl_coef=0.5, clip_eps_high=1.0),
    ),
)
SGD = optax.sgd(1.0)  # its update is the gradient
FIXED = optax.sgd(0.0)
CALLS = []


def record(*call):
  """Progress of every step here: one callable, as it is compiled in."""
  CALLS.append(call)


def train_state(optimizer=SGD, *, policy=None):
  """The state before the first update."""
  policy = tiny.policy(CONFIG) if policy is None else policy
  return make_train_state(
      tiny.fresh(policy), optimizer, seed=0, with_reference=True
  )


def group_a():
  """Three responses to 11 tokens."""
  return tiny.group(tiny.tokens(11, seed=5), (6, 2, 4), seed=1)


def group_b():
  """Three responses to 14 tokens; one of them carries no loss."""
  group = tiny.group(tiny.tokens(14, seed=6), (7, 8, 1), seed=2)
  empty = dataclasses.replace(group.rollouts[1], loss_mask=np.zeros((8,), bool))
  rollouts = (group.rollouts[0], empty, group.rollouts[2])
  return dataclasses.replace(group, rollouts=rollouts)


def request(*groups: RolloutGroup) -> Request:
  """Responses that are there already, of the prompts of one turn."""
  prompts = tuple(group.prompt_tokens for group in groups)
  return Request(prompts, lambda policy, prompt, keys: groups)


def step(
    state, groups, *, optimizer=SGD, config=UPDATE, clock=None, states=None
):
  """Takes one step on groups."""
  return train_step(
      state,
      [g if isinstance(g, Request) else request(g) for g in groups],
      optimizer=optimizer,
      config=config,
      clock=clock or PhaseClock(),
      progress=record,
      states=states,
  )


def reusing(rule, **changes):
  """Settings that keep states."""
  refresh = RefreshConfig(rule=rule, witness_tokens=8, **changes)
  return dataclasses.replace(UPDATE, refresh=refresh)


def updates(config, count, *, clear_after=None):
  """Takes updates on one group, and returns the weights and the metrics."""
  state, states, found = train_state(), make_prompt_states(config), []
  for index in range(count):
    state, metrics = step(state, [group_a()], config=config, states=states)
    found.append(metrics)
    if index + 1 == clear_after:
      states.clear()
  return tiny.copied(state.policy.trainable), found


def gradient(groups):
  """The mean gradient of a step, as SGD applies it, and the metrics."""
  before = tiny.copied(tiny.policy(CONFIG).trainable)
  after, metrics = step(train_state(), groups)
  after = jax.device_get(after.policy.trainable)
  return jax.tree.map(np.subtract, before, after), metrics


@functools.cache
def gradient_of(name):
  """The gradient of one group alone."""
  return gradient([{"a": group_a, "b": group_b}[name]()])


def scored(policy, prompt, group):
  """Scores of a group behind a prompt's state, at temperature 1."""
  return score(
      policy,
      prompt,
      tiny.branches(group, multiple=8),
      temperature=1.0,
      block_tokens=8,
      head_chunk_tokens=8,
  )


@pytest.mark.first_class
def test_a_learning_rate_of_zero_leaves_every_log_prob_bitwise(x64):
  seen, group = [], group_a()

  def respond(policy, prompt, keys):
    del keys
    seen.append(tiny.copied(scored(policy, prompt, group)))
    return [group]

  state = train_state(FIXED)
  results = []
  for count in (1, 2, 3):
    state, metrics = step(
        state, [Request((group.prompt_tokens,), respond)], optimizer=FIXED
    )
    results.append(metrics)
    assert int(state.step) == count
  for later in seen[1:]:
    jax.tree.map(np.testing.assert_array_equal, later, seen[0])
  np.testing.assert_equal(results[2], results[0])
  jax.tree.map(
      np.testing.assert_array_equal,
      tiny.copied(state.policy.trainable),
      tiny.copied(tiny.policy(CONFIG).trainable),
  )


def test_prompts_add_up_and_are_divided_once(x64):
  """Not a mean of means: the groups have 3 and 2 responses that count."""
  a, metrics_a = gradient_of("a")
  b, metrics_b = gradient_of("b")
  both, metrics = gradient([group_a(), group_b()])
  assert (metrics_a.denominator, metrics_b.denominator) == (3, 2)
  assert metrics.denominator == 5
  wanted = jax.tree.map(lambda a, b: (3 * a + 2 * b) / 5, a, b)
  assert tiny.largest_difference(both, wanted) < FLOAT64_TOLERANCE
  loss = (3 * metrics_a.loss + 2 * metrics_b.loss) / 5
  np.testing.assert_allclose(metrics.loss, loss, rtol=FLOAT64_TOLERANCE)


@pytest.mark.first_class
def test_prompts_of_one_turn_are_those_of_turns_of_their_own(x64):
  """Of other lengths, other numbers of responses, and some without a loss."""
  fewer = dataclasses.replace(group_a(), rollouts=group_a().rollouts[:2])
  one, metrics = gradient([request(fewer, group_b())])
  other, wanted = gradient([fewer, group_b()])
  assert tiny.largest_difference(one, other) < FLOAT64_TOLERANCE
  assert metrics.denominator == wanted.denominator == 4
  for ours, theirs in zip(metrics, wanted, strict=True):
    if not isinstance(ours, dict):
      np.testing.assert_allclose(ours, theirs, rtol=1e-11)
  for name, ours in metrics.tokens.items():
    np.testing.assert_allclose(ours, wanted.tokens[name], rtol=1e-11)


@pytest.mark.first_class
@pytest.mark.parametrize("which", ["dropped", "exact"])
def test_an_update_of_sparse_attention_is_that_of_its_stages(x64, which):
  """And trains all that a loss reaches: no indexer, and no router's bias."""
  policy, group = tiny.policy(tiny.config("tiny-glm")), group_a()
  config = dataclasses.replace(UPDATE, prompt_gradient=which)
  state = train_state(policy=policy)
  after, metrics = step(state, [group], config=config)
  prompt, tape = capture_with_tape(
      policy,
      [group.prompt_tokens],
      tape=config.tape,
      chunk_tokens=config.capture_chunk_tokens,
  )
  exact = which == "exact"
  replayed = replay(
      policy,
      prompt,
      centred_branches(group),
      zero_gradients(policy),
      zero_cotangent(policy, prompt) if exact else None,
      config=config.replay,
      progress=record,
  )
  wanted = replayed.gradients
  if exact:
    wanted, _ = add_prompt_gradient(
        policy, prompt, tape, wanted, replayed.cotangent, policy_step=0
    )
  got = jax.tree.map(np.subtract, policy.trainable, after.policy.trainable)
  wanted = jax.tree.map(lambda g: g / 3, wanted)
  assert tiny.largest_difference(got, wanted) < FLOAT64_TOLERANCE
  assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(got))
  assert metrics.tokens["ratio_mean"] == 1.0 and metrics.denominator == 3
  frozen = named_leaves(after.policy.frozen)
  kinds = {name.rpartition("self_attn.")[2].split(".")[0] for name in frozen}
  assert "indexer" in kinds and len(kinds) == 2  # and biases
  jax.tree.map(
      np.testing.assert_array_equal, after.policy.frozen, policy.frozen
  )


def test_the_order_of_prompts_does_not_matter(x64):
  one, metrics = gradient([group_a(), group_b()])
  other, metrics_other = gradient([group_b(), group_a()])
  assert tiny.largest_difference(one, other) < FLOAT64_TOLERANCE
  np.testing.assert_allclose(
      metrics.grad_norm, metrics_other.grad_norm, rtol=FLOAT64_TOLERANCE
  )


def test_metrics_count_exactly(x64):
  grads, metrics = gradient_of("b")
  group = group_b()
  assert metrics.prompt_tokens == 14
  assert metrics.response_tokens == 7 + 8 + 1
  rewards = [rollout.reward for rollout in group.rollouts]
  np.testing.assert_allclose(metrics.reward_mean, np.mean(rewards))
  # The ratio is 1, so that each response that counts adds -advantage.
  advantages = group_relative_advantages(rewards, normalize_std=True)
  loss = -(advantages[0] + advantages[2]) / 2
  np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)  # float32 inputs
  squares = sum((g**2).sum() for g in jax.tree.leaves(grads))
  np.testing.assert_allclose(metrics.grad_norm, np.sqrt(squares), rtol=1e-9)
  policy = tiny.policy(CONFIG)
  scores = scored(policy, tiny.captured(policy, group.prompt_tokens), group)
  np.testing.assert_allclose(
      metrics.tokens["entropy_nats"], scores.entropy.sum() / 8, rtol=1e-9
  )
  assert metrics.tokens["ratio_mean"] == metrics.tokens["ratio_max"] == 1.0
  assert metrics.tokens["clip_share"] == metrics.tokens["kl_nats"] == 0.0
  assert np.isnan(metrics.sampler_gap_nats)  # it stored no log-probs


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_the_sampler_gap_is_how_far_its_log_probs_are(x64, shift):
  """Of tokens that carry loss alone; shifted elsewhere it does not show."""
  group = tiny.group(tiny.tokens(11, seed=5), (6, 2, 4), masked=0.4)

  def respond(policy, prompt, keys):
    del keys
    whole = dataclasses.replace(
        group, rollouts=tuple(map(keep_all, group.rollouts))
    )
    rows = scored(policy, prompt, whole).log_probs[0]
    rollouts = [
        dataclasses.replace(
            rollout,
            log_probs=np.where(
                rollout.loss_mask, row[: rollout.tokens.size] - shift, -99.0
            ),
        )
        for rollout, row in zip(group.rollouts, np.asarray(rows), strict=True)
    ]
    return [dataclasses.replace(group, rollouts=tuple(rollouts))]

  _, metrics = step(train_state(), [Request((group.prompt_tokens,), respond)])
  np.testing.assert_allclose(metrics.sampler_gap_nats, shift, atol=1e-12)


def keep_all(rollout: Rollout) -> Rollout:
  """The same response with a loss on every token."""
  mask = np.ones(rollout.tokens.shape, bool)
  return dataclasses.replace(rollout, loss_mask=mask)


def test_the_reference_and_the_stored_log_probs_reach_the_loss(x64):
  """The second step's KL is that between its policy and the first one's."""
  group, scores = group_a(), []

  def respond(policy, prompt, keys):
    del keys
    rows = np.asarray(scored(policy, prompt, group).log_probs)[0]
    scores.append(rows)
    rollouts = [
        dataclasses.replace(r, log_probs=row[: r.tokens.size] + 0.1)
        for r, row in zip(group.rollouts, rows, strict=True)
    ]
    return [dataclasses.replace(group, rollouts=tuple(rollouts))]

  state, clock = train_state(), PhaseClock()
  reference = tiny.copied(state.reference)
  for _ in range(2):
    state, metrics = step(
        state,
        [Request((group.prompt_tokens,), respond)],
        config=FULL,
        clock=clock,
    )
    # Old log-probs are kept in float32.
    np.testing.assert_allclose(
        metrics.tokens["ratio_mean"], np.exp(-0.1), rtol=1e-6
    )
    np.testing.assert_allclose(metrics.sampler_gap_nats, 0.1, rtol=1e-9)
    apart = (scores[0] - scores[-1])[scores[0] < 0]
    kl = (np.exp(apart) - apart - 1).mean()
    np.testing.assert_allclose(
        metrics.tokens["kl_nats"], kl, rtol=1e-9, atol=1e-20
    )
    assert (kl > 1e-3) == (len(scores) == 2)
  advantages = group_relative_advantages(
      [rollout.reward for rollout in group.rollouts], normalize_std=True
  )
  k3 = np.exp(scores[0] - scores[1]) - (scores[0] - scores[1]) - 1
  lengths = np.array([rollout.tokens.size for rollout in group.rollouts])
  loss = (-np.exp(-0.1) * advantages + 0.5 * k3.sum(1) / lengths).mean()
  np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
  jax.tree.map(
      np.testing.assert_array_equal, tiny.copied(state.reference), reference
  )
  phases = {"capture", "respond", "score", "replay", "optimizer"}
  assert set(clock.seconds) == phases and min(clock.seconds.values()) > 0


def test_a_gradient_that_is_not_finite_raises(x64):
  policy = tiny.policy(CONFIG)
  broken = jax.tree.map(lambda x: x * jnp.nan, policy.trainable)
  state = train_state(policy=policy.replace(trainable=broken))
  with pytest.raises(FloatingPointError, match="step 0: the gradient norm is"):
    step(state, [group_a()])


def test_a_step_consumes_the_weights_and_no_others(x64):
  state = train_state()
  after, _ = step(state, [group_a()])
  consumed = jax.tree.leaves(state.policy.trainable)
  assert all(leaf.is_deleted() for leaf in consumed)
  kept = jax.tree.leaves((after.policy, after.reference, after.key))
  assert not any(leaf.is_deleted() for leaf in kept)


def test_progress_tells_every_chunk_and_every_branch_in_order(x64):
  CALLS.clear()
  step(train_state(), [group_a(), group_b()])
  jax.effects_barrier()
  one = [("capture", n, 2) for n in (1, 2)]
  one += [("replay", n, 3) for n in (1, 2, 3)]
  assert one * 2 == CALLS


def test_each_prompt_of_each_step_has_a_key_of_its_own(x64):
  """However the prompts of a step are dealt out to turns."""
  found, group = [], group_a()

  def respond(policy, prompt, keys):
    del policy, prompt
    found.extend(map(tuple, jax.random.key_data(keys).tolist()))
    return [group] * len(keys)

  turn = lambda count: Request((group.prompt_tokens,) * count, respond)
  for counts in ((1, 1, 1), (2, 1), (1, 1, 1)):
    state = train_state(FIXED)
    for _ in range(2):
      requests = [turn(count) for count in counts]
      state, _ = step(state, requests, optimizer=FIXED)
  assert len(set(found[:6])) == 6
  assert found[:6] == found[6:12] == found[12:]


def test_the_state_says_which_policy_captured_it(x64):
  steps, group = [], group_a()

  def respond(policy, prompt, keys):
    del policy, keys
    steps.append(int(prompt.policy_step))
    return [group]

  state = train_state(FIXED)
  for _ in range(2):
    state, _ = step(
        state, [Request((group.prompt_tokens,), respond)], optimizer=FIXED
    )
  assert steps == [0, 1]


def test_a_prompt_state_is_freed_before_the_next_is_made(x64, monkeypatch):
  states, alive = [], []
  capture = prompt_states.capture

  def watched(*args, **kwargs):
    alive.append(sum(state() is not None for state in states))
    prompt = capture(*args, **kwargs)
    states.append(weakref.ref(prompt.slots.k))
    return prompt

  monkeypatch.setattr(prompt_states, "capture", watched)
  step(train_state(), [group_a()] * 3)
  assert alive == [0, 0, 0]


def test_a_state_serves_the_steps_that_the_rule_grants(x64):
  _, found = updates(reusing("every_n", every_n=3), 5)
  assert [x.staleness_steps for x in found] == [0, 1, 2, 0, 1]
  assert all(np.isnan(x.drift_nats) for x in found)
  _, found = updates(UPDATE, 2)
  assert [x.staleness_steps for x in found] == [0, 0]


def test_an_update_learns_behind_the_stale_state(x64):
  """Its gradient is that of replay with the state of the first policy."""
  config, group = reusing("every_n", every_n=3), group_a()
  states, state = make_prompt_states(config), train_state()
  state, _ = step(state, [group], config=config, states=states)
  moved = state.policy.replace(trainable=tiny.copied(state.policy.trainable))
  stale = tiny.captured(tiny.policy(CONFIG), group.prompt_tokens)
  wanted = replay(
      moved,
      stale,
      centred_branches(group),
      zero_gradients(moved),
      None,
      config=config.replay,
      progress=record,
  ).gradients
  before = moved.trainable
  state, _ = step(state, [group], config=config, states=states)
  got = jax.tree.map(np.subtract, before, tiny.copied(state.policy.trainable))
  wanted = jax.tree.map(lambda g: g / 3, wanted)
  assert tiny.largest_difference(got, wanted) < 1e-9
  fresh, _ = updates(UPDATE, 2)
  stale, _ = updates(config, 2)
  assert tiny.largest_difference(stale, fresh) > 1e-6


def centred_branches(group):
  """The branches of an update on a group."""
  rewards = [rollout.reward for rollout in group.rollouts]
  return to_branch_batch(
      [group],
      advantages=[group_relative_advantages(rewards, normalize_std=True)],
      multiple=8,
      old_log_probs_from_rollouts=False,
      mesh=make_mesh(),
  )


def test_an_update_tells_the_drift_that_it_estimates_and_measures(x64):
  """A limit that nothing exceeds, and one that everything does."""
  _, found = updates(reusing("adaptive", limit_nats=1e9), 3)
  assert [x.staleness_steps for x in found] == [0, 1, 2]
  assert np.isnan(found[0].drift_nats) and found[1].drift_nats > 1e-4
  assert all(np.isnan(x.measured_drift_nats) for x in found)
  _, found = updates(reusing("adaptive", limit_nats=1e-9), 3)
  assert [x.staleness_steps for x in found] == [0, 0, 0]
  assert found[1].drift_nats > 1e-4 and found[1].measured_drift_nats > 1e-4


def test_prompts_of_one_turn_share_a_state_and_the_oldest_is_told(x64):
  config = reusing("adaptive", limit_nats=1e9, keep_prompts=2)
  states, state = make_prompt_states(config), train_state()
  both = [request(group_a(), group_b())]
  take = lambda state, requests: step(
      state, requests, config=config, states=states
  )
  state, first = take(state, both)
  state, second = take(state, [group_b(), *both])
  state, third = take(state, [group_b(), *both])
  told = [x.staleness_steps for x in (first, second, third)]
  assert told == [0, 1, 2]
  assert second.drift_nats > 0 and np.isfinite(third.drift_nats)


def test_states_forgotten_at_a_checkpoint_give_the_bits_of_a_resumed_run(x64):
  """A resumed run begins with none, and so must the unbroken one there."""
  config = reusing("adaptive", limit_nats=1e9, every_n=3)
  unbroken, told = updates(config, 4, clear_after=2)
  state, states = train_state(), make_prompt_states(config)
  again = []
  for index in range(4):
    if index == 2:
      states = make_prompt_states(config)
    state, metrics = step(state, [group_a()], config=config, states=states)
    again.append(metrics)
  resumed = tiny.copied(state.policy.trainable)
  jax.tree.map(np.testing.assert_array_equal, unbroken, resumed)
  assert [x.staleness_steps for x in told] == [0, 1, 0, 1]
  np.testing.assert_equal(again, told)
  kept, _ = updates(config, 4)
  assert tiny.largest_difference(kept, unbroken) > 1e-6


def test_reuse_without_the_states_of_the_run_is_refused(x64):
  with pytest.raises(ValueError, match="states=None: want those of the run"):
    step(train_state(), [group_a()], config=reusing("every_n"))


@pytest.mark.parametrize("rule", ["every_n", "adaptive"])
def test_the_exact_gradient_behind_a_stale_state_is_refused(rule):
  with pytest.raises(ValueError, match=f"refresh.rule='{rule}': want 'every_s"):
    dataclasses.replace(reusing(rule), prompt_gradient="exact")


def test_a_run_of_mixed_lengths_compiles_once_a_bucket(x64):
  """Buckets of 16 and 24 slots, of 8 and 16 response tokens."""
  run = [
      (10, (1, 2, 3)),
      (20, (8, 8, 8)),
      (13, (7, 1, 5)),
      (12, (9, 2, 2)),
      (16, (3, 16, 1)),
      (22, (4, 4, 6)),
  ]
  step(train_state(), [group_a()])
  before = replay._cache_size()
  programs = set()
  for seed, (prompt_tokens, lengths) in enumerate(run):
    prompt = tiny.tokens(prompt_tokens, seed=seed)
    step(train_state(), [request(tiny.group(prompt, lengths))])
    slots = bucket(prompt_tokens - 1, multiple=UPDATE.capture_chunk_tokens)
    response = bucket(max(lengths), multiple=UPDATE.response_multiple)
    programs.add((slots, response))
  assert len(programs) == 3
  assert replay._cache_size() - before <= len(programs)


@pytest.mark.parametrize(
    "name,value,wanted",
    [
        ("capture_chunk_tokens", 0, "at least 1"),
        ("response_multiple", 0, "at least 1"),
        ("old_log_probs", "sampler", "'policy' or 'rollouts'"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, wanted):
  with pytest.raises(ValueError, match=f"{name}={value!r}: want {wanted}"):
    dataclasses.replace(UPDATE, **{name: value})

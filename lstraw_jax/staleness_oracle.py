"""The paper's oracle of staleness, and the estimate beside it, step by step.

1. A policy captures prompts and samples a group for each, once.
2. Updates follow on those same groups, behind that same state, with the ratio
   against the log-probs of the sampler. (The paper does not say whether its
   groups stay the same.)
3. After some of them the prompts are captured anew, and the responses are
   scored behind both states.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lstraw_jax.advantages import advantages_of
from lstraw_jax.capture import Progress, capture
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.prompt_states import make_prompt_states
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.rollouts import BranchBatch, RolloutGroup, to_branch_batch
from lstraw_jax.scoring import log_probs_behind
from lstraw_jax.staleness import (
    Witness,
    capture_witness,
    drift_nats,
    estimate_drift,
    loss_change_percent,
)
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import Request, train_step
from lstraw_jax.update_config import UpdateConfig

T = TypeVar("T")


class MeasuredStaleness(NamedTuple):
  """What a reused state changes, beside a state captured anew."""

  loss_percent: float  # change of the loss; see `loss_change_percent`
  drift_nats: float  # mean |change of log-prob|
  estimate_nats: float  # of drift_nats, from the witness
  estimate_s: float
  capture_s: float  # of the prompts, which the estimate saves


def measure_steps(
    policy: Policy,
    request: Request,
    *,
    steps: Collection[int],
    optimizer: optax.GradientTransformation,
    seed: int,
    config: UpdateConfig,
    clock: PhaseClock,
    progress: Progress | None = None,
) -> Iterator[tuple[int, MeasuredStaleness]]:
  """Takes updates behind one state, and measures it after some of them.

  Args:
    policy: the first weights; nothing of them is consumed.
    request: the prompts, and whence the responses.
    steps: after which to measure. 0 comes first, always: there all numbers are
      zero, and the seconds those of compilation.
    optimizer: of the updates.
    seed: of the samples.
    config: of the updates, without a KL penalty; of `refresh` the witness
      alone is read, and the old log-probs are the sampler's.
    clock: adds up the seconds of each phase of the updates.
    progress: as in `train_step`.

  Raises:
    ValueError: if no response is better than another of its group.
  """
  kept = RefreshConfig(rule="every_n", every_n=max(steps) + 1)
  update = dataclasses.replace(config, refresh=kept, old_log_probs="rollouts")
  copy = policy.replace(trainable=jax.tree.map(jnp.copy, policy.trainable))
  state = make_train_state(copy, optimizer, seed=seed, with_reference=False)
  states, prompts = make_prompt_states(update), request.prompts
  stale = states.get(
      copy, prompts, step=0, clock=clock, progress=progress
  ).prompt
  witness = capture_witness(
      copy,
      prompts,
      tokens=config.refresh.witness_tokens,
      chunk_tokens=config.capture_chunk_tokens,
  )
  keys = jax.random.split(jax.random.key(seed), len(prompts))
  groups = request.respond(copy, stale, keys)
  branches = _branches(groups, update, policy)
  for step in range(max(steps) + 1):
    if step:
      state, metrics = train_step(
          state,
          [Request(prompts, lambda *_: groups)],
          optimizer=optimizer,
          config=update,
          clock=clock,
          progress=progress,
          states=states,
      )
      assert metrics.staleness_steps == step - 1, "one state serves all steps"
    if step in (0, *steps):
      yield (
          step,
          measure_staleness(
              state.policy,
              stale,
              witness,
              branches,
              prompts,
              config=update,
              progress=progress,
          ),
      )


def measure_staleness(
    policy: Policy,
    stale: PromptState,
    witness: Witness,
    branches: BranchBatch,
    prompts: Sequence[np.ndarray],
    *,
    config: UpdateConfig,
    progress: Progress | None = None,
) -> MeasuredStaleness:
  """Captures prompts anew and compares; that state is gone afterwards.

  Args:
    policy: the weights of now.
    stale: the reused state.
    witness: made with it.
    branches: responses, with the log-probs of their sampler.
    prompts: token ids [P] of each row.
    config: of the updates.
    progress: called after each chunk of the capture.
  """
  estimate, estimate_s = _timed(
      lambda: estimate_drift(policy, witness, branches, config=config.replay)
  )
  fresh, capture_s = _timed(
      lambda: capture(
          policy,
          prompts,
          chunk_tokens=config.capture_chunk_tokens,
          memory_kind=config.memory_kind,
          progress=progress,
      )
  )
  behind_stale, behind_fresh = (
      log_probs_behind(policy, state, branches, config=config.replay)
      for state in (stale, fresh)
  )
  return MeasuredStaleness(
      loss_percent=loss_change_percent(
          branches,
          stale=behind_stale,
          fresh=behind_fresh,
          objective=config.replay.objective,
      ),
      drift_nats=drift_nats(branches, stale=behind_stale, fresh=behind_fresh),
      estimate_nats=estimate,
      estimate_s=estimate_s,
      capture_s=capture_s,
  )


def _branches(groups: Sequence[RolloutGroup], config, policy) -> BranchBatch:
  advantages = advantages_of(groups, normalize_std=config.normalize_std)
  if not any(row.any() for row in advantages):
    rewards = [[r.reward for r in group.rollouts] for group in groups]
    raise ValueError(
        f"rewards={rewards}: want some that differ; with equal ones no update"
        " moves the policy. Choose another seed or larger groups"
    )
  return to_branch_batch(
      groups,
      advantages=advantages,
      multiple=config.response_multiple,
      old_log_probs_from_rollouts=True,
      mesh=policy.mesh,
  )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
  start = time.perf_counter()
  result = jax.block_until_ready(work())
  return result, time.perf_counter() - start

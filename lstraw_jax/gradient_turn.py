"""A turn of an update, taken to compare its gradients: no weight is changed.

    state     = capture(policy, prompts)       once, with a tape
    responses = respond(policy, state)         those that an update would get
    rows      = gradient_report(policy, state, responses)

The policy is one before its first update, so that it is its own reference of a
KL penalty.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lstraw_jax.advantages import advantages_of
from lstraw_jax.capture import Progress, capture_with_tape
from lstraw_jax.gradient_report import FamilyReport, gradient_report
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.policy import Policy
from lstraw_jax.rollouts import RolloutGroup, bucket, to_branch_batch
from lstraw_jax.scoring import log_probs_behind
from lstraw_jax.train_step import Request
from lstraw_jax.update_config import UpdateConfig


def report_turn(
    policy: Policy,
    request: Request,
    *,
    seed: int,
    indices: np.ndarray,
    room_tokens: int,
    config: UpdateConfig,
    clock: PhaseClock,
    progress: Progress | None = None,
) -> tuple[Sequence[RolloutGroup], tuple[FamilyReport, ...]]:
  """Compares the gradients of the groups that an update would see first.

  Args:
    policy: weights that have seen no update.
    request: the prompts, and whence the responses.
    seed: of the run, as `make_train_state` takes it.
    indices: of the prompts among those of the update.
    room_tokens: of the longest prompt of all turns: states of one capacity
      share their programs, whose compilation takes longer than most prompts.
    config: of the update; what becomes of its prompt gradient is not read.
    clock: adds up the seconds of each phase.
    progress: see `gradient_report`.

  Raises:
    ValueError: if no response is better than another of its group.
  """
  with clock.phase("capture"):
    prompt, tape = capture_with_tape(
        policy,
        request.prompts,
        tape=config.tape,
        chunk_tokens=config.capture_chunk_tokens,
        capacity=bucket(
            max(room_tokens - 1, 1), multiple=config.capture_chunk_tokens
        ),
        memory_kind=config.memory_kind,
        progress=progress,
    )
    jax.block_until_ready(prompt)
  with clock.phase("respond"):
    groups = request.respond(policy, prompt, _keys(policy, seed, indices))
  branches = to_branch_batch(
      groups,
      advantages=advantages_of(groups, normalize_std=config.normalize_std),
      multiple=config.response_multiple,
      old_log_probs_from_rollouts=config.old_log_probs == "rollouts",
      mesh=policy.mesh,
  )
  if not np.asarray(branches.advantages).any():
    raise ValueError(
        f"groups {[group.group_id for group in groups]} of"
        f" {[group.prompt_tokens.size for group in groups]} prompt tokens: the"
        " responses of each have the same reward, so that all advantages are 0"
        " and there is no gradient to compare. Take another seed, or more"
        " responses (train.group_size)"
    )
  if config.replay.objective.kl_coef > 0:
    with clock.phase("score"):
      log_probs = log_probs_behind(
          policy, prompt, branches, config=config.replay
      )
      branches = dataclasses.replace(branches, ref_log_probs=log_probs)
  with clock.phase("compare"):
    rows = gradient_report(
        policy, prompt, tape, branches, config=config.replay, progress=progress
    )
  return groups, rows


def _keys(policy: Policy, seed: int, indices: np.ndarray) -> jax.Array:
  """Returns the key of each prompt, as the first update makes it."""

  def make():
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)

  where = NamedSharding(policy.mesh, PartitionSpec())
  return jax.jit(make, out_shardings=where)()

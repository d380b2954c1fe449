"""One update of GRPO, top to bottom.

    for each prompt of the step:
      state     = capture(policy, prompt)            once, without a graph,
                                                     or that of an earlier step
      responses = respond(policy, state)             sampled, or from a file
      ref       = score(reference, ...)              if there is a KL penalty
      gradients += replay(policy, state, responses)  one branch at a time
      gradients += prompt gradient                   if it is to be exact
    policy = optimizer(gradients / denominator)      exactly one step

Nothing of a prompt outlives its turn: memory is the weights, one prompt state
and one branch, whatever the number of responses and prompts. A KL penalty adds
the reference's own state of the prompt while it scores. Only on request are
states kept for the steps to come (`refresh.py`); the policy then learns behind
states of its past.

On a mesh with a `data` axis as many prompts take their turn at once, each on
its own replica. Sums and denominators are over all of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lstraw_jax.advantages import advantages_of
from lstraw_jax.capture import Progress, capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.prompt_states import PromptStates, make_prompt_states
from lstraw_jax.replay import replay
from lstraw_jax.rollouts import BranchBatch, RolloutGroup, to_branch_batch
from lstraw_jax.scoring import log_probs_behind
from lstraw_jax.state_cotangent import zero_cotangent
from lstraw_jax.train_state import TrainState, advance
from lstraw_jax.update_config import UpdateConfig
from lstraw_jax.update_metrics import Totals, Turn, UpdateMetrics

# (policy, prompts, a key for each) -> a group for each
Respond = Callable[[Policy, PromptState, jax.Array], Sequence[RolloutGroup]]


class Request(NamedTuple):
  """The prompts of one turn, one for each replica, and whence the responses."""

  prompts: tuple[np.ndarray, ...]  # each [P] int32
  respond: Respond


def train_step(
    state: TrainState,
    requests: Sequence[Request],
    *,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    clock: PhaseClock,
    progress: Progress | None = None,
    states: PromptStates | None = None,
) -> tuple[TrainState, UpdateMetrics]:
  """Takes one optimizer step on the groups of some prompts.

  Args:
    state: the training state; its trained weights are consumed.
    requests: the prompts of this step.
    optimizer: the one that `state` was made with.
    config: settings.
    clock: adds up the seconds of each phase.
    progress: called after each chunk of a capture and each branch of a replay.
    states: those of the run, made by `make_prompt_states`; needed where
      `config.refresh` keeps any.

  Raises:
    ValueError: without `states` where they are needed.
    FloatingPointError: if the gradient is not finite; `state` is then lost.
  """
  if states is None:
    if config.refresh.rule != "every_step":
      raise ValueError(
          f"states=None: want those of the run, with refresh.rule="
          f"{config.refresh.rule!r}. Pass make_prompt_states(config) each step"
      )
    states = make_prompt_states(config)
  key = jax.random.fold_in(state.key, state.step)
  gradients = zero_gradients(state.policy)
  totals = Totals()

  taken = 0
  for request in requests:
    indices = jnp.arange(taken, taken + len(request.prompts))
    taken += len(request.prompts)
    turn, gradients = _take_turn(
        state,
        request,
        states,
        jax.vmap(jax.random.fold_in, (None, 0))(key, indices),
        gradients,
        config=config,
        clock=clock,
        progress=progress,
    )
    totals.add(turn, config)

  with clock.phase("optimizer"):
    state, grad_norm = advance(
        state,
        gradients,
        totals.denominator,
        optimizer=optimizer,
        loss=totals.loss / totals.denominator,
    )
  return state, totals.metrics(grad_norm)


def _take_turn(
    state: TrainState,
    request: Request,
    states: PromptStates,
    keys: jax.Array,
    gradients: nnx.State,
    *,
    config: UpdateConfig,
    clock: PhaseClock,
    progress: Progress | None,
) -> tuple[Turn, nnx.State]:
  """Adds the groups' gradient; a state that is not kept is gone after this."""
  prompt, tape, staleness = states.get(
      state.policy,
      request.prompts,
      step=int(state.step),
      clock=clock,
      progress=progress,
  )
  with clock.phase("respond"):
    groups = request.respond(state.policy, prompt, keys)
  branches = to_branch_batch(
      groups,
      advantages=advantages_of(groups, normalize_std=config.normalize_std),
      multiple=config.response_multiple,
      old_log_probs_from_rollouts=config.old_log_probs == "rollouts",
      mesh=state.policy.mesh,
  )
  states.responded(request.prompts, branches)
  if config.replay.objective.kl_coef > 0:
    with clock.phase("score"):
      branches = _score_reference(state, request.prompts, branches, config)
  cotangent = None
  with clock.phase("replay"):
    if tape is not None:
      cotangent = zero_cotangent(
          state.policy, prompt, dtype=config.cotangent_dtype
      )
    replayed = replay(
        state.policy,
        prompt,
        branches,
        gradients,
        cotangent,
        config=config.replay,
        progress=progress,
    )
    jax.block_until_ready(replayed)
  gradients = replayed.gradients
  if tape is not None:
    with clock.phase("prompt"):
      gradients, _ = add_prompt_gradient(
          state.policy,
          prompt,
          tape,
          gradients,
          replayed.cotangent,
          policy_step=int(state.step),
          progress=progress,
      )
      jax.block_until_ready(gradients)
  return Turn(groups, branches, replayed, staleness), gradients


def _score_reference(state, prompts, branches: BranchBatch, config):
  """Scores the branches by the reference, behind its own prompt states."""
  assert state.reference is not None, "made with the KL penalty in the config"
  reference = state.policy.replace(trainable=state.reference)
  prompt = capture(
      reference,
      prompts,
      chunk_tokens=config.capture_chunk_tokens,
      memory_kind=config.memory_kind,
  )
  log_probs = log_probs_behind(
      reference, prompt, branches, config=config.replay
  )
  return dataclasses.replace(
      branches, ref_log_probs=jax.block_until_ready(log_probs)
  )

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
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lstraw_jax.advantages import group_relative_advantages
from lstraw_jax.capture import Progress, TapeConfig, capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.metrics import PhaseClock, TokenStats
from lstraw_jax.objectives import denominator
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.prompt_state import MemoryKind, PromptState
from lstraw_jax.prompt_states import PromptStates, Staleness
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig, Replayed, replay
from lstraw_jax.rollouts import (
    BranchBatch,
    Rollout,
    RolloutGroup,
    to_branch_batch,
)
from lstraw_jax.scoring import score
from lstraw_jax.state_cotangent import (
    CotangentDtype,
    check_dtype,
    zero_cotangent,
)
from lstraw_jax.train_state import TrainState, advance

PromptGradient = Literal["dropped", "exact"]

# (policy, prompts, a key for each) -> a group for each
Respond = Callable[[Policy, PromptState, jax.Array], Sequence[RolloutGroup]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
  """Settings of an update.

  `prompt_gradient` says what becomes of the gradient through the prompt state:
  "dropped" leaves it out, as the paper does; "exact" is the gradient of the
  whole sequences. It has no default.

  `old_log_probs` says whose log-probs the ratio is taken against: "policy",
  those of the policy itself at this step (the ratio is then 1), or "rollouts",
  those stored with the responses.
  """

  prompt_gradient: PromptGradient
  replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
  tape: TapeConfig = dataclasses.field(default_factory=TapeConfig)
  cotangent_dtype: CotangentDtype = "float32"  # of its sums over slots
  capture_chunk_tokens: int = 2048
  response_multiple: int = 128
  normalize_std: bool = True
  old_log_probs: Literal["policy", "rollouts"] = "policy"
  memory_kind: MemoryKind = "device"  # of the prompts' keys and values
  refresh: RefreshConfig = dataclasses.field(default_factory=RefreshConfig)

  def __post_init__(self):
    if self.prompt_gradient not in get_args(PromptGradient):
      raise ValueError(
          f"prompt_gradient={self.prompt_gradient!r}: want 'dropped' or 'exact'"
      )
    if self.prompt_gradient == "exact" and self.refresh.rule != "every_step":
      raise ValueError(
          f"refresh.rule={self.refresh.rule!r}: want 'every_step' with"
          " prompt_gradient='exact', since the gradient through a state of past"
          " weights is that of no loss. Or set prompt_gradient='dropped'"
      )
    check_dtype(self.cotangent_dtype)
    for name in ("capture_chunk_tokens", "response_multiple"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")
    if self.old_log_probs not in ("policy", "rollouts"):
      raise ValueError(
          f"old_log_probs={self.old_log_probs!r}: want 'policy' or 'rollouts'"
      )


def make_prompt_states(config: UpdateConfig) -> PromptStates:
  """Returns what captures the prompts of a run, and keeps its states."""
  return PromptStates(
      config.refresh,
      chunk_tokens=config.capture_chunk_tokens,
      memory_kind=config.memory_kind,
      tape=config.tape if config.prompt_gradient == "exact" else None,
      scoring=config.replay,
  )


class Request(NamedTuple):
  """The prompts of one turn, one for each replica, and whence the responses."""

  prompts: tuple[np.ndarray, ...]  # each [P] int32
  respond: Respond


class UpdateMetrics(NamedTuple):
  """What one update did, on the host."""

  loss: float
  reward_mean: float
  grad_norm: float
  prompt_tokens: int
  response_tokens: int
  denominator: int
  sampler_gap_nats: float  # mean |replayed - sampler's|; nan if unknown
  staleness_steps: int  # optimizer steps since a state's capture, at most
  drift_nats: float  # of kept states, estimated, at most; nan if none was
  measured_drift_nats: float  # of states that were replaced, at most; or nan
  tokens: dict[str, float]  # ratio_mean, ratio_max, clip_share, kl, entropy


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
  totals = _Totals()

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


class _Turn(NamedTuple):
  """What is told of a turn."""

  groups: Sequence[RolloutGroup]
  branches: BranchBatch
  replayed: Replayed
  staleness: Staleness


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
) -> tuple[_Turn, nnx.State]:
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
      advantages=[_advantages(group, config) for group in groups],
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
  return _Turn(groups, branches, replayed, staleness), gradients


def _advantages(group: RolloutGroup, config: UpdateConfig) -> np.ndarray:
  rewards = np.array([rollout.reward for rollout in group.rollouts])
  return group_relative_advantages(rewards, normalize_std=config.normalize_std)


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
  scores = score(
      reference,
      prompt,
      branches,
      temperature=config.replay.temperature,
      block_tokens=config.replay.block_tokens,
      head_chunk_tokens=config.replay.head_chunk_tokens,
  )
  return dataclasses.replace(
      branches, ref_log_probs=jax.block_until_ready(scores.log_probs)
  )


class _Totals:
  """Sums over the turns of a step, on the host."""

  def __init__(self):
    self.stats: list[TokenStats] = []
    self.denominator = 0
    self.loss = 0.0
    self.rewards: list[float] = []
    self.gaps: list[np.ndarray] = []
    self.staleness: list[Staleness] = []
    self.prompt_tokens = 0
    self.response_tokens = 0

  def add(self, turn: _Turn, config: UpdateConfig):
    groups, branches, replayed, staleness = turn
    self.staleness.append(staleness)
    self.stats.append(replayed.stats)
    self.loss += float(replayed.loss)
    aggregation = config.replay.objective.aggregation
    self.denominator += int(
        denominator(branches.loss_mask, aggregation=aggregation)
    )
    log_probs_BGR = np.asarray(replayed.log_probs)
    for group, log_probs_GR in zip(groups, log_probs_BGR, strict=True):
      self.prompt_tokens += group.prompt_tokens.size
      for rollout, log_probs in zip(group.rollouts, log_probs_GR, strict=False):
        self._add_rollout(rollout, log_probs)

  def _add_rollout(self, rollout: Rollout, log_probs: np.ndarray):
    self.rewards.append(rollout.reward)
    self.response_tokens += rollout.tokens.size
    if rollout.log_probs is not None:
      gap = np.abs(log_probs[: rollout.tokens.size] - rollout.log_probs)
      self.gaps.append(gap[rollout.loss_mask])

  def metrics(self, grad_norm: float) -> UpdateMetrics:
    stats = jax.tree.map(lambda *x: jnp.stack(x), *self.stats)
    gaps = np.concatenate(self.gaps) if self.gaps else np.array([np.nan])
    return UpdateMetrics(
        loss=self.loss / self.denominator,
        reward_mean=float(np.mean(self.rewards)),
        grad_norm=grad_norm,
        prompt_tokens=self.prompt_tokens,
        response_tokens=self.response_tokens,
        denominator=self.denominator,
        sampler_gap_nats=float(gaps.mean()),
        **self._staleness(),
        tokens=stats.combine().means(),
    )

  def _staleness(self) -> dict[str, Any]:
    steps, drifts, measured = zip(*self.staleness, strict=True)
    most = lambda values: float(np.fmax.reduce(values))  # nan if all are
    return dict(
        staleness_steps=max(steps),
        drift_nats=most(drifts),
        measured_drift_nats=most(measured),
    )

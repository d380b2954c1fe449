"""What an update tells of itself: sums over its turns, and means in the end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lstraw_jax.metrics import TokenStats
from lstraw_jax.objectives import denominator
from lstraw_jax.prompt_states import Staleness
from lstraw_jax.replay import Replayed
from lstraw_jax.rollouts import BranchBatch, Rollout, RolloutGroup
from lstraw_jax.update_config import UpdateConfig


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


class Turn(NamedTuple):
  """What is told of a turn."""

  groups: Sequence[RolloutGroup]
  branches: BranchBatch
  replayed: Replayed
  staleness: Staleness


class Totals:
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

  def add(self, turn: Turn, config: UpdateConfig):
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

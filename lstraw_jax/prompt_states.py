"""The prompt states of a run: captured, and kept as long as the rule says.

A turn asks for the state of its prompts. It gets the one that is kept, or the
old one is let go and the prompts are captured again (`refresh.py`).
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lstraw_jax.capture import (
    Progress,
    PromptTape,
    TapeConfig,
    capture,
    capture_with_tape,
)
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import MemoryKind, PromptState
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.scoring import log_probs_behind
from lstraw_jax.staleness import (
    Witness,
    capture_witness,
    drift_nats,
    estimate_drift,
)
from lstraw_jax.update_config import UpdateConfig


class Staleness(NamedTuple):
  """How old the state of a turn is."""

  steps: int  # optimizer steps since its capture
  drift_nats: float  # estimate that decided on the state; nan if none was made
  measured_nats: float  # true drift of the state it replaces; nan if unknown


class Served(NamedTuple):
  """The state of a turn's prompts."""

  prompt: PromptState
  tape: PromptTape | None  # of a fresh state, if the states are made with one
  staleness: Staleness


class PromptStates:
  """Captures the prompts of turns, and keeps states where the rule says so."""

  def __init__(
      self,
      config: RefreshConfig,
      *,
      chunk_tokens: int,
      memory_kind: MemoryKind,
      tape: TapeConfig | None,
      scoring: ReplayConfig,
  ):
    """Begins with none.

    Args:
      config: the rule.
      chunk_tokens: of a capture.
      memory_kind: of the states' keys and values.
      tape: what a capture leaves for the exact gradient, if that is wanted.
      scoring: temperature and sizes of the scores that measure drift.
    """
    self._config = config
    self._how: dict[str, Any] = dict(
        chunk_tokens=chunk_tokens, memory_kind=memory_kind
    )
    self._tape = tape
    self._scoring = scoring
    self._kept: dict[_Key, _Kept] = {}  # the oldest first
    self._ratio = 1.0  # of true to estimated drift, when last both were known

  def __len__(self) -> int:
    return len(self._kept)

  def clear(self) -> None:
    """Forgets all: a run that goes on from a checkpoint knows nothing either.

    So whoever saves one calls this, and both runs capture at the same steps.
    """
    self._kept.clear()
    self._ratio = 1.0

  def get(
      self,
      policy: Policy,
      prompts: Sequence[np.ndarray],
      *,
      step: int,
      clock: PhaseClock,
      progress: Progress | None = None,
  ) -> Served:
    """Returns the kept state of the prompts, or captures them.

    The old state is gone before the new one is made.

    Args:
      policy: the weights.
      prompts: token ids [P] of each row.
      step: optimizer steps that the weights have seen.
      clock: gets the seconds of "capture" and "drift".
      progress: called after each chunk of a capture.
    """
    key = _key(prompts)
    estimate = self._estimate(policy, key, step, clock)
    if self._serves(key, step, estimate):
      kept = self._kept[key]
      age = step - kept.step
      return Served(kept.prompt, None, Staleness(age, estimate, math.nan))
    replaced = self._take_out(policy, key, estimate, clock)
    while self._kept and len(self._kept) >= self._config.keep_prompts:
      del self._kept[next(iter(self._kept))]
    with clock.phase("capture"):
      prompt, tape = self._capture(policy, prompts, key, step, progress)
    measured = self._measure(policy, prompt, replaced, estimate, clock)
    return Served(prompt, tape, Staleness(0, estimate, measured))

  def responded(
      self, prompts: Sequence[np.ndarray], branches: BranchBatch
  ) -> None:
    """Tells the responses of a turn, which the next estimate is made with."""
    kept = self._kept.get(_key(prompts))
    if kept is not None:
      kept.branches = branches

  def _serves(self, key, step, estimate) -> bool:
    """Says whether the state that is kept is good for this step."""
    kept = self._kept.get(key)
    if kept is None or step - kept.step >= self._config.every_n:
      return False
    drifts = self._config.rule == "adaptive" and step > kept.step
    return not drifts or estimate <= self._config.limit_nats

  def _estimate(self, policy, key, step, clock) -> float:
    """Returns the estimated drift of the state that is kept, or nan."""
    kept = self._kept.get(key)
    if kept is None or kept.witness is None or kept.branches is None:
      return math.nan
    if step == kept.step:
      return math.nan  # nothing has moved
    with clock.phase("drift"):
      return self._ratio * estimate_drift(
          policy, kept.witness, kept.branches, config=self._scoring
      )

  def _take_out(self, policy, key, estimate, clock) -> "_Replaced | None":
    """Lets go of a state; returns what tells its true drift later."""
    kept = self._kept.pop(key, None)
    if kept is None or kept.branches is None or math.isnan(estimate):
      return None
    with clock.phase("drift"):
      log_probs = self._log_probs(policy, kept.prompt, kept.branches)
      return _Replaced(kept.branches, jax.block_until_ready(log_probs))

  def _capture(self, policy, prompts, key, step, progress):
    """Captures the prompts, and keeps the state unless it is for one turn."""
    how = dict(policy_step=step, **self._how)
    if self._tape is not None:
      prompt, tape = capture_with_tape(
          policy, prompts, tape=self._tape, progress=progress, **how
      )
    else:
      prompt, tape = capture(policy, prompts, progress=progress, **how), None
    witness = None
    if self._config.rule == "adaptive":
      witness = capture_witness(
          policy,
          prompts,
          tokens=self._config.witness_tokens,
          chunk_tokens=self._how["chunk_tokens"],
      )
    if self._config.rule != "every_step":
      self._kept[key] = _Kept(prompt, witness, step)
    jax.block_until_ready((prompt, witness and witness.state))
    return prompt, tape

  def _measure(self, policy, prompt, replaced, estimate, clock) -> float:
    """Returns the true drift of a replaced state, and learns from it."""
    if replaced is None:
      return math.nan
    with clock.phase("drift"):
      measured = drift_nats(
          replaced.branches,
          stale=replaced.log_probs,
          fresh=self._log_probs(policy, prompt, replaced.branches),
      )
    if estimate > 0 and measured > 0:
      self._ratio *= measured / estimate
    return measured

  def _log_probs(self, policy, prompt, branches) -> jax.Array:
    return log_probs_behind(policy, prompt, branches, config=self._scoring)


def make_prompt_states(config: UpdateConfig) -> PromptStates:
  """Returns what captures the prompts of a run, and keeps its states."""
  return PromptStates(
      config.refresh,
      chunk_tokens=config.capture_chunk_tokens,
      memory_kind=config.memory_kind,
      tape=config.tape if config.prompt_gradient == "exact" else None,
      scoring=config.replay,
  )


_Key = tuple[bytes, ...]


@dataclasses.dataclass(eq=False)
class _Kept:
  prompt: PromptState
  witness: Witness | None
  step: int  # optimizer steps of the weights that captured
  branches: BranchBatch | None = None  # responses of the last turn


class _Replaced(NamedTuple):
  branches: BranchBatch
  log_probs: jax.Array  # behind the state that is gone


def _key(prompts: Sequence[np.ndarray]) -> _Key:
  as_bytes = lambda prompt: np.asarray(prompt, np.int32).tobytes()
  return tuple(hashlib.sha256(as_bytes(p)).digest() for p in prompts)

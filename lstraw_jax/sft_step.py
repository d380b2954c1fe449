"""One update of supervised training, exact at any length.

    for each sequence of the step:
      state, tape = capture(policy, sequence)      once, without a graph
      gradients  += reverse sweep over its chunks  of - sum_t mask_t log_prob_t
    policy = optimizer(gradients / tokens that carry loss)    exactly one step

The update of GRPO with no branches: what reaches the weights comes from a loss
on the sequence's own tokens. Memory is the weights, the state of one sequence
and its cotangent, and the graph of one chunk.

On a mesh with a `data` axis as many sequences take their turn at once, each on
its own replica. The loss is the mean over the tokens of all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from lstraw_jax.capture import Progress, TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.prompt_gradient import PromptLoss, add_prompt_gradient
from lstraw_jax.prompt_state import MemoryKind
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.sequences import TokenSequence
from lstraw_jax.state_cotangent import (
    CotangentDtype,
    check_dtype,
    zero_cotangent,
)
from lstraw_jax.train_state import TrainState, advance
from lstraw_jax.update_config import UpdateConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
  """Settings of an update."""

  tape: TapeConfig = dataclasses.field(default_factory=TapeConfig)
  cotangent_dtype: CotangentDtype = "float32"  # of its sums over slots
  capture_chunk_tokens: int = 2048
  head_chunk_tokens: int = 256
  memory_kind: MemoryKind = "device"  # of the sequences' keys and values

  def __post_init__(self):
    check_dtype(self.cotangent_dtype)
    for name in ("capture_chunk_tokens", "head_chunk_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")

  def as_update(self) -> UpdateConfig:
    """Returns the update of GRPO that, without branches, is this one."""
    return UpdateConfig(
        prompt_gradient="exact",
        tape=self.tape,
        cotangent_dtype=self.cotangent_dtype,
        replay=ReplayConfig(head_chunk_tokens=self.head_chunk_tokens),
        capture_chunk_tokens=self.capture_chunk_tokens,
        memory_kind=self.memory_kind,
    )


class SftMetrics(NamedTuple):
  """What one update did, on the host."""

  loss: float  # mean over the tokens that carry it, nats
  grad_norm: float
  tokens: int
  loss_tokens: int


def sft_step(
    state: TrainState,
    turns: Sequence[Sequence[TokenSequence]],
    *,
    optimizer: optax.GradientTransformation,
    config: SftConfig,
    clock: PhaseClock,
    progress: Progress | None = None,
) -> tuple[TrainState, SftMetrics]:
  """Takes one optimizer step on some sequences.

  Args:
    state: the training state; its trained weights are consumed.
    turns: the sequences of this step; those of a turn, one for each replica,
      run side by side.
    optimizer: the one that `state` was made with.
    config: settings.
    clock: adds up the seconds of each phase.
    progress: called after each chunk, on the way there and back.

  Raises:
    FloatingPointError: if the gradient is not finite; `state` is then lost.
  """
  gradients = zero_gradients(state.policy)
  loss_sum = 0.0
  for turn in turns:
    gradients, loss = _take_turn(
        state, turn, gradients, config=config, clock=clock, progress=progress
    )
    loss_sum += loss
  sequences = [sequence for turn in turns for sequence in turn]
  loss_tokens = sum(int(x.loss_mask.sum()) for x in sequences)
  loss = loss_sum / loss_tokens
  with clock.phase("optimizer"):
    state, grad_norm = advance(
        state, gradients, loss_tokens, optimizer=optimizer, loss=loss
    )
  return state, SftMetrics(
      loss=loss,
      grad_norm=grad_norm,
      tokens=sum(sequence.tokens.size for sequence in sequences),
      loss_tokens=loss_tokens,
  )


def _take_turn(
    state: TrainState,
    turn: Sequence[TokenSequence],
    gradients: nnx.State,
    *,
    config: SftConfig,
    clock: PhaseClock,
    progress: Progress | None,
) -> tuple[nnx.State, float]:
  """Adds the gradient of some sequences; returns also their summed loss."""
  policy, policy_step = state.policy, int(state.step)
  with clock.phase("capture"):
    prompt, tape = capture_with_tape(
        policy,
        [sequence.tokens for sequence in turn],
        tape=config.tape,
        chunk_tokens=config.capture_chunk_tokens,
        policy_step=policy_step,
        memory_kind=config.memory_kind,
        progress=progress,
    )
    jax.block_until_ready(prompt)
  with clock.phase("prompt"):
    gradients, loss = add_prompt_gradient(
        policy,
        prompt,
        tape,
        gradients,
        zero_cotangent(policy, prompt, dtype=config.cotangent_dtype),
        policy_step=policy_step,
        loss=PromptLoss(
            [sequence.loss_mask.astype(np.float32) for sequence in turn],
            config.head_chunk_tokens,
        ),
        progress=progress,
    )
    jax.block_until_ready(gradients)
  return gradients, float(loss)

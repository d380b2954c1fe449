"""Replay: gradients of the responses of one group, one branch at a time.

For each branch:

1. Walk its blocks but the last without a graph; keep their keys and values and
   the recurrent state at every boundary.
2. Walk the blocks again, last to first. Rebuild the graph of one block from its
   boundary, add up its loss, and pull back three cotangents: that of the loss,
   those that later blocks left on the keys and values the block wrote, and that
   of the recurrent state it handed on. This gives the parameter gradient, and
   cotangents for the blocks before.

Only one block of one branch has a graph at any time, so memory depends neither
on the number of branches nor on the prompt beyond its state.
"""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.branch import (
    Block,
    advance,
    cut,
    run_block,
    start_branch,
    to_blocks,
)
from lstraw_jax.capture import Progress
from lstraw_jax.metrics import TokenStats, token_stats
from lstraw_jax.objectives import (
    ObjectiveConfig,
    grpo_token_losses,
    token_weights,
)
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import BranchState, PromptState
from lstraw_jax.rollouts import BranchBatch
from pallas_kernels.shapes import wide, wide_dtype

PromptGradient = Literal["dropped"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
  """Settings of replay.

  `prompt_gradient` says what becomes of the gradient through the prompt state:
  "dropped" leaves it out, as the paper does. It has no default.
  """

  prompt_gradient: PromptGradient
  objective: ObjectiveConfig = dataclasses.field(
      default_factory=ObjectiveConfig
  )
  temperature: float = 1.0
  block_tokens: int = 2048
  head_chunk_tokens: int = 256

  def __post_init__(self):
    if self.prompt_gradient != "dropped":
      raise ValueError(
          f"prompt_gradient={self.prompt_gradient!r}: want 'dropped', the only"
          " kind that is built"
      )
    if not self.temperature > 0:
      raise ValueError(
          f"temperature={self.temperature}: want a number above 0; the"
          " log-probs of greedy decoding have no gradient"
      )
    for name in ("block_tokens", "head_chunk_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")


class Replayed(NamedTuple):
  """Sums over the branches of a group, to be divided by the denominator."""

  gradients: nnx.State  # like policy.trainable, float32 or wider
  loss: jax.Array  # [] float32 or wider
  stats: TokenStats
  log_probs: jax.Array  # [G, R] of the targets that carry loss


def zero_gradients(policy: Policy) -> nnx.State:
  """Returns the accumulator that replay adds to."""
  return jax.tree.map(
      lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), policy.trainable
  )


@partial(
    jax.jit,
    static_argnames=("config", "progress"),
    donate_argnames="gradients",
)
def replay(
    policy: Policy,
    prompt: PromptState,
    branches: BranchBatch,
    gradients: nnx.State,
    *,
    config: ReplayConfig,
    progress: Progress | None = None,
) -> Replayed:
  """Adds the gradient of the group's unnormalised loss to `gradients`.

      loss = sum_{i,t} weight_{i,t} token_loss_{i,t}

  Without old log-probs the policy's own are taken, as constants: the ratio is
  then exactly 1.

  Args:
    policy: the weights.
    prompt: the captured prompt that the branches follow; never written.
    branches: the responses of one group.
    gradients: sums so far, consumed; see `zero_gradients`.
    config: settings.
    progress: called from the running program after each branch; a part of
      the compiled program, so pass the same callable each time.
  """
  prompt = jax.lax.stop_gradient(prompt)

  group_size = branches.inputs.shape[0]

  def step(carry, inputs):
    gradients, loss, stats = carry
    index, branch = inputs
    walked = _replay_branch(policy, prompt, branch, config)
    gradients = jax.tree.map(jnp.add, gradients, walked.gradients)
    stats = stats.merge(walked.stats)
    if progress is not None:
      report = partial(_report, progress, group_size)
      # Reading the loss makes the call wait for the branch.
      jax.debug.callback(report, index, walked.loss)
    return (gradients, loss + walked.loss, stats), walked.log_probs

  dtype = wide_dtype(policy.config.dtype)
  start = (gradients, jnp.zeros((), dtype), TokenStats.empty(dtype))
  with jax.named_scope("replay"):
    (gradients, loss, stats), log_probs = jax.lax.scan(
        step, start, (jnp.arange(group_size), branches)
    )
  return Replayed(gradients, loss, stats, log_probs)


class _Labels(NamedTuple):
  """What the loss of one block needs beside the block, leaves [1, C]."""

  weights: jax.Array
  old_log_probs: jax.Array | None
  ref_log_probs: jax.Array | None


def _replay_branch(policy, prompt, branch: BranchBatch, config) -> Replayed:
  blocks = to_blocks(branch, block_tokens=config.block_tokens)
  labels = jax.tree.map(
      partial(cut, block_tokens=config.block_tokens),
      _Labels(
          token_weights(
              branch.loss_mask,
              aggregation=config.objective.aggregation,
              dtype=wide_dtype(policy.config.dtype),
          ),
          branch.old_log_probs,
          branch.ref_log_probs,
      ),
  )
  run = partial(
      run_block,
      temperature=config.temperature,
      head_chunk_tokens=config.head_chunk_tokens,
  )
  state, boundaries = _walk(policy, prompt, blocks, run)
  size = blocks.inputs.shape[-1]

  def block_loss(trainable, slots, recurrent, block, labels, start):
    """Loss of one block, and what it hands on, from its boundary."""
    at_boundary = _rewind(state, slots, recurrent, prompt, start)
    scores, delta, _ = run(
        policy.replace(trainable=trainable).model, prompt, at_boundary, block
    )
    losses = _token_losses(scores, labels, branch, block, config)
    loss = (labels.weights * losses.loss).sum()
    stats = token_stats(losses, scores, block.loss_mask)
    return (loss, delta), (stats, scores.log_probs)

  def step(carry, inputs):
    gradients, d_slots, d_recurrent, stats, total = carry
    block, labels, recurrent, start = inputs
    (loss, delta), pull_back, (block_stats, log_probs) = jax.vjp(
        partial(block_loss, block=block, labels=labels, start=start),
        policy.trainable,
        state.slots,
        recurrent,
        has_aux=True,
    )
    d_delta = dataclasses.replace(
        delta,
        slots=jax.tree.map(
            lambda d, x: jax.lax.dynamic_slice_in_dim(
                d, start, size, axis=2
            ).astype(x.dtype),
            d_slots,
            delta.slots,
        ),
        recurrent=d_recurrent,
    )
    d_trainable, d_earlier, d_recurrent = pull_back(
        (jnp.ones_like(loss), d_delta)
    )
    add = lambda total, new: total + new.astype(total.dtype)
    carry = (
        jax.tree.map(add, gradients, d_trainable),
        jax.tree.map(add, d_slots, d_earlier),
        d_recurrent,
        stats.merge(block_stats),
        total + loss,
    )
    return carry, log_probs

  count = blocks.inputs.shape[0]
  dtype = wide_dtype(policy.config.dtype)
  start = (
      zero_gradients(policy),
      jax.tree.map(lambda x: jnp.zeros_like(wide(x)), state.slots),
      jax.tree.map(jnp.zeros_like, state.recurrent),
      TokenStats.empty(dtype),
      jnp.zeros((), dtype),
  )
  starts = size * jnp.arange(count, dtype=jnp.int32)
  (gradients, _, _, stats, loss), log_probs = jax.lax.scan(
      step, start, (blocks, labels, boundaries, starts), reverse=True
  )
  log_probs = log_probs.reshape(-1)[: branch.inputs.shape[0]]
  return Replayed(gradients, loss, stats, log_probs)


def _walk(policy, prompt, blocks: Block, run):
  """Runs all blocks but the last; returns the branch and every boundary."""
  model = jax.lax.stop_gradient(policy).model
  state = start_branch(prompt, blocks)
  if blocks.inputs.shape[0] == 1:
    return state, jax.tree.map(lambda x: x[None], state.recurrent)

  def step(state, block):
    _, delta, positions = run(model, prompt, state, block)
    return advance(state, delta, positions), state.recurrent

  state, boundaries = jax.lax.scan(
      step, state, jax.tree.map(lambda x: x[:-1], blocks)
  )
  boundaries = jax.tree.map(
      lambda before, last: jnp.concatenate([before, last[None]]),
      boundaries,
      state.recurrent,
  )
  return state, boundaries


def _rewind(state: BranchState, slots, recurrent, prompt, start):
  """Returns the branch as it was before slot `start`; later ones are hidden."""
  first = prompt.length[:, None] + start
  seen = state.positions < first
  return BranchState(
      slots=slots,
      recurrent=recurrent,
      positions=jnp.where(seen, state.positions, -1),
      used=start,
  )


def _report(progress, group_size, index, loss):
  del loss
  progress("replay", int(index) + 1, group_size)


def _token_losses(scores, labels, branch, block, config):
  log_probs = scores.log_probs
  old = labels.old_log_probs
  if old is None:
    old = jax.lax.stop_gradient(log_probs)
  return grpo_token_losses(
      log_probs,
      old,
      labels.ref_log_probs,
      advantages=branch.advantages[None],
      loss_mask=block.loss_mask,
      config=config.objective,
  )

"""Replay: gradients of the responses of each group, one branch at a time.

Branches are scanned, and the gradient of each is added to the same sums. Only
one block of one branch of each prompt has a graph at any time
(`branch_gradient.py`), so memory depends neither on the number of branches nor
on the prompt beyond its state.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.branch import block_size, cut, run_block, to_blocks, uncut
from lstraw_jax.branch_gradient import add_branch_gradient
from lstraw_jax.capture import Progress
from lstraw_jax.gradient_sums import lay_out
from lstraw_jax.metrics import TokenStats, token_stats
from lstraw_jax.objectives import (
    ObjectiveConfig,
    grpo_token_losses,
    token_weights,
)
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.state_cotangent import StateCotangent
from modeling.parameter import IndexerParam
from modeling.sharding import replicate
from pallas_kernels.shapes import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
  """Settings of replay."""

  objective: ObjectiveConfig = dataclasses.field(
      default_factory=ObjectiveConfig
  )
  temperature: float = 1.0
  block_tokens: int = 2048
  head_chunk_tokens: int = 256

  def __post_init__(self):
    if not self.temperature > 0:
      raise ValueError(
          f"temperature={self.temperature}: want a number above 0; the"
          " log-probs of greedy decoding have no gradient"
      )
    for name in ("block_tokens", "head_chunk_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")


class Replayed(NamedTuple):
  """Sums over all branches, to be divided by the denominator."""

  gradients: nnx.State  # like policy.trainable, float32 or wider
  cotangent: StateCotangent | None  # of the prompt, unless it is dropped
  loss: jax.Array  # [] float32 or wider
  stats: TokenStats
  log_probs: jax.Array  # [B, G, R] of the targets that carry loss


@partial(
    jax.jit,
    static_argnames=("config", "progress"),
    donate_argnames=("gradients", "cotangent"),
)
def replay(
    policy: Policy,
    prompt: PromptState,
    branches: BranchBatch,
    gradients: nnx.State,
    cotangent: StateCotangent | None,
    *,
    config: ReplayConfig,
    progress: Progress | None = None,
) -> Replayed:
  """Adds the gradient of the groups' unnormalised loss to `gradients`.

      loss = sum_{i,t} weight_{i,t} token_loss_{i,t}

  Without old log-probs the policy's own are taken, as constants: the ratio is
  then exactly 1.

  Args:
    policy: the weights.
    prompt: the captured prompts that the branches follow; never written.
    branches: the responses of one group for each of them.
    gradients: sums so far, consumed; see `zero_gradients`.
    cotangent: of the loss by the prompt state, sums so far, consumed; see
      `zero_cotangent`. None drops the gradient through the prompt, as the paper
      does; else `add_prompt_gradient` makes it exact.
    config: settings.
    progress: called from the running program after each branch; a part of
      the compiled program, so pass the same callable each time.

  Raises:
    ValueError: for a policy that trains indexers, which learn from a loss on
      sequences alone.
  """
  if policy.config.trained is IndexerParam:
    raise ValueError(
        "train_indexers=True: want False, since no loss of a response reaches"
        " an indexer. Train indexers on sequences, by `sft_step`"
    )
  prompt = jax.lax.stop_gradient(prompt)
  group_size = branches.inputs.shape[1]

  def step(sums, inputs):
    index, branch = inputs
    sums, loss, stats, log_probs = _add_branch(
        policy, prompt, branch, sums, config
    )
    if progress is not None:
      # Reading the loss makes the call wait for the branch.
      jax.debug.callback(partial(_report, progress, group_size), index, loss)
    return sums, (loss, stats, log_probs)

  by_branch = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), branches)
  with jax.named_scope("replay"):
    (gradients, cotangent), (losses, stats, log_probs) = jax.lax.scan(
        step, (gradients, cotangent), (jnp.arange(group_size), by_branch)
    )
  told = (losses.sum(), stats.combine(), jnp.moveaxis(log_probs, 0, 1))
  # Again: in the loop alone it would not settle the layout of the output.
  gradients = lay_out(gradients, policy)
  return Replayed(gradients, cotangent, *replicate(told, policy.mesh))


class _Labels(NamedTuple):
  """What the loss of a block needs beside its scores, leaves [B, C]."""

  weights: jax.Array
  old_log_probs: jax.Array | None
  ref_log_probs: jax.Array | None


def _add_branch(policy, prompt, branch: BranchBatch, sums, config):
  """Returns the sums, and loss, statistics and log-probs [B, R]."""
  steps = branch.inputs.shape[1]
  shards = policy.mesh.shape["context"]
  size = block_size(steps, block_tokens=config.block_tokens, shards=shards)
  weights = token_weights(
      branch.loss_mask,
      aggregation=config.objective.aggregation,
      dtype=wide_dtype(policy.config.dtype),
  )

  def block_loss(scores, block, labels):
    old = labels.old_log_probs
    if old is None:
      old = jax.lax.stop_gradient(scores.log_probs)
    losses = grpo_token_losses(
        scores.log_probs,
        old,
        labels.ref_log_probs,
        advantages=branch.advantages,
        loss_mask=block.loss_mask,
        config=config.objective,
    )
    stats = token_stats(losses, scores, block.loss_mask)
    return (labels.weights * losses.loss).sum(), (stats, scores.log_probs)

  found = add_branch_gradient(
      policy,
      prompt,
      to_blocks(branch, size=size),
      jax.tree.map(
          partial(cut, size=size),
          _Labels(weights, branch.old_log_probs, branch.ref_log_probs),
      ),
      *sums,
      run_block=partial(
          run_block,
          temperature=config.temperature,
          head_chunk_tokens=config.head_chunk_tokens,
      ),
      block_loss=block_loss,
  )
  stats, log_probs = found.kept
  log_probs = uncut(log_probs, response_tokens=steps)
  return (found.gradients, found.cotangent), found.loss, stats, log_probs


def _report(progress, group_size, index, loss):
  del loss
  progress("replay", int(index) + 1, group_size)

"""Scoring: log-probabilities of given responses, without a gradient graph."""

from functools import partial

import jax
import jax.numpy as jnp

from lstraw_jax.branch import (
    advance_branch,
    block_size,
    run_block,
    start_branch,
    to_blocks,
    uncut,
)
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.rollouts import BranchBatch
from modeling.sharding import replicate


@partial(
    jax.jit,
    static_argnames=("temperature", "block_tokens", "head_chunk_tokens"),
)
def score(
    policy: Policy,
    prompt: PromptState,
    branches: BranchBatch,
    *,
    temperature: float,
    block_tokens: int,
    head_chunk_tokens: int,
) -> TokenScores:
  """Returns log-probs and entropy [B,G,R] of every target that carries loss.

  Branches run one after the other by the forward that replay differentiates.

  Args:
    policy: the weights.
    prompt: the captured prompts that the branches follow; never written.
    branches: the responses of one group for each of them.
    temperature: that of the sampler, > 0.
    block_tokens: tokens of a branch evaluated at once.
    head_chunk_tokens: tokens projected to the vocabulary at once.
  """
  model = jax.lax.stop_gradient(policy).model

  steps = branches.inputs.shape[2]
  shards = policy.mesh.shape["context"]
  size = block_size(steps, block_tokens=block_tokens, shards=shards)

  run = partial(
      run_block, temperature=temperature, head_chunk_tokens=head_chunk_tokens
  )

  def one(branch):
    blocks = to_blocks(branch, size=size)

    def step(state, block):
      return advance_branch(model, prompt, state, block, run_block=run)

    _, scores = jax.lax.scan(step, start_branch(prompt, blocks), blocks)
    return jax.tree.map(partial(uncut, response_tokens=steps), scores)

  by_branch = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), branches)
  with jax.named_scope("score"):
    scores = jax.lax.map(one, by_branch)
  scores = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), scores)
  return replicate(scores, policy.mesh)


def log_probs_behind(
    policy: Policy,
    prompt: PromptState,
    branches: BranchBatch,
    *,
    config: ReplayConfig,
) -> jax.Array:
  """Returns the log-probs [B,G,R] of responses, scored as replay does."""
  return score(
      policy,
      prompt,
      branches,
      temperature=config.temperature,
      block_tokens=config.block_tokens,
      head_chunk_tokens=config.head_chunk_tokens,
  ).log_probs

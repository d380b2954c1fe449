"""Scoring: log-probabilities of given responses, without a gradient graph."""

from functools import partial

import jax
import jax.numpy as jnp

from lstraw_jax.branch import (
    block_size,
    run_block,
    start_branch,
    to_blocks,
    uncut,
)
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import (
    PromptState,
    append_to_branch,
    next_positions,
)
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
  size = block_size(steps, block_tokens=block_tokens, mesh=policy.mesh)

  def one(branch):
    blocks = to_blocks(branch, size=size)

    def step(state, block):
      positions = next_positions(prompt, state, valid_BT=block.valid)
      scores, delta = run_block(
          model,
          block,
          positions_BT=positions,
          prefixes=(prompt.prefix, state.prefix),
          recurrent=state.recurrent,
          temperature=temperature,
          head_chunk_tokens=head_chunk_tokens,
      )
      return append_to_branch(state, delta, positions_BT=positions), scores

    _, scores = jax.lax.scan(step, start_branch(prompt, blocks), blocks)
    return jax.tree.map(partial(uncut, response_tokens=steps), scores)

  by_branch = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), branches)
  with jax.named_scope("score"):
    scores = jax.lax.map(one, by_branch)
  scores = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), scores)
  return replicate(scores, policy.mesh)

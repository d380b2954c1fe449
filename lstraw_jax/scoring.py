"""Scoring: log-probabilities of given responses, without a gradient graph."""

from functools import partial

import jax

from lstraw_jax.branch import run_block, start_branch, to_blocks
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState, append_to_branch
from lstraw_jax.rollouts import BranchBatch


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
  """Returns log-probs and entropy [G,R] of every target that carries loss.

  Branches run one after the other by the forward that replay differentiates.

  Args:
    policy: the weights.
    prompt: the captured prompt that the branches follow; never written.
    branches: the responses of one group.
    temperature: that of the sampler, > 0.
    block_tokens: tokens of a branch evaluated at once.
    head_chunk_tokens: tokens projected to the vocabulary at once.
  """
  model = jax.lax.stop_gradient(policy).model

  def one(branch):
    blocks = to_blocks(branch, block_tokens=block_tokens)

    def step(state, block):
      scores, delta, positions = run_block(
          model,
          prompt,
          state,
          block,
          temperature=temperature,
          head_chunk_tokens=head_chunk_tokens,
      )
      return append_to_branch(state, delta, positions_BT=positions), scores

    _, scores = jax.lax.scan(step, start_branch(prompt, blocks), blocks)
    length = branch.inputs.shape[0]
    return jax.tree.map(lambda x: x.reshape(-1)[:length], scores)

  with jax.named_scope("score"):
    return jax.lax.map(one, branches)

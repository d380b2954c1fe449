"""The gradient of one branch of each prompt, by blocks, the last block first.

1. Walk the blocks but the last without a graph; keep their keys and values and
   the recurrent state at every boundary.
2. Walk all blocks backwards. Rebuild the graph of one block from its boundary
   and pull back three cotangents: that of its loss, those that later blocks
   left on the keys and values it wrote, and that of the recurrent state it
   handed on. This gives parameter gradients, and cotangents for the blocks
   before.

One block has a graph at any time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.branch import Block, RunBlock, advance_branch, start_branch
from lstraw_jax.gradient_sums import add
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import (
    BranchState,
    PromptState,
    next_positions,
)
from lstraw_jax.segment_gradient import pull_back_segment
from lstraw_jax.state_cotangent import StateCotangent
from lstraw_jax.stripes import read_frame
from pallas_kernels.shapes import wide

# (scores, block, labels) -> loss [], anything to keep of the block
BlockLoss = Callable[[TokenScores, Block, Any], tuple[jax.Array, Any]]


class BranchGradient(NamedTuple):
  """Sums, with those of one more branch of each prompt."""

  gradients: nnx.State
  cotangent: StateCotangent | None
  loss: jax.Array  # [] of this branch
  kept: Any  # of its blocks, stacked


def add_branch_gradient(
    policy: Policy,
    prompt: PromptState,
    blocks: Block,
    labels: Any,
    gradients: nnx.State,
    cotangent: StateCotangent | None,
    *,
    run_block: RunBlock,
    block_loss: BlockLoss,
) -> BranchGradient:
  """Adds the gradient of the branches' loss, the sum over their blocks.

  Args:
    policy: the weights.
    prompt: the state that the branches follow.
    blocks: a branch of each prompt, leaves [n, B, C].
    labels: what the loss needs beside the scores, leaves [n, ...].
    gradients: sums so far, like policy.trainable in float32 or wider.
    cotangent: sums so far for the prompt; None has it be a constant.
    run_block: the forward of a block.
    block_loss: the loss of a block.
  """
  branch, boundaries = _walk(policy, prompt, blocks, run_block)
  size = blocks.inputs.shape[-1]

  def step(carry, inputs):
    gradients, on_prompt, later = carry
    block, labels, recurrent, start = inputs
    before = _rewind(branch, prompt, start)
    positions = next_positions(prompt, before, valid_BT=block.valid)

    def segment(model, prefixes, recurrent):
      scores, delta = run_block(
          model,
          block,
          positions_BT=positions,
          prefixes=prefixes,
          recurrent=recurrent,
      )
      loss, kept = block_loss(scores, block, labels)
      return loss, delta, kept

    pulled = pull_back_segment(
        policy,
        segment,
        gradients,
        prefixes=(prompt.prefix, before.prefix),
        sums=(on_prompt, later.slots),
        recurrent=recurrent,
        d_slots=read_frame(
            later.slots,
            frame=start // size,
            frame_tokens=size,
            mesh=prompt.mesh,
        ),
        d_recurrent=later.recurrent,
    )
    on_prompt, slots = pulled.sums
    earlier = StateCotangent(slots=slots, recurrent=pulled.d_recurrent)
    return (pulled.gradients, on_prompt, earlier), (pulled.loss, pulled.kept)

  nothing = StateCotangent(
      slots=jax.tree.map(
          lambda x: jnp.zeros_like(wide(x)),
          branch.slots.learned(policy.config.trained),
      ),
      recurrent=jax.tree.map(jnp.zeros_like, branch.recurrent),
  )
  starts = size * jnp.arange(blocks.inputs.shape[0], dtype=jnp.int32)
  (gradients, on_prompt, first), (losses, kept) = jax.lax.scan(
      step,
      (gradients, cotangent and cotangent.slots, nothing),
      (blocks, labels, boundaries, starts),
      reverse=True,
  )
  if cotangent is not None:
    assert on_prompt is not None, "sums come back as they were given"
    cotangent = StateCotangent(
        slots=on_prompt,
        recurrent=add(cotangent.recurrent, first.recurrent),
    )
  return BranchGradient(gradients, cotangent, losses.sum(), kept)


def _walk(policy, prompt, blocks, run_block):
  """Runs all blocks but the last; returns the branch and every boundary."""
  model = jax.lax.stop_gradient(policy).model
  branch = start_branch(prompt, blocks)
  if blocks.inputs.shape[0] == 1:
    return branch, jax.tree.map(lambda x: x[None], branch.recurrent)

  def step(branch, block):
    grown, _ = advance_branch(model, prompt, branch, block, run_block=run_block)
    return grown, branch.recurrent

  branch, boundaries = jax.lax.scan(
      step, branch, jax.tree.map(lambda x: x[:-1], blocks)
  )
  boundaries = jax.tree.map(
      lambda before, last: jnp.concatenate([before, last[None]]),
      boundaries,
      branch.recurrent,
  )
  return branch, boundaries


def _rewind(branch, prompt, start) -> BranchState:
  """Returns the branch as it was before slot `start`; later ones are hidden."""
  seen = branch.positions < prompt.length[:, None] + start
  return dataclasses.replace(
      branch, positions=jnp.where(seen, branch.positions, -1), used=start
  )

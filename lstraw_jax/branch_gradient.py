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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.branch import Block, start_branch
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import BranchState, PromptState, append_to_branch
from lstraw_jax.stripes import read_frame
from modeling.layer_state import DeltaState, KvState
from modeling.qwen3_5 import Qwen3_5, SegmentDelta
from pallas_kernels.shapes import wide

# (model, prompt, branch, block) -> scores, what the block adds, its positions
RunBlock = Callable[
    [Qwen3_5, PromptState, BranchState, Block],
    tuple[TokenScores, SegmentDelta, jax.Array],
]
# (scores, block, labels) -> loss [], anything to keep of the block
BlockLoss = Callable[[TokenScores, Block, Any], tuple[jax.Array, Any]]


class _Cotangents(NamedTuple):
  """What the walk hands from a block to the one before it."""

  slots: KvState  # of all keys and values of the branch, float32 or wider
  recurrent: DeltaState  # of the state that enters the block just done


def add_branch_gradient(
    policy: Policy,
    prompt: PromptState,
    blocks: Block,
    labels: Any,
    gradients: nnx.State,
    *,
    run_block: RunBlock,
    block_loss: BlockLoss,
) -> tuple[nnx.State, jax.Array, Any]:
  """Adds the gradient of the branches' loss, the sum over their blocks.

  Args:
    policy: the weights.
    prompt: the state that the branches follow; a constant.
    blocks: a branch of each prompt, leaves [n, B, C].
    labels: what the loss needs beside the scores, leaves [n, ...].
    gradients: sums so far, like policy.trainable in float32 or wider.
    run_block: the forward of a block.
    block_loss: the loss of a block.

  Returns:
    The gradients, the loss, and what `block_loss` keeps, stacked by block.
  """
  branch, boundaries = _walk(policy, prompt, blocks, run_block)
  size = blocks.inputs.shape[-1]

  def loss_and_delta(trainable, slots, recurrent, block, labels, start):
    model = policy.replace(trainable=trainable).model
    boundary = _rewind(branch, slots, recurrent, prompt, start)
    scores, delta, _ = run_block(model, prompt, boundary, block)
    loss, kept = block_loss(scores, block, labels)
    return (loss, delta), (loss, kept)

  def step(carry, inputs):
    gradients, later = carry
    block, labels, recurrent, start = inputs
    (loss, delta), pull_back, kept = jax.vjp(
        partial(loss_and_delta, block=block, labels=labels, start=start),
        policy.trainable,
        branch.slots,
        recurrent,
        has_aux=True,
    )
    d_own = read_frame(
        later.slots, frame=start // size, frame_tokens=size, mesh=prompt.mesh
    )
    d_delta = SegmentDelta(
        slots=jax.tree.map(lambda d, x: d.astype(x.dtype), d_own, delta.slots),
        recurrent=later.recurrent,
    )
    d_trainable, d_slots, d_recurrent = pull_back(
        (jnp.ones_like(loss), d_delta)
    )
    earlier = _Cotangents(_add(later.slots, d_slots), d_recurrent)
    return (_add(gradients, d_trainable), earlier), kept

  nothing = _Cotangents(
      slots=jax.tree.map(lambda x: jnp.zeros_like(wide(x)), branch.slots),
      recurrent=jax.tree.map(jnp.zeros_like, branch.recurrent),
  )
  starts = size * jnp.arange(blocks.inputs.shape[0], dtype=jnp.int32)
  (gradients, _), (losses, kept) = jax.lax.scan(
      step,
      (gradients, nothing),
      (blocks, labels, boundaries, starts),
      reverse=True,
  )
  return gradients, losses.sum(), kept


def _walk(policy, prompt, blocks, run_block):
  """Runs all blocks but the last; returns the branch and every boundary."""
  model = jax.lax.stop_gradient(policy).model
  branch = start_branch(prompt, blocks)
  if blocks.inputs.shape[0] == 1:
    return branch, jax.tree.map(lambda x: x[None], branch.recurrent)

  def step(branch, block):
    _, delta, positions = run_block(model, prompt, branch, block)
    grown = append_to_branch(branch, delta, positions_BT=positions)
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


def _rewind(branch, slots, recurrent, prompt, start) -> BranchState:
  """Returns the branch as it was before slot `start`; later ones are hidden."""
  seen = branch.positions < prompt.length[:, None] + start
  return BranchState(
      slots=slots,
      recurrent=recurrent,
      positions=jnp.where(seen, branch.positions, -1),
      used=start,
      mesh=branch.mesh,
  )


def _add(totals, terms):
  return jax.tree.map(lambda x, y: x + y.astype(x.dtype), totals, terms)

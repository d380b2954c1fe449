"""A branch behind a prompt, block by block: the forward of score and replay.

A response longer than one block is walked: each block attends to the prompt, to
the blocks before it and to itself, and takes over their recurrent state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lstraw_jax.log_probs import TokenScores, token_log_probs
from lstraw_jax.prompt_state import (
    BranchState,
    PromptState,
    fork,
    next_positions,
)
from lstraw_jax.rollouts import BranchBatch
from modeling.qwen3_5 import Qwen3_5, SegmentDelta


class Block(NamedTuple):
  """A run of C tokens of one branch."""

  inputs: jax.Array  # [1, C] int32
  targets: jax.Array  # [1, C] int32
  valid: jax.Array  # [1, C] bool
  loss_mask: jax.Array  # [1, C] bool


def to_blocks(branch: BranchBatch, *, block_tokens: int) -> Block:
  """Cuts one branch, leaves [R], into stacked blocks, leaves [n, 1, C]."""
  return jax.tree.map(
      lambda x: cut(x, block_tokens=block_tokens),
      Block(branch.inputs, branch.targets, branch.valid, branch.loss_mask),
  )


def cut(x_R: jax.Array, *, block_tokens: int) -> jax.Array:
  """[R] -> [n, 1, C], padded with zeros."""
  size = min(block_tokens, x_R.shape[0])
  return jnp.pad(x_R, (0, -x_R.shape[0] % size)).reshape(-1, 1, size)


def run_block(
    model: Qwen3_5,
    prompt: PromptState,
    branch: BranchState,
    block: Block,
    *,
    temperature: float,
    head_chunk_tokens: int,
) -> tuple[TokenScores, SegmentDelta, jax.Array]:
  """Returns the scores [1,C], what the block adds, and its positions [1,C]."""
  positions = next_positions(prompt, branch, valid_BT=block.valid)
  hidden, delta = model(
      block.inputs,
      positions_BT=positions,
      prefixes=(prompt.prefix, branch.prefix),
      recurrent=branch.recurrent,
  )
  scores = token_log_probs(
      model,
      hidden,
      block.targets,
      block.loss_mask,
      temperature=temperature,
      chunk_tokens=head_chunk_tokens,
  )
  return scores, delta, positions


def start_branch(prompt: PromptState, blocks: Block) -> BranchState:
  """Returns an empty branch with room for all blocks."""
  return fork(prompt, branches=1, slots=blocks.inputs.size)

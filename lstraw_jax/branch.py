"""A branch of each prompt, block by block: the forward of score and replay.

A response longer than one block is walked: each block attends to the prompt, to
the blocks before it and to itself, and takes over their recurrent state.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lstraw_jax.log_probs import TokenScores, token_log_probs
from lstraw_jax.prompt_state import (
    BranchState,
    PromptState,
    append_to_branch,
    fork,
    next_positions,
)
from lstraw_jax.rollouts import BranchBatch
from modeling.layer_state import (
    Prefix,
    Record,
    Recurrent,
    SegmentDelta,
)
from modeling.models import Model
from pallas_kernels.padding import pad_to_multiple


class Block(NamedTuple):
  """A run of C tokens of one branch of each prompt."""

  inputs: jax.Array  # [B, C] int32
  targets: jax.Array  # [B, C] int32
  valid: jax.Array  # [B, C] bool
  loss_mask: jax.Array  # [B, C] bool
  record: Record  # [B, C, l, ...] int32: what is to be chosen


# `run_block` with its settings bound.
RunBlock = Callable[..., tuple[TokenScores, SegmentDelta]]


def to_blocks(branch: BranchBatch, *, size: int) -> Block:
  """Cuts branches, leaves [B, R], into stacked blocks, leaves [n, B, size]."""
  return jax.tree.map(
      lambda x: cut(x, size=size),
      Block(
          branch.inputs,
          branch.targets,
          branch.valid,
          branch.loss_mask,
          branch.record,
      ),
  )


def block_size(response_tokens: int, *, block_tokens: int, shards: int) -> int:
  """Returns the tokens of a block: a short response makes one short block.

  Args:
    response_tokens: of a branch.
    block_tokens: of a block, at most.
    shards: of `context`, which share a block.

  Raises:
    ValueError: if they cannot have equal shares of `block_tokens`.
  """
  if block_tokens % shards:
    raise ValueError(
        f"block_tokens={block_tokens}: want a multiple of mesh.context="
        f"{shards}, e.g. {-(-block_tokens // shards) * shards}"
    )
  return min(block_tokens, -(-response_tokens // shards) * shards)


def cut(x_BR: jax.Array, *, size: int) -> jax.Array:
  """[B, R, ...] -> [n, B, size, ...], padded with zeros."""
  padded = pad_to_multiple(x_BR, size, axis=1)
  shape = x_BR.shape[0], -1, size, *x_BR.shape[2:]
  return jnp.moveaxis(padded.reshape(shape), 1, 0)


def uncut(x_nBC: jax.Array, *, response_tokens: int) -> jax.Array:
  """[n, B, C] -> [B, R], without the padding."""
  joined = jnp.moveaxis(x_nBC, 0, 1).reshape(x_nBC.shape[1], -1)
  return joined[:, :response_tokens]


def run_block(
    model: Model,
    block: Block,
    *,
    positions_BT: jax.Array,
    prefixes: tuple[Prefix, ...],
    recurrent: Recurrent,
    temperature: float,
    head_chunk_tokens: int,
) -> tuple[TokenScores, SegmentDelta]:
  """Returns the scores [B,C] and what the block adds.

  Args:
    model: the weights.
    block: the tokens.
    positions_BT: theirs; -1 is padding.
    prefixes: what they attend to: the prompt, and the blocks before.
    recurrent: the state before them.
    temperature: that of the sampler, > 0.
    head_chunk_tokens: tokens projected to the vocabulary at once.
  """
  hidden, delta = model(
      block.inputs,
      positions_BT=positions_BT,
      prefixes=prefixes,
      recurrent=recurrent,
      record=jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), block.record),
  )
  scores = token_log_probs(
      model,
      hidden,
      block.targets,
      block.loss_mask,
      temperature=temperature,
      chunk_tokens=head_chunk_tokens,
  )
  return scores, delta


def advance_branch(
    model: Model,
    prompt: PromptState,
    branch: BranchState,
    block: Block,
    *,
    run_block: RunBlock,
) -> tuple[BranchState, TokenScores]:
  """Runs the block that comes next and adds it to the branch."""
  positions = next_positions(prompt, branch, valid_BT=block.valid)
  scores, delta = run_block(
      model,
      block,
      positions_BT=positions,
      prefixes=(prompt.prefix, branch.prefix),
      recurrent=branch.recurrent,
  )
  return append_to_branch(branch, delta, positions_BT=positions), scores


def start_branch(prompt: PromptState, blocks: Block) -> BranchState:
  """Returns an empty branch of each prompt with room for all blocks."""
  count, _, size = blocks.inputs.shape
  return fork(prompt, branches=1, slots=count * size)

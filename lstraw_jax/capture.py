"""Capture: prompts are evaluated once, without a gradient graph.

1. Each prompt but its last token is cut into chunks of equal size, which begin
   at multiples of that size; the tail is padded and masked. The prompts of a
   batch go in step, one a row.
2. Each chunk runs behind the state of those before it, by one compiled program
   that writes its keys, values and recurrent state in place (donation).
3. Hidden states are dropped. What is left is the prompt state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import (
    MemoryKind,
    PromptState,
    append,
    check,
    empty_prompt_state,
)
from lstraw_jax.rollouts import bucket
from modeling.sharding import constrain, to_mesh

Progress = Callable[[str, int, int], None]  # (stage, done, in all)


def capture(
    policy: Policy,
    prompts: Sequence[np.ndarray],
    *,
    chunk_tokens: int,
    capacity: int | None = None,
    policy_step: int = 0,
    memory_kind: MemoryKind = "device",
    progress: Progress | None = None,
) -> PromptState:
  """Evaluates prompts and returns the state that their branches follow.

  Args:
    policy: the weights.
    prompts: token ids [P] of each, P >= 1; as many as the mesh's `data`, or a
      multiple.
    chunk_tokens: tokens evaluated at once, a multiple of the mesh's `context`;
      more is faster and needs more memory for activations.
    capacity: slots of each row, a multiple of `chunk_tokens`; default: the
      longest P rounded up to a bucket, so that prompts of many lengths share
      few compiled programs.
    policy_step: optimizer steps the weights have seen; kept in the state.
    memory_kind: where keys and values are kept, see `empty_prompt_state`.
    progress: called after each chunk.

  Raises:
    ValueError: for an empty prompt, an id out of range, too little room, or
      sizes that do not fit the mesh.
  """
  rows = [_checked(tokens, policy.config.vocab_size) for tokens in prompts]
  if capacity is None:
    longest = max(row.size for row in rows)
    capacity = bucket(max(longest - 1, 1), multiple=chunk_tokens)
  state = empty_prompt_state(
      policy.config,
      mesh=policy.mesh,
      capacity=capacity,
      chunk_tokens=chunk_tokens,
      batch=len(rows),
      memory_kind=memory_kind,
  )
  step = to_mesh(np.int32(policy_step), policy.mesh)
  return _evaluate(
      policy,
      dataclasses.replace(state, policy_step=step),
      [row[:-1] for row in rows],
      next_tokens=[row[-1] for row in rows],
      progress=progress,
  )


def extend(
    policy: Policy,
    state: PromptState,
    tokens: Sequence[np.ndarray],
    *,
    progress: Progress | None = None,
) -> PromptState:
  """Continues captured prompts, e.g. with a response and the next turn.

  `state` is consumed: its buffers become those of the result.

  Args:
    policy: the weights, normally those that captured `state`.
    state: a prompt state with room for the tokens.
    tokens: token ids [T] that follow each prompt, T >= 1.
    progress: as in `capture`.

  Raises:
    ValueError: as `capture`.
  """
  check(state)
  if len(tokens) != state.length.shape[0]:
    raise ValueError(
        f"tokens: got {len(tokens)} rows, want {state.length.shape[0]}, one for"
        " each prompt of the state"
    )
  rows = [_checked(row, policy.config.vocab_size) for row in tokens]
  held_back = np.asarray(state.next_token)
  return _evaluate(
      policy,
      state,
      [np.append(t, row[:-1]) for t, row in zip(held_back, rows, strict=True)],
      next_tokens=[row[-1] for row in rows],
      progress=progress,
  )


@partial(jax.jit, donate_argnames="state")
def capture_chunk(
    policy: Policy,
    state: PromptState,
    tokens: jax.Array,
    frame: jax.Array,
    ends: jax.Array,
) -> PromptState:
  """Appends the tokens [B,C] of one frame that stand at length ... ends - 1."""
  policy = jax.lax.stop_gradient(policy)
  offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = (frame * tokens.shape[1] + offset)[None]
  new = (positions >= state.length[:, None]) & (positions < ends[:, None])
  positions = constrain(
      jnp.where(new, positions, -1), state.mesh, ("batch", "time")
  )
  with jax.named_scope("capture"):
    _, delta = policy.model(
        tokens,
        positions_BT=positions,
        prefixes=(state.prefix,),
        recurrent=state.recurrent,
    )
    return append(state, delta, positions_BT=positions)


def _evaluate(policy, state, rows, *, next_tokens, progress):
  """Runs the frames that hold new tokens of any row."""
  size, mesh = state.chunk_tokens, state.mesh
  lengths = np.asarray(state.length)
  ends = lengths + np.array([row.size for row in rows], np.int32)
  first, last = lengths.min() // size, -(-ends.max() // size)
  if last * size > state.capacity:
    raise ValueError(
        f"capacity={state.capacity}: want at least {last * size} slots for"
        f" {ends.max()} tokens in chunks of {size}. Capture with a larger"
        " capacity"
    )
  chunks = np.zeros((len(rows), (last - first) * size), np.int32)
  for chunk, row, length in zip(chunks, rows, lengths, strict=True):
    start = length - first * size
    chunk[start : start + row.size] = row
  for frame in range(first, last):
    start = (frame - first) * size
    tokens = chunks[:, start : start + size]
    state = capture_chunk(
        policy, state, *to_mesh((tokens, np.int32(frame), ends), mesh)
    )
    if progress is not None:
      state.length.block_until_ready()
      progress("capture", frame - first + 1, last - first)
  next_token = to_mesh(np.array(next_tokens, np.int32), mesh)
  return dataclasses.replace(state, next_token=next_token)


def _checked(tokens, vocab_size):
  tokens = np.asarray(tokens)
  if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
    raise ValueError(
        f"tokens: got shape {tokens.shape}, dtype {tokens.dtype}; want integer"
        " ids [T] with T >= 1"
    )
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise ValueError(
        f"tokens: ids span {tokens.min()}..{tokens.max()}; want"
        f" 0..{vocab_size - 1}, the model's vocabulary"
    )
  return tokens.astype(np.int32)

"""Capture: prompts are evaluated once, without a gradient graph.

1. Each prompt but its last token is cut into chunks of equal size, which begin
   at multiples of that size; the tail is padded and masked. The prompts of a
   batch go in step, one a row.
2. Each chunk runs behind the state of those before it, by one compiled program
   that writes its keys, values and recurrent state in place (donation).
3. Hidden states are dropped. What is left is the prompt state; for the exact
   gradient also a tape: the tokens, and the recurrent state at some boundaries.
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
    check_memory_kind,
    empty_prompt_state,
)
from lstraw_jax.rollouts import bucket
from modeling.layer_state import Recurrent
from modeling.sharding import constrain, to_mesh

Progress = Callable[[str, int, int], None]  # (stage, done, in all)
BeforeFrame = Callable[[int, PromptState], None]  # (number of the frame, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TapeConfig:
  """What is kept for the reverse sweep over a prompt.

  Of the recurrent states that enter the chunks, every n-th one; those between
  are computed again. They may lie in host memory.
  """

  boundary_every: int = 1
  memory_kind: MemoryKind = "device"

  def __post_init__(self):
    if self.boundary_every < 1:
      raise ValueError(
          f"boundary_every={self.boundary_every}: want at least 1; 1 keeps the"
          " state at every chunk, 8 an eighth of them"
      )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptTape:
  """What a capture leaves for `add_prompt_gradient`, beside the state."""

  tokens: np.ndarray  # [B, n C] int32: evaluated tokens, padded to frames
  boundaries: tuple[Recurrent, ...]  # that enter frame 0, every, 2 every, ...
  boundary_every: int

  @property
  def nbytes(self) -> int:
    """Bytes of the boundary states, over all devices."""
    return sum(x.nbytes for x in jax.tree.leaves(self.boundaries))


def capture(
    policy: Policy,
    prompts: Sequence[np.ndarray],
    *,
    chunk_tokens: int,
    capacity: int | None = None,
    policy_step: int = 0,
    memory_kind: MemoryKind = "device",
    progress: Progress | None = None,
    before_frame: BeforeFrame | None = None,
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
    before_frame: sees the state before each chunk; it may not keep it, since
      its memory is reused.

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
      before_frame=before_frame,
  )


def capture_with_tape(
    policy: Policy,
    prompts: Sequence[np.ndarray],
    *,
    tape: TapeConfig,
    chunk_tokens: int,
    capacity: int | None = None,
    policy_step: int = 0,
    memory_kind: MemoryKind = "device",
    progress: Progress | None = None,
) -> tuple[PromptState, PromptTape]:
  """Captures, and keeps what the exact gradient needs; else as `capture`."""
  check_memory_kind(tape.memory_kind, policy.mesh)
  boundaries = []

  def before_frame(frame: int, state: PromptState):
    if frame % tape.boundary_every == 0:
      # A copy: the next chunk reuses the memory of the state.
      kept = jax.tree.map(jnp.copy, state.recurrent)
      boundaries.append(in_memory(kept, tape.memory_kind))

  state = capture(
      policy,
      prompts,
      chunk_tokens=chunk_tokens,
      capacity=capacity,
      policy_step=policy_step,
      memory_kind=memory_kind,
      progress=progress,
      before_frame=before_frame,
  )
  frames = -(-max(len(prompt) - 1 for prompt in prompts) // chunk_tokens)
  tokens = np.zeros((len(prompts), frames * chunk_tokens), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt) - 1] = prompt[:-1]
  return state, PromptTape(
      tokens=tokens,
      boundaries=tuple(boundaries),
      boundary_every=tape.boundary_every,
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
  positions = frame_positions(state, frame, starts=state.length, ends=ends)
  with jax.named_scope("capture"):
    _, delta = policy.model(
        tokens,
        positions_BT=positions,
        prefixes=(state.prefix,),
        recurrent=state.recurrent,
    )
    return append(state, delta, positions_BT=positions)


def frame_positions(
    state: PromptState, frame: jax.Array, *, starts: jax.Array, ends: jax.Array
) -> jax.Array:
  """Returns the positions [B,C] of a frame, -1 outside starts ... ends - 1."""
  offset = jnp.arange(state.chunk_tokens, dtype=jnp.int32)
  positions = (frame * state.chunk_tokens + offset)[None]
  new = (positions >= starts[:, None]) & (positions < ends[:, None])
  return constrain(jnp.where(new, positions, -1), state.mesh, ("batch", "time"))


def in_memory(recurrent: Recurrent, memory_kind: MemoryKind) -> Recurrent:
  """Returns a recurrent state in the given memory."""
  return jax.tree.map(
      lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory_kind)),
      recurrent,
  )


def _evaluate(policy, state, rows, *, next_tokens, progress, before_frame=None):
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
    if before_frame is not None:
      before_frame(frame, state)
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

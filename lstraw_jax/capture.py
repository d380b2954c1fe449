"""Capture: the prompt is evaluated once, without a gradient graph.

1. The prompt but its last token is cut into chunks of equal size; the tail is
   padded and masked.
2. Each chunk runs behind the state of those before it, by one compiled program
   that writes its keys, values and recurrent state in place (donation).
3. Hidden states are dropped. What is left is the prompt state.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import (
    PromptState,
    append,
    check,
    empty_prompt_state,
)
from lstraw_jax.rollouts import bucket

Progress = Callable[[str, int, int], None]  # (stage, done, in all)


def capture(
    policy: Policy,
    prompt_tokens: np.ndarray,
    *,
    chunk_tokens: int,
    capacity: int | None = None,
    policy_step: int = 0,
    progress: Progress | None = None,
) -> PromptState:
  """Evaluates a prompt and returns the state that its branches follow.

  Args:
    policy: the weights.
    prompt_tokens: token ids [P], P >= 1.
    chunk_tokens: tokens evaluated at once; more is faster and needs more
      memory for activations.
    capacity: slots of the state; default: P rounded up to a bucket, so that
      prompts of many lengths share few compiled programs.
    policy_step: optimizer steps the weights have seen; kept in the state.
    progress: called after each chunk.

  Raises:
    ValueError: for an empty prompt, an id out of range, or too little room.
  """
  tokens = _checked(prompt_tokens, policy.config.vocab_size)
  if capacity is None:
    capacity = bucket(max(len(tokens) - 1, 1), multiple=chunk_tokens)
  state = empty_prompt_state(policy.config, capacity=capacity)
  state = dataclasses.replace(
      state, policy_step=jnp.asarray(policy_step, jnp.int32)
  )
  return _evaluate(
      policy,
      state,
      tokens[:-1],
      next_token=tokens[-1],
      chunk_tokens=chunk_tokens,
      progress=progress,
  )


def extend(
    policy: Policy,
    state: PromptState,
    tokens: np.ndarray,
    *,
    chunk_tokens: int,
    progress: Progress | None = None,
) -> PromptState:
  """Continues a captured prompt, e.g. with a response and the next turn.

  `state` is consumed: its buffers become those of the result.

  Args:
    policy: the weights, normally those that captured `state`.
    state: a prompt state of one row with room for the tokens.
    tokens: token ids [T] that follow the prompt, T >= 1.
    chunk_tokens: as in `capture`.
    progress: as in `capture`.

  Raises:
    ValueError: as `capture`.
  """
  check(state)
  tokens = _checked(tokens, policy.config.vocab_size)
  return _evaluate(
      policy,
      state,
      np.concatenate([np.asarray(state.next_token), tokens[:-1]]),
      next_token=tokens[-1],
      chunk_tokens=chunk_tokens,
      progress=progress,
  )


@partial(jax.jit, donate_argnames="state")
def capture_chunk(
    policy: Policy, state: PromptState, tokens: jax.Array, count: jax.Array
) -> PromptState:
  """Appends one chunk [C] of which the first `count` tokens are real."""
  policy = jax.lax.stop_gradient(policy)
  offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  positions = jnp.where(
      (offset < count)[None], state.length[:, None] + offset[None], -1
  )
  with jax.named_scope("capture"):
    _, delta = policy.model(
        tokens[None],
        positions_BT=positions,
        prefixes=(state.prefix,),
        recurrent=state.recurrent,
    )
    return append(state, delta, positions_BT=positions)


def _evaluate(policy, state, tokens, *, next_token, chunk_tokens, progress):
  chunks = -(-len(tokens) // chunk_tokens)
  needed = int(state.length[0]) + chunks * chunk_tokens
  if needed > state.capacity:
    raise ValueError(
        f"capacity={state.capacity}: want at least {needed} slots for"
        f" {int(state.length[0])} captured and {len(tokens)} new tokens in"
        f" chunks of {chunk_tokens}. Capture with a larger capacity"
    )
  for index in range(chunks):
    chunk = tokens[index * chunk_tokens : (index + 1) * chunk_tokens]
    padded = np.zeros((chunk_tokens,), np.int32)
    padded[: len(chunk)] = chunk
    state = capture_chunk(policy, state, padded, np.int32(len(chunk)))
    if progress is not None:
      state.length.block_until_ready()
      progress("capture", index + 1, chunks)
  return dataclasses.replace(
      state, next_token=jnp.asarray([next_token], jnp.int32)
  )


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

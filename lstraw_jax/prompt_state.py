"""The state of a captured prompt, and the small states of its branches.

A prompt state is read-only for everything but `append`: scoring, sampling and
replay fork a branch state, which has its own keys and values and a copy of the
recurrent state, and attend to the prompt's slots where they are.
"""

import dataclasses

import jax
import jax.numpy as jnp

from modeling.layer_state import (
    DeltaState,
    KvState,
    Prefix,
    empty_recurrent,
    empty_slots,
)
from modeling.qwen3_5 import SegmentDelta
from modeling.qwen3_5_config import Qwen3_5Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptState:
  """All that later tokens need of a prompt.

  The last token of the prompt is held back: it is the first input of every
  branch, because its output predicts the first token of the response. So a
  prompt of P tokens fills P - 1 slots, and responses start at position P.
  """

  slots: KvState  # [L, B, S, N, K]
  recurrent: DeltaState  # [L, l, B, ...]
  positions: jax.Array  # [B, S] int32, -1 = empty slot
  length: jax.Array  # [B] int32: tokens evaluated, P - 1
  next_token: jax.Array  # [B] int32: the token held back
  policy_step: (
      jax.Array
  )  # [] int32: optimizer steps of the policy that captured

  @property
  def prefix(self) -> Prefix:
    """The slots as a segment attends to them."""
    return Prefix(slots=self.slots, positions=self.positions)

  @property
  def capacity(self) -> int:
    """Number of slots, filled or not."""
    return self.positions.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchState:
  """What the branches of a prompt have added to it so far."""

  slots: KvState  # [L, G, R, N, K]
  recurrent: DeltaState  # [L, l, G, ...]
  positions: jax.Array  # [G, R] int32, -1 = empty slot
  used: jax.Array  # [] int32: slots written, the same for every branch

  @property
  def prefix(self) -> Prefix:
    """The slots as a segment attends to them."""
    return Prefix(slots=self.slots, positions=self.positions)


def empty_prompt_state(
    config: Qwen3_5Config, *, capacity: int, batch: int = 1
) -> PromptState:
  """Returns the state before the first token, with room for `capacity`."""
  return PromptState(
      slots=empty_slots(config, batch=batch, slots=capacity),
      recurrent=empty_recurrent(config, batch=batch),
      positions=jnp.full((batch, capacity), -1, jnp.int32),
      length=jnp.zeros((batch,), jnp.int32),
      next_token=jnp.zeros((batch,), jnp.int32),
      policy_step=jnp.zeros((), jnp.int32),
  )


def append(
    state: PromptState, delta: SegmentDelta, *, positions_BT: jax.Array
) -> PromptState:
  """Adds a segment. The caller leaves room for all T of its slots.

  Padding at its end takes no room for good: the next segment overwrites it.
  """
  start = state.length.max()
  slots, positions = _write(state, delta.slots, positions_BT, start)
  grown = (positions_BT >= 0).sum(1, dtype=jnp.int32)
  return dataclasses.replace(
      state,
      slots=slots,
      positions=positions,
      recurrent=delta.recurrent,
      length=state.length + grown,
  )


def fork(state: PromptState, *, branches: int, slots: int) -> BranchState:
  """Returns `branches` empty branches behind each row of the prompt."""
  rows = state.length.shape[0] * branches
  repeat = lambda x: jnp.repeat(x, branches, axis=2)
  return BranchState(
      slots=jax.tree.map(
          lambda x: jnp.zeros((x.shape[0], rows, slots, *x.shape[3:]), x.dtype),
          state.slots,
      ),
      recurrent=jax.tree.map(repeat, state.recurrent),
      positions=jnp.full((rows, slots), -1, jnp.int32),
      used=jnp.zeros((), jnp.int32),
  )


def append_to_branch(
    branch: BranchState, delta: SegmentDelta, *, positions_BT: jax.Array
) -> BranchState:
  """Adds a segment to every branch, in slots of its own."""
  slots, positions = _write(branch, delta.slots, positions_BT, branch.used)
  return BranchState(
      slots=slots,
      recurrent=delta.recurrent,
      positions=positions,
      used=branch.used + positions_BT.shape[1],
  )


def next_positions(
    prompt: PromptState, branch: BranchState, *, valid_BT: jax.Array
) -> jax.Array:
  """Returns the position of each token that comes next in its branch."""
  rows, steps = valid_BT.shape
  start = jnp.repeat(prompt.length, rows // prompt.length.shape[0])
  offset = branch.used + jnp.arange(steps, dtype=jnp.int32)
  return jnp.where(valid_BT, start[:, None] + offset[None], -1)


def nbytes(config: Qwen3_5Config, *, capacity: int, batch: int = 1) -> int:
  """Returns the bytes of a prompt state without making one."""
  state = jax.eval_shape(
      lambda: empty_prompt_state(config, capacity=capacity, batch=batch)
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def check(state: PromptState) -> None:
  """Raises ValueError if the leaves of a state do not fit each other."""
  batch, slots = state.positions.shape
  wanted = {
      "slots.k": state.slots.k.shape[1:3] == (batch, slots),
      "slots.v": state.slots.v.shape[1:3] == (batch, slots),
      "recurrent": state.recurrent.recurrent.shape[2] == batch,
      "conv": state.recurrent.conv.shape[2] == batch,
      "length": state.length.shape == (batch,),
      "next_token": state.next_token.shape == (batch,),
  }
  wrong = [name for name, fits in wanted.items() if not fits]
  if wrong:
    raise ValueError(
        f"prompt state: {', '.join(wrong)} do not fit positions.shape="
        f"{state.positions.shape}; was a leaf replaced or a state of another"
        " batch mixed in?"
    )


def _write(state, own: KvState, positions_BT, start):
  put = jax.lax.dynamic_update_slice_in_dim
  slots = jax.tree.map(
      lambda old, new: put(old, new, start, axis=2), state.slots, own
  )
  return slots, put(state.positions, positions_BT, start, axis=1)

"""The state of a captured prompt, and the small states of its branches.

A prompt state is read-only for everything but `append`: scoring, sampling and
replay fork a branch state, which has its own keys and values and a copy of the
recurrent state, and attend to the prompt's slots where they are.
"""

import dataclasses
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from lstraw_jax.stripes import write_frame
from modeling.decoder_config import DecoderConfig
from modeling.layer_state import (
    POSITION_AXES,
    Prefix,
    Recurrent,
    SegmentDelta,
    Slots,
    empty_recurrent,
)
from modeling.sharding import constrain, make_mesh, replicate, sharding

MemoryKind = Literal["device", "pinned_host"]

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptState:
  """All that later tokens need of some prompts, one a row.

  The last token of a prompt is held back: it is the first input of every
  branch, because its output predicts the first token of the response. So a
  prompt of P tokens fills P - 1 slots, and responses start at position P.

  Slots are striped over `context` by frames of `chunk_tokens` (`stripes.py`);
  rows lie over `data`. Position p is in frame p // chunk_tokens.
  """

  slots: Slots  # [L, B, S, ...]
  recurrent: Recurrent  # [L, l, B, ...]
  positions: jax.Array  # [B, S] int32, -1 = empty slot
  length: jax.Array  # [B] int32: tokens evaluated, P - 1
  next_token: jax.Array  # [B] int32: the token held back
  policy_step: (
      jax.Array
  )  # [] int32: optimizer steps of the policy that captured
  chunk_tokens: int = dataclasses.field(metadata=_STATIC)
  mesh: Mesh = dataclasses.field(metadata=_STATIC)

  @property
  def prefix(self) -> Prefix:
    """The slots as a segment attends to them."""
    return Prefix(slots=self.slots, positions=self.positions)

  @property
  def capacity(self) -> int:
    """Number of slots of a row, filled or not."""
    return self.positions.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchState:
  """What the branches of some prompts have added so far.

  Striped as the prompt is, by frames of the size of the segments added.
  """

  slots: Slots  # [L, G, R, ...]
  recurrent: Recurrent  # [L, l, G, ...]
  positions: jax.Array  # [G, R] int32, -1 = empty slot
  used: jax.Array  # [] int32: tokens seen, the same for every branch
  mesh: Mesh = dataclasses.field(metadata=_STATIC)

  @property
  def prefix(self) -> Prefix:
    """The slots as a segment attends to them."""
    return Prefix(slots=self.slots, positions=self.positions)


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "mesh",
        "capacity",
        "chunk_tokens",
        "batch",
        "memory_kind",
    ),
)
def empty_prompt_state(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    capacity: int,
    chunk_tokens: int,
    batch: int,
    memory_kind: MemoryKind = "device",
) -> PromptState:
  """Returns the state before the first token, with room for `capacity`.

  Args:
    config: the model.
    mesh: of the model.
    capacity: slots of a row; a multiple of `chunk_tokens`.
    chunk_tokens: tokens of a frame; a multiple of the mesh's `context`.
    batch: rows; a multiple of the mesh's `data`.
    memory_kind: where the slots lie. Those in "pinned_host" memory are staged
      to the device one block of a layer at a time.

  Raises:
    ValueError: if a number is no such multiple, or the backend has no such
      memory.
  """
  check_memory_kind(memory_kind, mesh)
  for name, value, unit, of in (
      ("chunk_tokens", chunk_tokens, mesh.shape["context"], "mesh.context"),
      ("capacity", capacity, chunk_tokens, "chunk_tokens"),
      ("batch", batch, mesh.shape["data"], "mesh.data"),
  ):
    if value % unit:
      raise ValueError(
          f"{name}={value}: want a multiple of {of}={unit}, e.g."
          f" {-(-value // unit) * unit}"
      )
  slots = config.slot_shapes(batch=batch, slots=capacity)
  prefix = _empty_prefix(slots, mesh, memory_kind)
  scalars = replicate(
      dict(
          length=jnp.zeros((batch,), jnp.int32),
          next_token=jnp.zeros((batch,), jnp.int32),
          policy_step=jnp.zeros((), jnp.int32),
      ),
      mesh,
  )
  return PromptState(
      slots=prefix.slots,
      recurrent=empty_recurrent(config, mesh=mesh, batch=batch),
      positions=prefix.positions,
      chunk_tokens=chunk_tokens,
      mesh=mesh,
      **scalars,
  )


def append(
    state: PromptState, delta: SegmentDelta, *, positions_BT: jax.Array
) -> PromptState:
  """Adds the valid tokens of one frame of `chunk_tokens`, in place.

  The frame is that of the positions: p lies in slot p % chunk_tokens of frame
  p // chunk_tokens in every row. The caller leaves room for it.
  """
  assert positions_BT.shape[1] == state.chunk_tokens, positions_BT.shape
  grown = write_frame(
      state.prefix,
      Prefix(slots=delta.slots, positions=positions_BT),
      frame=positions_BT.max() // state.chunk_tokens,
      mesh=state.mesh,
  )
  count = (positions_BT >= 0).sum(1, dtype=jnp.int32)
  return dataclasses.replace(
      state,
      slots=grown.slots,
      positions=grown.positions,
      recurrent=delta.recurrent,
      length=replicate(state.length + count, state.mesh),
  )


def fork(state: PromptState, *, branches: int, slots: int) -> BranchState:
  """Returns `branches` empty branches behind each row of the prompt.

  Args:
    state: the prompt.
    branches: number of branches of each row.
    slots: room of each; a multiple of the mesh's `context`.
  """
  rows = state.length.shape[0] * branches
  repeat = lambda x: jnp.repeat(x, branches, axis=2)
  room = lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], rows, slots, *x.shape[3:]), x.dtype
  )
  prefix = _empty_prefix(jax.tree.map(room, state.slots), state.mesh, "device")
  return BranchState(
      slots=prefix.slots,
      recurrent=jax.tree.map(repeat, state.recurrent),
      positions=prefix.positions,
      used=jnp.zeros((), jnp.int32),
      mesh=state.mesh,
  )


def append_to_branch(
    branch: BranchState,
    delta: SegmentDelta,
    *,
    positions_BT: jax.Array,
    steps: int | None = None,
) -> BranchState:
  """Adds a segment to every branch, in slots of its own.

  Args:
    branch: the state before.
    delta: what the segment adds; its T is that of all segments of the branch.
    positions_BT: of the segment; -1 is padding.
    steps: tokens that the segment brings, padding of a row included: T, or
      fewer if the next segment goes on in the same frame.
  """
  frame_tokens = positions_BT.shape[1]
  grown = write_frame(
      branch.prefix,
      Prefix(slots=delta.slots, positions=positions_BT),
      frame=branch.used // frame_tokens,
      mesh=branch.mesh,
  )
  return dataclasses.replace(
      branch,
      slots=grown.slots,
      positions=grown.positions,
      recurrent=delta.recurrent,
      used=branch.used + (frame_tokens if steps is None else steps),
  )


def zero_sums(
    state: PromptState, kind: type[nnx.Variable], *, dtype: jnp.dtype
) -> Slots:
  """Returns zeros, laid out as what gradients of such weights come through."""
  learned = state.slots.learned(kind)
  space = jax.typeof(jax.tree.leaves(learned)[0]).memory_space
  on_host = space == jax.memory.Space.Host
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), learned)
  memory = "pinned_host" if on_host else "device"
  return _empty_prefix(shapes, state.mesh, memory).slots


def next_positions(
    prompt: PromptState, branch: BranchState, *, valid_BT: jax.Array
) -> jax.Array:
  """Returns the position of each token of the frame that comes next."""
  rows, frame_tokens = valid_BT.shape
  start = jnp.repeat(prompt.length, rows // prompt.length.shape[0])
  start += branch.used // frame_tokens * frame_tokens
  offset = jnp.arange(frame_tokens, dtype=jnp.int32)
  return jnp.where(valid_BT, start[:, None] + offset[None], -1)


def nbytes(config: DecoderConfig, *, capacity: int, batch: int = 1) -> int:
  """Returns the bytes of a prompt state, over all devices, without one."""
  state = jax.eval_shape(
      lambda: empty_prompt_state(
          config,
          mesh=make_mesh(),
          capacity=capacity,
          chunk_tokens=1,
          batch=batch,
      )
  )
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def check_memory_kind(memory_kind: str, mesh: Mesh) -> None:
  """Raises ValueError if the devices of a mesh have no such memory."""
  if memory_kind == "device":
    return
  device = [*mesh.local_devices, *mesh.devices.flat][0]
  has = [memory.kind for memory in device.addressable_memories()]
  if memory_kind not in get_args(MemoryKind) or memory_kind not in has:
    raise ValueError(
        f"memory_kind={memory_kind!r}: want one of {get_args(MemoryKind)} that"
        f" the devices have; those of {device.platform!r} have {has}"
    )


def check(state: PromptState) -> None:
  """Raises ValueError if the leaves of a state do not fit each other."""
  batch, slots = state.positions.shape
  wanted = {
      **{
          f"slots{name}": leaf.shape[1:3] == (batch, slots)
          for name, leaf in _named(state.slots)
      },
      **{
          f"recurrent{name}": leaf.shape[2] == batch
          for name, leaf in _named(state.recurrent)
      },
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


def _named(tree):
  """Yields each leaf of a state with its name, as ".k"."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    yield jax.tree_util.keystr(path), leaf


def _empty_prefix(shapes: Slots, mesh: Mesh, memory_kind: str) -> Prefix:
  """Lays empty slots out over the mesh, each with the position of none."""
  all_layers = sharding(mesh, shapes.AXES, memory_kind=memory_kind)
  one_layer = sharding(mesh, shapes.AXES[1:], memory_kind=memory_kind)

  def empty(x):
    # Layer by layer: what goes to the host is never all on the device.
    layer = lambda _: jax.device_put(jnp.zeros(x.shape[1:], x.dtype), one_layer)
    layers = jax.lax.map(layer, jnp.arange(x.shape[0]))
    return jax.lax.with_sharding_constraint(layers, all_layers)

  rows_and_slots = jax.tree.leaves(shapes)[0].shape[1:3]
  positions = jnp.full(rows_and_slots, -1, jnp.int32)
  return Prefix(
      slots=jax.tree.map(empty, shapes),
      positions=constrain(positions, mesh, POSITION_AXES),
  )

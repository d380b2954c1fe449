"""What each kind of layer keeps of the tokens it has seen."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from modeling.qwen3_5_config import Qwen3_5Config
from modeling.sharding import Axes, sharding, spec
from pallas_kernels.shapes import wide_dtype

# Logical axes of the keys and values of one layer, and of their positions.
SLOT_AXES: Axes = ("batch", "slots", "kv_heads", None)
POSITION_AXES: Axes = ("batch", "slots")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvState:
  """Keys and values of full attention: grows by one slot a token."""

  k: jax.Array  # [L, B, S, N, K] model dtype, after norm and rope
  v: jax.Array  # [L, B, S, N, K] model dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
  """State of Gated DeltaNet layers: of one size, whatever was seen.

  Stacked over blocks, then over the linear layers of a block. The last inputs
  of the convolution are kept by heads, so that a device has those of its heads.
  """

  recurrent: jax.Array  # [L, l, B, U, K, V] float32 or wider
  conv_q: jax.Array  # [L, l, B, W, H, K] model dtype, newest last
  conv_k: jax.Array  # [L, l, B, W, H, K] model dtype
  conv_v: jax.Array  # [L, l, B, W, U, V] model dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Stored keys and values that a segment attends to, and where they stand.

  They are constants. Who wants their gradient gives a `sink`: stand-ins whose
  values are never read, which a forward hands through, and whose cotangents
  are the sums that a backward pass adds to, in place.
  """

  slots: KvState  # stacked over the full layers
  positions: jax.Array  # [B, S] int32, -1 = empty slot
  sink: KvState | None = None  # as the slots, in the dtype of the sums


def prefix_specs() -> Any:
  """Returns the mesh axes of a Prefix; of a sink also where there is none."""
  slots: Any = spec(("layers", *SLOT_AXES))
  positions: Any = spec(POSITION_AXES)
  return Prefix(slots=slots, positions=positions, sink=slots)


def empty_slots(config: Qwen3_5Config, *, batch: int, slots: int) -> KvState:
  """Returns zeroed keys and values for `slots` tokens."""
  shape = (
      config.num_blocks,
      batch,
      slots,
      config.num_key_value_heads,
      config.head_dim,
  )
  dtype = config.activation_dtype
  return KvState(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def delta_heads(config: Qwen3_5Config, mesh: Mesh) -> str:
  """Returns the logical name of the heads of a Gated DeltaNet state.

  Where `tensor` x `context` divides them they lie over both ("spread_heads").
  Elsewhere they lie over `tensor` ("linear_heads"), and each shard of `context`
  has the same state.

  Raises:
    ValueError: if `tensor` does not divide the heads.
  """
  heads, tensor = config.linear_num_key_heads, mesh.shape["tensor"]
  # A value head lies where its key head does; there are a multiple of them.
  if heads % tensor:
    raise ValueError(
        f"mesh.tensor={tensor}: want a divisor of linear_num_key_heads={heads},"
        " since a device holds whole heads"
    )
  spread = heads % (tensor * mesh.shape["context"]) == 0
  return "spread_heads" if spread else "linear_heads"


def delta_axes(config: Qwen3_5Config, mesh: Mesh) -> DeltaState:
  """Returns the logical axes of each stacked leaf."""
  stacked, heads = ("layers", "layers", "batch"), delta_heads(config, mesh)
  recurrent: Any = (*stacked, heads, None, None)
  conv: Any = (*stacked, None, heads, None)
  return DeltaState(recurrent=recurrent, conv_q=conv, conv_k=conv, conv_v=conv)


def delta_shapes(config: Qwen3_5Config, *, batch: int) -> DeltaState:
  """Returns the shapes of the recurrent states of so many rows."""
  layers = (config.num_blocks, config.full_attention_interval - 1, batch)
  window = config.linear_conv_kernel_dim - 1
  keys = (config.linear_num_key_heads, config.linear_key_head_dim)
  values = (config.linear_num_value_heads, config.linear_value_head_dim)
  matrix = (values[0], keys[1], values[1])
  dtype = config.activation_dtype

  def shape(*sizes, dtype=dtype) -> Any:
    return jax.ShapeDtypeStruct((*layers, *sizes), dtype)

  return DeltaState(
      recurrent=shape(*matrix, dtype=wide_dtype(dtype)),
      conv_q=shape(window, *keys),
      conv_k=shape(window, *keys),
      conv_v=shape(window, *values),
  )


def empty_recurrent(
    config: Qwen3_5Config, *, mesh: Mesh, batch: int
) -> DeltaState:
  """Returns the state before the first token, laid out by `delta_axes`."""
  shapes = delta_shapes(config, batch=batch)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  # Not eagerly: that would make the whole of it on one device first.
  where = jax.tree.map(
      partial(sharding, mesh),
      delta_axes(config, mesh),
      is_leaf=lambda axes: isinstance(axes, tuple),
  )
  return jax.jit(zeros, out_shardings=where)()

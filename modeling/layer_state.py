"""What each kind of layer keeps of the tokens it has seen."""

import dataclasses

import jax
import jax.numpy as jnp

from modeling.qwen3_5_config import Qwen3_5Config
from pallas_kernels.shapes import wide_dtype


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

  Stacked over blocks, then over the linear layers of a block.
  """

  recurrent: jax.Array  # [L, l, B, U, K, V] float32 or wider
  conv: jax.Array  # [L, l, B, W, channels] model dtype, newest last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Stored keys and values that a segment attends to, and where they stand."""

  slots: KvState  # stacked over the full layers
  positions: jax.Array  # [B, S] int32, -1 = empty slot


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


def empty_recurrent(config: Qwen3_5Config, *, batch: int) -> DeltaState:
  """Returns the state before the first token."""
  layers = (config.num_blocks, config.full_attention_interval - 1, batch)
  return DeltaState(
      recurrent=jnp.zeros(
          (
              *layers,
              config.linear_num_value_heads,
              config.linear_key_head_dim,
              config.linear_value_head_dim,
          ),
          wide_dtype(config.dtype),
      ),
      conv=jnp.zeros(
          (*layers, config.linear_conv_kernel_dim - 1, config.conv_channels),
          config.activation_dtype,
      ),
  )

"""Rotary position embedding whose phase stays exact at millions of tokens.

In float32, position x frequency is off by 0.06 rad at position 2^20. The phase
is therefore taken in turns with integer arithmetic: a frequency is a 64-bit
binary fraction of a turn, its product with a 32-bit position wraps modulo one
turn by itself, and only the remainder becomes a float.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from modeling.decoder_config import RopeConfig, YarnConfig
from pallas_kernels.shapes import typed, wide


class Rotation(NamedTuple):
  """cos and sin of every phase, already times the attention factor."""

  cos: jax.Array  # [B, T, rotary / 2]
  sin: jax.Array  # [B, T, rotary / 2]


def inverse_frequencies(config: RopeConfig, *, head_dim: int) -> np.ndarray:
  """Returns the radians per position of each rotated pair, float64.

  The values are those of float32, correctly rounded, because a checkpoint was
  trained with such a table.
  """
  if config.inv_freq is not None:
    return np.asarray(config.inv_freq, np.float64)
  rotary = int(head_dim * config.partial_rotary_factor)
  exponents = np.arange(0, rotary, 2, dtype=np.float64) / rotary
  frequencies = config.rope_theta**-exponents
  if config.yarn is not None:
    frequencies = _yarn(frequencies, config.yarn, config.rope_theta, rotary)
  return frequencies.astype(np.float32).astype(np.float64)


@typed
def rotation(
    positions: Int[Array, "B T"],
    *,
    config: RopeConfig,
    head_dim: int,
    dtype: jnp.dtype,
) -> Rotation:
  """Returns cos and sin at every position, in float32 or wider.

  Args:
    positions: int32; padding (-1) gets a phase that nobody uses.
    config: frequencies and YaRN.
    head_dim: full size of a head, of which a part is rotated.
    dtype: float64 computes the plain product, anything else the exact one.
  """
  frequencies = inverse_frequencies(config, head_dim=head_dim)
  if dtype == jnp.float64:
    phase = positions[..., None].astype(dtype) * frequencies[None, None]
  else:
    phase = _phase_by_turns(positions, frequencies)
  factor = 1.0
  if config.yarn is not None:
    factor = 0.1 * math.log(config.yarn.factor) + 1.0
  return Rotation(factor * jnp.cos(phase), factor * jnp.sin(phase))


@typed
def rotate(x: Float[Array, "B T H K"], by: Rotation) -> Float[Array, "B T H K"]:
  """Rotates pairs (i, i + rotary/2) of the first dims; the rest passes."""
  cos, sin = by.cos[:, :, None], by.sin[:, :, None]
  half = cos.shape[-1]
  first, second = wide(x[..., :half]), wide(x[..., half : 2 * half])
  rotated = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


@typed
def rotate_interleaved(
    x: Float[Array, "B T H K"], by: Rotation
) -> Float[Array, "B T H K"]:
  """Rotates pairs (2i, 2i + 1) of the first dims; the rest passes.

  What comes out is all first elements, then all second ones, as transformers
  stores them: products of queries and keys are the same in any order.
  """
  rotary = 2 * by.cos.shape[-1]
  pairs = [x[..., start:rotary:2] for start in (0, 1)]
  return rotate(jnp.concatenate([*pairs, x[..., rotary:]], axis=-1), by)


def _phase_by_turns(positions, frequencies):
  """Returns position x frequency modulo 2 pi in [-pi, pi), float32."""
  turns = np.mod(frequencies / (2 * np.pi), 1.0) * 2.0**64
  high, low = (
      jnp.asarray(
          (turns.astype(np.uint64) >> np.uint64(shift)).astype(np.uint32)
      )
      for shift in (32, 0)
  )
  position = positions.astype(jnp.uint32)[..., None]
  wrapped = high[None, None] * position + _high_word(low[None, None], position)
  signed = jax.lax.bitcast_convert_type(wrapped, jnp.int32)
  return signed.astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)


def _high_word(a, b):
  """Returns the upper 32 of the 64 bits of a product, by halves of 16 bits."""
  a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
  middle = a_high * b_low + ((a_low * b_low) >> 16)
  other = a_low * b_high + (middle & 0xFFFF)
  return a_high * b_high + (middle >> 16) + (other >> 16)


def _yarn(frequencies, yarn: YarnConfig, theta, rotary):
  """Blends the frequencies with those of a window `factor` times as long."""

  def pair_of(turns):
    """Index of the pair that makes `turns` turns in the original window."""
    window = yarn.original_max_position_embeddings
    return (
        rotary
        * math.log(window / (turns * 2 * math.pi))
        / (2 * math.log(theta))
    )

  first = max(math.floor(pair_of(yarn.beta_fast)), 0)
  last = min(math.ceil(pair_of(yarn.beta_slow)), rotary - 1)
  ramp = (np.arange(rotary // 2) - first) / max(last - first, 1e-3)
  stretched = np.clip(ramp, 0, 1)
  return frequencies * (1 - stretched + stretched / yarn.factor)

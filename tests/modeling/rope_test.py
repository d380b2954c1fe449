"""Phases stay right at positions in the millions, and YaRN is YaRN's."""

import jax.numpy as jnp
import numpy as np
import pytest

from modeling import rope
from modeling.decoder_config import RopeConfig, YarnConfig

FLOAT32_TOLERANCE = 1e-6  # measured: 4.0e-7 at 2^31 - 1
HEAD_DIM = 256
YARN = YarnConfig(factor=4.0, original_max_position_embeddings=262144)


def positions_up_to(last):
  return np.arange(last - 1000, last + 1)


def exact_rotation(positions, config):
  """cos and sin [T, pairs] from products in extended precision."""
  frequencies = rope.inverse_frequencies(config, head_dim=HEAD_DIM)
  product = np.multiply.outer(positions, frequencies.astype(np.longdouble))
  return np.cos(product), np.sin(product)


def our_rotation(positions, config, dtype="float32"):
  by = rope.rotation(
      jnp.asarray(positions[None], jnp.int32),
      config=config,
      head_dim=HEAD_DIM,
      dtype=jnp.dtype(dtype),
  )
  return np.asarray(by.cos[0]), np.asarray(by.sin[0])


@pytest.mark.parametrize("last", [1000, 2**20, 2**21, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_phases_are_exact_up_to_the_last_position(last, dtype):
  positions = positions_up_to(last)
  ours = our_rotation(positions, RopeConfig(), dtype)
  exact = exact_rotation(positions, RopeConfig())
  assert np.abs(np.subtract(ours, exact)).max() < FLOAT32_TOLERANCE


def test_the_plain_float32_product_would_be_far_off():
  positions = positions_up_to(2**20)
  frequencies = rope.inverse_frequencies(RopeConfig(), head_dim=HEAD_DIM)
  product = np.multiply.outer(
      positions.astype(np.float32), frequencies.astype(np.float32)
  )
  assert product.dtype == np.float32
  exact_cos, _ = exact_rotation(positions, RopeConfig())
  assert np.abs(np.cos(product) - exact_cos).max() > 1e-2


def test_float64_computes_the_plain_product(x64):
  positions = positions_up_to(2**21)
  ours = our_rotation(positions, RopeConfig(), "float64")
  exact = exact_rotation(positions, RopeConfig())
  assert np.abs(np.subtract(ours, exact)).max() < 1e-9


def test_frequencies_above_a_turn_wrap():
  config = RopeConfig(inv_freq=(7.5, 100.25, 1e-3))
  positions = positions_up_to(2**20)
  ours = our_rotation(positions, config)
  exact = exact_rotation(positions, config)
  assert np.abs(np.subtract(ours, exact)).max() < FLOAT32_TOLERANCE


def test_inverse_frequencies_are_correctly_rounded_float32():
  found = rope.inverse_frequencies(RopeConfig(), head_dim=HEAD_DIM)
  exact = np.float64(1e7) ** -(np.arange(0, 64, 2) / 64)
  np.testing.assert_array_equal(found, exact.astype(np.float32))


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
  plain = rope.inverse_frequencies(RopeConfig(), head_dim=HEAD_DIM)
  yarn = rope.inverse_frequencies(RopeConfig(yarn=YARN), head_dim=HEAD_DIM)
  ratio = plain / yarn
  np.testing.assert_allclose(ratio[[0, -1]], [1.0, 4.0], rtol=1e-6)
  assert (np.diff(ratio) > -1e-6).all()


def test_yarn_scales_cos_and_sin():
  cos, sin = our_rotation(np.arange(3), RopeConfig(yarn=YARN))
  np.testing.assert_allclose(
      cos**2 + sin**2, (0.1 * np.log(4.0) + 1.0) ** 2, rtol=1e-6
  )


def test_the_dims_that_are_not_rotated_pass(x64):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(1, 5, 2, HEAD_DIM)))
  by = rope.rotation(
      jnp.arange(5, dtype=jnp.int32)[None],
      config=RopeConfig(),
      head_dim=HEAD_DIM,
      dtype=x.dtype,
  )
  y = rope.rotate(x, by)
  np.testing.assert_array_equal(y[..., 64:], x[..., 64:])
  # Pairs (i, i + 32) turn as complex numbers do.
  pairs = lambda z: np.asarray(z[..., :32]) + 1j * np.asarray(z[..., 32:64])
  turned = pairs(x) * (np.asarray(by.cos) + 1j * np.asarray(by.sin))[:, :, None]
  np.testing.assert_allclose(pairs(y), turned, atol=1e-14)

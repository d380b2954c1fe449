"""Bytes of the numbers of a model."""

from typing import NamedTuple

import jax.numpy as jnp

from modeling.decoder_config import DecoderConfig
from pallas_kernels.shapes import wide_dtype


class Widths(NamedTuple):
  """Bytes of an element."""

  narrow: int  # activations, keys and values, weights as they are used
  wide: int  # float32 or wider: states, logits, sums
  param: int  # weights at rest
  trained: int  # the trained ones: adapters are kept wide


def widths(model: DecoderConfig) -> Widths:
  """Reads them off the configuration."""
  param = jnp.dtype(model.param_dtype)
  trained = param if model.lora is None else wide_dtype(param)
  return Widths(
      narrow=model.activation_dtype.itemsize,
      wide=wide_dtype(model.dtype).itemsize,
      param=param.itemsize,
      trained=trained.itemsize,
  )

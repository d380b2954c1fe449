"""The architectures: which decoder a configuration is of."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import DecoderConfig
from modeling.glm_moe_dsa import GlmMoeDsa
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.parameter import Buffer
from modeling.qwen3_5 import Qwen3_5
from modeling.qwen3_5_config import Qwen3_5Config

Model = Qwen3_5 | GlmMoeDsa

_DECODERS: Mapping[type[DecoderConfig], Any] = {
    Qwen3_5Config: Qwen3_5,
    GlmMoeDsaConfig: GlmMoeDsa,
}
_FAMILIES: Mapping[str, type[DecoderConfig]] = {
    "qwen3_5": Qwen3_5Config,
    "glm_moe_dsa": GlmMoeDsaConfig,
}


def make_model(
    config: DecoderConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None
) -> Model:
  """Draws a model, on one device by default."""
  return _DECODERS[type(config)](config, rngs=rngs, mesh=mesh)


def read_config(config: Mapping[str, Any], **changes: Any) -> DecoderConfig:
  """Reads a Hugging Face `config.json` of any of the architectures.

  Args:
    config: the parsed file.
    **changes: fields that the file does not hold (`dtype`, `lora`, ...).

  Raises:
    ValueError: for an unknown `model_type`, and as the `from_hf` of its own.
  """
  kind = config.get("model_type")
  for prefix, read in _FAMILIES.items():
    if str(kind).startswith(prefix):
      return read.from_hf(config, **changes)
  raise ValueError(
      f"config.json: model_type={kind!r} is not supported; want one that begins"
      f" with {' or '.join(_FAMILIES)}"
  )


def abstract_model(config: DecoderConfig, *, mesh: Mesh | None = None) -> Model:
  """Returns a model of shapes and dtypes; no array is made."""
  return nnx.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0), mesh=mesh))


def parameter_count(config: DecoderConfig) -> int:
  """Returns the number of weights, without adapters and buffers."""
  model = abstract_model(config.replace(lora=None))
  _, weights = nnx.state(model, Buffer, ...)
  return sum(leaf.size for leaf in jax.tree.leaves(weights))

"""Models with every weight drawn at random, without compiling their init."""

import numpy as np

from modeling import checkpoint_names, checkpoints
from modeling.decoder_config import DecoderConfig
from modeling.models import Model, abstract_model
from modeling.qwen3_5_config import Qwen3_5Config


def random_model(config: DecoderConfig, *, seed: int = 0) -> Model:
  """Returns a model whose activations stay near one.

  Nothing has the value that a new model gives it, adapters included: such
  values hide errors.
  """
  rng = np.random.default_rng(seed)
  values = {}
  for path, leaf in checkpoint_names.leaves(abstract_model(config)).items():
    value = rng.normal(size=leaf.shape)
    if path[-1] == "e_score_correction_bias":
      value = rng.uniform(7.0, 7.25, size=leaf.shape)
    elif path[-1] == "A_log":
      value = np.log(rng.uniform(0.01, 16.0, size=leaf.shape))
    elif path[-1] == "dt_bias":
      value -= 1.0
    elif path[-1] == "weight" and not _is_zero_centred(config, path):
      value = 1.0 + 0.2 * value
    elif path[-1] in ("weight", "bias"):
      value *= 0.2
    elif path[-1] != "embed_tokens":
      value *= leaf.shape[-2] ** -0.5
    values[path] = value.astype(leaf.dtype)
  return checkpoints.assemble(config, values)


def _is_zero_centred(config, path):
  """Whether a norm multiplies by 1 + w: Qwen's, but that of Gated DeltaNet."""
  qwen = isinstance(config, Qwen3_5Config)
  return qwen and (path[-2] != "norm" or len(path) == 2)

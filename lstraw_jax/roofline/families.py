"""The architectures: which kinds of layers a model has, and how many of each.

Another one is a file that says so, and an entry here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.glm_moe_dsa import glm_moe_dsa_layers
from lstraw_jax.roofline.layer_kind import LayerKind
from lstraw_jax.roofline.qwen3_5 import qwen3_5_layers
from modeling.decoder_config import DecoderConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.qwen3_5_config import Qwen3_5Config

Layers = Callable[[Any, Workload, Target], list[LayerKind]]

_FAMILIES: Mapping[type[DecoderConfig], Layers] = {
    Qwen3_5Config: qwen3_5_layers,
    GlmMoeDsaConfig: glm_moe_dsa_layers,
}


def layers_of(workload: Workload, target: Target) -> list[LayerKind]:
  """Returns all layers of the workload's model."""
  model = workload.model
  return _FAMILIES[type(model)](model, workload, target)

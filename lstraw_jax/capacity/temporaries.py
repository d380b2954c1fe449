"""What a stage's program needs beside its arguments and results, estimated.

The compiler decides that. What it decides on are the largest arrays that a
segment makes; each family says which, and counts each as often as fits the
programs compiled for GPUs best. The sum is good to about a third, and a small
part of the whole (`docs/capacity.md` has the comparison, and its commands).
"""

from collections.abc import Callable, Mapping
from typing import Any

from lstraw_jax.capacity.glm_moe_dsa_temporaries import glm_moe_dsa_arrays
from lstraw_jax.capacity.kept_bytes import KeptBytes
from lstraw_jax.capacity.qwen3_5_temporaries import qwen3_5_arrays
from lstraw_jax.capacity.segment_arrays import Segment
from lstraw_jax.capacity.workload import Workload
from modeling.decoder_config import DecoderConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.qwen3_5_config import Qwen3_5Config

Arrays = Callable[[Any, Workload, Segment], float]

_FAMILIES: Mapping[type[DecoderConfig], Arrays] = {
    Qwen3_5Config: qwen3_5_arrays,
    GlmMoeDsaConfig: glm_moe_dsa_arrays,
}
_GRADIENTS = 1.06  # new ones of all trained weights, before they are added


def temporaries(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """Returns the estimated bytes per device of a stage's temporaries."""
  if stage == "optimizer":
    return 0  # it works in place, weight by weight
  over_chunks = stage in ("capture", "prompt_gradient")
  backward = stage in ("replay", "prompt_gradient")
  segment = Segment(
      tokens=workload.chunk_tokens if over_chunks else workload.block_tokens,
      of_prompt=over_chunks,
      backward=backward,
  )
  model = workload.model
  arrays = _FAMILIES[type(model)](model, workload, segment)
  return int(arrays + (_GRADIENTS * kept.gradients if backward else 0))

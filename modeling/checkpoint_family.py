"""What the checkpoints of each architecture do in their own way."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from modeling.decoder_config import DecoderConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.qwen3_5_config import Qwen3_5Config

LeafPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Where layers stand in the model, and what its official files hold."""

  # Path of stacked layers -> number of each layer, and its index in the stack.
  stacks: Mapping[LeafPath, tuple[tuple[int, tuple[int, ...]], ...]]
  per_expert: bool  # each expert has tensors of its own
  mtp: str  # how names of multi-token prediction begin


def family(config: DecoderConfig) -> Family:
  """Returns the family of a model."""
  return _FAMILIES[type(config)](config)


def _qwen3_5(config: Qwen3_5Config) -> Family:
  """With n layers a block, layer n - 1 of a block is its full layer."""
  interval, blocks = config.full_attention_interval, range(config.num_blocks)
  linear = tuple(
      (block * interval + i, (block, i))
      for block in blocks
      for i in range(interval - 1)
  )
  full = tuple((n * interval + interval - 1, (n,)) for n in blocks)
  return Family(
      stacks={
          ("blocks", "linear_layers"): linear,
          ("blocks", "full_layer"): full,
      },
      per_expert=False,
      mtp="mtp.",
  )


def _glm_moe_dsa(config: GlmMoeDsaConfig) -> Family:
  """Layers come in groups of runs: see `Group`."""
  stacks = {}
  for g, group in enumerate(config.groups):
    starts = [
        group.first_layer + run * group.layers_per_run
        for run in range(group.runs)
    ]
    path = ("runs", str(g))
    stacks[*path, "full_layer"] = tuple(
        (start, (run,)) for run, start in enumerate(starts)
    )
    offsets = group.sharer_offsets
    for s, (_, count) in enumerate(group.sharers):
      stacks[*path, "sharers", str(s)] = tuple(
          (start + offsets[s] + i, (run, i))
          for run, start in enumerate(starts)
          for i in range(count)
      )
  return Family(
      stacks=stacks,
      per_expert=True,
      mtp=f"model.layers.{config.num_hidden_layers}.",
  )


_FAMILIES: Mapping[type[DecoderConfig], Callable[[Any], Family]] = {
    Qwen3_5Config: _qwen3_5,
    GlmMoeDsaConfig: _glm_moe_dsa,
}

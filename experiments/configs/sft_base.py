"""Every setting of supervised training; those it shares with GRPO by name.

What it does not have (sampling, objective, rollouts, ...) is refused, not
ignored.
"""

from typing import Any

import ml_collections

from experiments.configs import base

_SECTIONS = (
    "model", "lora", "optimizer", "capture", "checkpoint", "mesh", "state",
    "memory", "distributed",
)  # fmt: skip
_OF_DATA = ("prompt_tokens", "max_prompt_tokens")
_OF_TRAIN = (
    "steps", "prompts_per_step", "cotangent_dtype", "capture_chunk_tokens",
    "head_chunk_tokens",
)  # fmt: skip


def get_config() -> ml_collections.ConfigDict:
  """Returns the settings; a prompt is here a whole sequence."""
  shared: Any = base.get_config()
  config: Any = ml_collections.ConfigDict()
  config.seed = shared.seed
  for name in _SECTIONS:
    config[name] = shared[name]
  config.data = ml_collections.ConfigDict()
  config.data.sequences = ""  # a JSONL file, instead of windows of text
  for name in _OF_DATA:
    config.data[name] = shared.data[name]
  config.train = ml_collections.ConfigDict()
  for name in _OF_TRAIN:
    config.train[name] = shared.train[name]
  # Of GLM: train the indexers alone, to score as their attention weighs.
  config.train.indexers = False
  return config.lock()

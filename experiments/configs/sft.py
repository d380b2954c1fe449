"""Supervised training on 1,024-byte windows of text, a 0.2M-parameter model.

    python -m experiments.train_sft --config=experiments/configs/sft.py

One to two minutes on 2 CPU cores, most of it compilation; the loss goes from
4.81 nats per byte (first five updates) to 2.90 (last five).
"""

from typing import Any

import ml_collections

from experiments.configs import sft_base


def get_config() -> ml_collections.ConfigDict:
  """Returns the settings."""
  config: Any = sft_base.get_config()
  config.model.preset = "tiny"
  config.data.prompt_tokens = 1024
  config.optimizer.learning_rate = 1e-2
  config.train.steps = 60
  config.train.capture_chunk_tokens = 256
  config.checkpoint.every_steps = 10
  return config

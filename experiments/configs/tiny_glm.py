"""Online GRPO on 1,024-byte prompts with a random tiny GLM.

    python -m experiments.train_grpo --config=experiments/configs/tiny_glm.py

About four minutes on 2 CPU cores, half of it compilation; the mean reward goes
from 0.089 (first five updates) to 0.268 (last five) with seed 0.
"""

from typing import Any

import ml_collections

from experiments.configs import tiny


def get_config() -> ml_collections.ConfigDict:
  """Returns the settings: those of tiny.py, of a shorter prompt."""
  config: Any = tiny.get_config()
  config.model.preset = "tiny-glm"
  config.data.prompt_tokens = 1024
  config.train.capture_chunk_tokens = 256
  return config

"""From the settings of supervised training to the library's own types."""

import dataclasses
from typing import Any

from experiments.configs import sft_base
from experiments.run_settings import RunSettings, read_run_settings
from lstraw_jax.capture import TapeConfig
from lstraw_jax.sft_step import SftConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftSettings(RunSettings):
  """The library's settings, checked before anything is allocated."""

  update: SftConfig


def read_sft_settings(config: Any) -> SftSettings:
  """Checks a config and returns the library's settings.

  Raises:
    ValueError: for the first value that is wrong, by name.
  """
  run = read_run_settings(
      config, known=sft_base.get_config(), chunks=("capture_chunk_tokens",)
  )
  return SftSettings(
      model=run.model,
      mesh=run.mesh,
      optimizer=run.optimizer,
      update=SftConfig(
          tape=TapeConfig(**config.capture),
          cotangent_dtype=config.train.cotangent_dtype,
          capture_chunk_tokens=config.train.capture_chunk_tokens,
          head_chunk_tokens=config.train.head_chunk_tokens,
          memory_kind=config.state.memory_kind,
      ),
  )


def describe(config: Any) -> str:
  """Returns what a run does, in a line."""
  source = config.data.sequences or f"{config.data.prompt_tokens}-token windows"
  model = config.model.checkpoint or config.model.preset
  if config.train.indexers:
    model = f"indexers of {model}"
  return (
      f"{model}, {source}, {config.train.prompts_per_step} an update, seed"
      f" {config.seed}"
  )

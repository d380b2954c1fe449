"""From the settings of a GRPO run to the library's own types."""

import dataclasses
from typing import Any

from experiments.configs import base
from experiments.run_settings import RunSettings, read_run_settings
from lstraw_jax.capture import TapeConfig
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.sampling import SamplingConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
  """The library's settings, checked before anything is allocated."""

  sampling: SamplingConfig
  update: UpdateConfig


def read_settings(config: Any) -> Settings:
  """Checks a config and returns the library's settings.

  Raises:
    ValueError: for the first value that is wrong, by name.
  """
  run = read_run_settings(
      config,
      known=base.get_config(),
      chunks=("capture_chunk_tokens", "replay_block_tokens"),
  )
  if config.train.group_size < 2:
    raise ValueError(
        f"train.group_size={config.train.group_size}: want at least 2; alone, a"
        " response has advantage 0"
    )
  vocab_size = run.model.vocab_size
  stops = tuple(config.sampling.stop_tokens)
  if not all(0 <= token < vocab_size for token in stops):
    raise ValueError(
        f"sampling.stop_tokens={stops}: want ids in 0..{vocab_size - 1}, the"
        " model's vocabulary"
    )
  record = tuple(config.sampling.record)
  if record and not isinstance(run.model, GlmMoeDsaConfig):
    raise ValueError(
        f"sampling.record={record}: want (), since only GLM-5 makes choices"
        " that can be recorded"
    )
  given = {**config.sampling, "stop_tokens": stops, "record": record}
  sampling = SamplingConfig(**given)
  sampling.check_trainable()
  return Settings(
      model=run.model,
      mesh=run.mesh,
      optimizer=run.optimizer,
      sampling=sampling,
      update=UpdateConfig(
          prompt_gradient=config.train.prompt_gradient,
          tape=TapeConfig(**config.capture),
          cotangent_dtype=config.train.cotangent_dtype,
          replay=ReplayConfig(
              objective=ObjectiveConfig(**config.objective),
              temperature=sampling.temperature,
              block_tokens=config.train.replay_block_tokens,
              head_chunk_tokens=config.train.head_chunk_tokens,
          ),
          capture_chunk_tokens=config.train.capture_chunk_tokens,
          response_multiple=config.train.response_multiple,
          normalize_std=config.train.normalize_std,
          old_log_probs=config.train.old_log_probs,
          memory_kind=config.state.memory_kind,
          refresh=RefreshConfig(**config.refresh),
      ),
  )


def describe(config: Any) -> str:
  """Returns what a run does, in a line."""
  source = config.data.rollouts or f"{config.data.prompt_tokens}-token prompts"
  model = config.model.checkpoint or config.model.preset
  return (
      f"{model}, {source}, {config.train.group_size} responses,"
      f" {config.train.prompt_gradient} prompt gradient, seed {config.seed}"
  )

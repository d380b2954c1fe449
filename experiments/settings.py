"""From the settings of a config file to the library's own types."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from experiments.placement import read_mesh
from lstraw_jax.capture import TapeConfig
from lstraw_jax.distributed import say
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.policy import Policy, make_policy
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.sampling import SamplingConfig
from lstraw_jax.train_step import UpdateConfig
from modeling.checkpoints import load_config, load_model
from modeling.presets import preset
from modeling.qwen3_5 import Qwen3_5
from modeling.qwen3_5_config import LoraConfig, Qwen3_5Config
from modeling.sharding import shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The library's settings, checked before anything is allocated."""

  model: Qwen3_5Config
  mesh: Mesh
  sampling: SamplingConfig
  update: UpdateConfig
  optimizer: OptimizerConfig


def read_settings(config: Any) -> Settings:
  """Checks a config and returns the library's settings.

  Raises:
    ValueError: for the first value that is wrong, by name.
  """
  for name in ("steps", "prompts_per_step"):
    if config.train[name] < 1:
      raise ValueError(f"train.{name}={config.train[name]}: want at least 1")
  if config.train.group_size < 2:
    raise ValueError(
        f"train.group_size={config.train.group_size}: want at least 2; alone, a"
        " response has advantage 0"
    )
  model = _model_config(config)
  stops = tuple(config.sampling.stop_tokens)
  if not all(0 <= token < model.vocab_size for token in stops):
    raise ValueError(
        f"sampling.stop_tokens={stops}: want ids in 0..{model.vocab_size - 1},"
        " the model's vocabulary"
    )
  sampling = SamplingConfig(**{**config.sampling, "stop_tokens": stops})
  sampling.check_trainable()
  mesh = read_mesh(config, model)
  return Settings(
      model=model,
      mesh=mesh,
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
      ),
      optimizer=OptimizerConfig(**config.optimizer),
  )


def load_policy(config: Any, settings: Settings) -> Policy:
  """Loads the checkpoint, or draws the preset's weights from the seed.

  No device ever holds more than its part of the weights.
  """
  if config.model.checkpoint:
    loaded, report = load_model(
        config.model.checkpoint, config=settings.model, mesh=settings.mesh
    )
    say(
        f"loaded {report.loaded} tensors of {config.model.checkpoint}; skipped"
        f" {len(report.vision)} of vision and {len(report.mtp)} of multi-token"
        f" prediction; drew {len(report.fresh)} adapter weights"
    )
    return make_policy(loaded)
  draw = lambda: Qwen3_5(
      settings.model, rngs=nnx.Rngs(config.seed), mesh=settings.mesh
  )
  layout = shardings(jax.eval_shape(draw), settings.mesh)
  return make_policy(jax.jit(draw, out_shardings=layout)())


def describe(config: Any) -> str:
  """Returns what a run does, in a line."""
  source = config.data.rollouts or f"{config.data.prompt_tokens}-token prompts"
  model = config.model.checkpoint or config.model.preset
  return (
      f"{model}, {source}, {config.train.group_size} responses,"
      f" {config.train.prompt_gradient} prompt gradient, seed {config.seed}"
  )


def _model_config(config) -> Qwen3_5Config:
  changes = {
      name: config.model[name]
      for name in ("dtype", "param_dtype", "initializer_range")
      if config.model[name] is not None
  }
  if config.lora.rank:
    changes["lora"] = LoraConfig(
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        targets=tuple(config.lora.targets),
    )
  if config.model.checkpoint:
    model = load_config(config.model.checkpoint, **changes)
  else:
    model = preset(config.model.preset).replace(**changes)
  if model.lora is None and model.param_dtype == "bfloat16":
    raise ValueError(
        "model.param_dtype='bfloat16': full training in bfloat16 weights would"
        " lose small updates. Set model.param_dtype=float32 (activations stay"
        " in model.dtype), or train adapters with lora.rank"
    )
  return model

"""The settings that every kind of training has: model, mesh and optimizer."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_collections
from flax import nnx
from jax.sharding import Mesh

from experiments.placement import read_mesh
from lstraw_jax.distributed import say
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.policy import Policy, make_policy
from modeling.checkpoints import load_config, load_model
from modeling.decoder_config import DecoderConfig, LoraConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.models import make_model
from modeling.presets import preset
from modeling.sharding import shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
  """What a run trains, where and how fast."""

  model: DecoderConfig
  mesh: Mesh
  optimizer: OptimizerConfig


def read_run_settings(
    config: Any, *, known: Any, chunks: Sequence[str]
) -> RunSettings:
  """Checks what all kinds of training share.

  Args:
    config: the settings.
    known: every setting that the program has; no other may be there.
    chunks: settings of `train` that count tokens which `mesh.context` shares.

  Raises:
    ValueError: for the first value that is wrong, by name.
  """
  _check_names(config, known)
  for name in ("steps", "prompts_per_step"):
    if config.train[name] < 1:
      raise ValueError(f"train.{name}={config.train[name]}: want at least 1")
  model = _model_config(config)
  return RunSettings(
      model=model,
      mesh=read_mesh(config, model, chunks=chunks),
      optimizer=OptimizerConfig(**config.optimizer),
  )


def load_policy(config: Any, settings: RunSettings) -> Policy:
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
  draw = lambda: make_model(
      settings.model, rngs=nnx.Rngs(config.seed), mesh=settings.mesh
  )
  layout = shardings(jax.eval_shape(draw), settings.mesh)
  return make_policy(jax.jit(draw, out_shardings=layout)())


def _check_names(config, known) -> None:
  """Refuses a config of another program: none of it may go unread."""
  got, want = set(_names(config)), set(_names(known))
  for names, what in (
      (got - want, "which this program does not have"),
      (want - got, "which it lacks"),
  ):
    if names:
      raise ValueError(
          f"config: got another program's settings, with {min(names)}, {what}"
      )


def _names(config: ml_collections.ConfigDict, prefix="") -> Iterator[str]:
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from _names(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def _model_config(config) -> DecoderConfig:
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
  model = _with_own_settings(model, config)
  if model.trained is nnx.Param and model.param_dtype == "bfloat16":
    raise ValueError(
        "model.param_dtype='bfloat16': full training in bfloat16 weights would"
        " lose small updates. Set model.param_dtype=float32 (activations stay"
        " in model.dtype), or train adapters with lora.rank"
    )
  return model


def _with_own_settings(model, config):
  """Returns the model with settings that only GLM-5 has."""
  if config.model.latent_norm_eps is not None:
    _check_is_glm(
        model,
        f"model.latent_norm_eps={config.model.latent_norm_eps}",
        "norms of latents",
    )
    model = model.replace(latent_norm_eps=config.model.latent_norm_eps)
  if config.train.get("indexers", False):  # of supervised training
    _check_is_glm(model, "train.indexers=True", "indexers")
    model = model.replace(train_indexers=True)
  return model


def _check_is_glm(model, setting, what):
  if not isinstance(model, GlmMoeDsaConfig):
    raise ValueError(f"{setting}: leave it out, since only GLM-5 has {what}")

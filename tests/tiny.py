"""Tiny policies, prompts and responses, at random, for tests of the update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lstraw_jax.capture import capture
from lstraw_jax.policy import Policy, make_policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.rollouts import (
    BranchBatch,
    Rollout,
    RolloutGroup,
    to_branch_batch,
)
from modeling.decoder_config import DecoderConfig, LoraConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.models import abstract_model
from modeling.presets import preset
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.sharding import make_mesh, shardings
from tests.random_model import random_model

ALL_ADAPTERS = LoraConfig(rank=2, alpha=4.0, targets=Qwen3_5Config.LINEAR_NAMES)


def config(name: str = "tiny", *, dtype: str = "float64", **changes):
  """Returns a preset with two blocks, or runs, of three layers."""
  layers = dict(num_hidden_layers=6, full_attention_interval=3)
  if isinstance(preset(name), GlmMoeDsaConfig):
    layers = dict(
        num_hidden_layers=6,
        indexer_types=("full", "shared", "shared") * 2,
        mlp_layer_types=("dense", "sparse", "sparse") * 2,
    )
  return preset(name).replace(
      **(layers | dict(dtype=dtype, param_dtype=dtype) | changes)
  )


@functools.cache
def policy(
    config: DecoderConfig, *, seed: int = 0, mesh: Mesh | None = None
) -> Policy:
  """Returns a policy whose arrays all tests share: none may consume them.

  The weights are the same on every mesh; by default it is one device.
  """
  graphdef = nnx.graphdef(abstract_model(config, mesh=mesh))
  weights = nnx.state(random_model(config, seed=seed))
  made = make_policy(nnx.merge(graphdef, weights))
  return jax.device_put(made, shardings(made, made.mesh))


def fresh(policy: Policy) -> Policy:
  """Returns a copy whose trained weights may be consumed."""
  return policy.replace(trainable=jax.tree.map(jnp.copy, policy.trainable))


def captured(policy: Policy, prompt_tokens: np.ndarray) -> PromptState:
  """Captures a prompt in chunks of 8, so that files share a program."""
  return capture(policy, [prompt_tokens], chunk_tokens=8)


def tokens(count: int, *, seed: int = 0, vocab_size: int = 256) -> np.ndarray:
  """Returns random token ids."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab_size, count).astype(np.int32)


def group(
    prompt_tokens: np.ndarray,
    lengths: tuple[int, ...],
    *,
    masked: float = 0.0,
    seed: int = 1,
) -> RolloutGroup:
  """Returns responses of given lengths; `masked` is the share left out."""
  rng = np.random.default_rng(seed)
  return RolloutGroup(
      group_id="a",
      prompt_tokens=prompt_tokens,
      rollouts=tuple(
          Rollout(
              tokens=tokens(length, seed=seed + 100 + index),
              reward=float(rng.normal()),
              log_probs=None,
              loss_mask=rng.random(length) >= masked,
          )
          for index, length in enumerate(lengths)
      ),
  )


def copied(tree):
  """Returns the arrays of a pytree as numpy arrays of their own."""
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def largest_difference(got, wanted) -> float:
  """Returns the largest error of any leaf, relative to its largest entry.

  Entries below 1e-4 count as that: a gradient of zero is all rounding.
  """
  got, wanted = jax.device_get((got, wanted))
  errors = jax.tree.map(
      lambda x, y: np.abs(x - y).max() / max(np.abs(y).max(), 1e-4),
      got,
      wanted,
  )
  return float(max(jax.tree.leaves(errors)))


def branches(
    *groups: RolloutGroup, multiple: int = 4, mesh: Mesh | None = None
) -> BranchBatch:
  """Pads groups; their advantages are their rewards."""
  return to_branch_batch(
      groups,
      advantages=[np.array([r.reward for r in g.rollouts]) for g in groups],
      multiple=multiple,
      old_log_probs_from_rollouts=False,
      mesh=make_mesh() if mesh is None else mesh,
  )

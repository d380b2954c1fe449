"""The README's example runs as it stands, on a checkpoint like a user's."""

# The example takes its names from this module.
# ruff: noqa: F401

import pathlib
import re

import jax
import numpy as np

from lstraw_jax.advantages import group_relative_advantages
from lstraw_jax.capture import capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.objectives import denominator
from lstraw_jax.optimizer import OptimizerConfig, make_optimizer
from lstraw_jax.policy import make_policy
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import RolloutGroup, to_branch_batch
from lstraw_jax.sampling import SamplingConfig, sample, to_rollouts
from lstraw_jax.scoring import score
from lstraw_jax.train_state import apply_gradients, make_train_state
from modeling.checkpoints import load_config, load_model, save_model
from modeling.decoder_config import LoraConfig
from modeling.presets import preset
from tests.random_model import random_model

NAMES = dict(globals())


def test_the_readme_example_takes_a_step(tmp_path):
  readme = pathlib.Path(__file__).parents[1] / "README.md"
  (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.S)
  assert example.count("\n") < 25
  save_model(random_model(preset("tiny"), seed=0), tmp_path / "model")
  scope = NAMES | {
      "DIR": tmp_path / "model",
      "tokens": np.arange(100, dtype=np.int32),
      "reward": lambda row: float(np.mean(row % 2)),
  }
  exec(compile(example, str(readme), "exec"), scope)
  before = scope["state"].policy.frozen, scope["policy"].frozen
  jax.tree.map(np.testing.assert_array_equal, *before)
  adapters = jax.tree.leaves(scope["policy"].trainable)
  assert len(adapters) > 10
  assert all(np.isfinite(leaf).all() for leaf in adapters)
  # B starts at zero: one step moves it.
  assert any(leaf.any() for leaf in adapters if leaf.shape[-2] == 8)
  np.testing.assert_allclose(
      scope["old"].log_probs, scope["replayed"].log_probs, atol=1e-5
  )

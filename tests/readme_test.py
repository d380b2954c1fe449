"""The README's example runs as it stands, on a checkpoint like a user's."""

import pathlib
import re

import jax
import numpy as np

from modeling.checkpoints import save_model
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

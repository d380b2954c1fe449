"""The curve of the rewards."""

import numpy as np
import pytest
from matplotlib import pyplot

from lstraw_jax import reward_plot
from lstraw_jax.reward_plot import plot_rewards
from tests.update_rows import row

PNG = b"\x89PNG"


def test_the_curve_is_drawn_without_pyplot(tmp_path):
  path = tmp_path / "rewards.png"
  plot_rewards(path, [row(step) for step in range(1, 30)], title="tiny")
  plot_rewards(path, [row(1)], title="a single update " * 20)
  assert path.read_bytes().startswith(PNG)
  assert pyplot.get_fignums() == []
  with pytest.raises(ValueError, match=r"rows=\[\]"):
    plot_rewards(path, [], title="tiny")


def test_the_mean_is_over_the_last_updates():
  values = np.array([1.0, 2.0, 3.0, 7.0])
  assert reward_plot._moving_mean(values, 2) == [1.0, 1.5, 2.5, 5.0]
  assert reward_plot._moving_mean(values, 9) == [1.0, 1.5, 2.0, 3.25]

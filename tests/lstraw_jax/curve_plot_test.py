"""The curve that says how a run goes."""

import numpy as np
import pytest
from matplotlib import pyplot

from lstraw_jax import curve_plot
from lstraw_jax.curve_plot import LOSS, REWARD, plot_curve
from tests.update_rows import row

PNG = b"\x89PNG"


def test_the_curve_is_drawn_without_pyplot(tmp_path):
  path = tmp_path / "rewards.png"
  plot_curve(path, REWARD, [row(step) for step in range(1, 30)], title="tiny")
  plot_curve(path, LOSS, [row(1)], title="a single update " * 20)
  assert path.read_bytes().startswith(PNG)
  assert pyplot.get_fignums() == []
  with pytest.raises(ValueError, match=r"rows=\[\]"):
    plot_curve(path, REWARD, [], title="tiny")


def test_the_mean_is_over_the_last_updates():
  values = np.array([1.0, 2.0, 3.0, 7.0])
  assert curve_plot._moving_mean(values, 2) == [1.0, 1.5, 2.5, 5.0]
  assert curve_plot._moving_mean(values, 9) == [1.0, 1.5, 2.0, 3.25]


def test_a_curve_is_of_one_field():
  rows = [row(1, loss=2.0), row(2, loss=1.5)]
  assert LOSS.of(rows) == [2.0, 1.5]
  assert REWARD.of(rows) == [0.8125, 0.8125]

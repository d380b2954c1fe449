"""The table and the picture of gradient reports."""

import io

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from rich.console import Console

from lstraw_jax.gradient_plot import plot_gradients
from lstraw_jax.gradient_report import FamilyReport
from lstraw_jax.gradient_table import gradient_table

ROWS = (
    FamilyReport("q", 1234, 0.5, 0.25, 2.0, 3.0, 0.001),
    FamilyReport("k", 10, None, None, None, 0.0, None),
    FamilyReport("all", 1244, -0.5, 1.5, 2.0, 3.0, 0.001),
)


def test_the_picture_has_a_bar_for_each_report_of_each_family(
    tmp_path, monkeypatch
):
  drawn = []
  bar = Axes.bar

  def spy(axes, at, heights, *args, **kwargs):
    drawn.append(list(heights))
    return bar(axes, at, heights, *args, **kwargs)

  monkeypatch.setattr(Axes, "bar", spy)
  path = tmp_path / "a.png"
  plot_gradients(path, {"8 tokens": ROWS, "9 tokens": ROWS}, title="tiny " * 50)
  assert drawn == [[0.5, 0.0, -0.5]] * 2 + [[0.25, 0.0, 1.5]] * 2
  assert path.read_bytes().startswith(b"\x89PNG")
  assert pyplot.get_fignums() == []


def test_reports_that_cannot_be_drawn_together_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"reports=\{\}: want at least one"):
    plot_gradients(tmp_path / "a.png", {}, title="")
  with pytest.raises(ValueError, match="want the same families"):
    plot_gradients(tmp_path / "a.png", {"a": ROWS, "b": ROWS[1:]}, title="")
  assert not any(tmp_path.iterdir())


def test_the_table_shows_every_number_in_80_columns():
  text = io.StringIO()
  Console(file=text, width=80).print(gradient_table(ROWS, title="8 tokens"))
  lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
  assert "8 tokens" in lines
  assert "q 1,234 0.5000 0.2500 2.0000 3.00e+00 1.0e-03" in lines
  assert "k 10 - - - 0.00e+00 -" in lines
  assert "all 1,244 -0.5000 1.5000 2.0000 3.00e+00 1.0e-03" in lines

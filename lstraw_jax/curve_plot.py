"""The curve that says how a run goes: of its rewards, or of its loss."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lstraw_jax.run_log import Row


class Curve(NamedTuple):
  """The number of an update that a run is watched by."""

  name: str
  field: str  # of a row
  label: str  # of the axis

  def of(self, rows: Sequence[Row]) -> list[float]:
    """Returns its values."""
    return [row[self.field] for row in rows]


REWARD = Curve("reward", "reward_mean", "mean reward of the responses")
LOSS = Curve("loss", "loss", "mean loss, nats per token")


def plot_curve(
    path: str | os.PathLike[str],
    curve: Curve,
    rows: Sequence[Row],
    *,
    title: str,
    window: int = 10,
) -> None:
  """Draws the value of each update and its mean over the last few.

  Args:
    path: of the PNG.
    curve: what to draw.
    rows: of `make_row`, at least one.
    title: facts about the run, as the model and the numbers of tokens.
    window: updates up to and with each one that its mean is over.

  Raises:
    ValueError: without a row.
  """
  if not rows:
    raise ValueError("rows=[]: want at least one")
  steps = np.array([row["step"] for row in rows])
  values = np.array(curve.of(rows), float)
  figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)  # and no pyplot, whose state is the whole process's
  axes = figure.add_subplot()
  axes.plot(steps, values, ".-", color="0.7", lw=0.8, ms=4, label="each update")
  axes.plot(
      steps,
      _moving_mean(values, window),
      color="C0",
      lw=2,
      label=f"mean of the last {window}",
  )
  axes.set(xlabel="update", ylabel=curve.label)
  axes.set_title(title, fontsize="medium", wrap=True)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False)
  figure.savefig(path, format="png")


def _moving_mean(values: np.ndarray, window: int) -> list[float]:
  """Returns the mean of each value and those before it, `window` at most."""
  ends = range(1, len(values) + 1)
  return [float(values[max(i - window, 0) : i].mean()) for i in ends]

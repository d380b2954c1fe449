"""The curve of the rewards of a run."""

import os
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lstraw_jax.run_log import Row


def plot_rewards(
    path: str | os.PathLike[str],
    rows: Sequence[Row],
    *,
    title: str,
    window: int = 10,
) -> None:
  """Draws the reward of each update and its mean over the last few.

  Args:
    path: of the PNG.
    rows: of `make_row`, at least one.
    title: facts about the run: model, tokens, responses per prompt.
    window: updates up to and with each one that its mean is over.

  Raises:
    ValueError: without a row.
  """
  if not rows:
    raise ValueError("rows=[]: want at least one")
  steps = np.array([row["step"] for row in rows])
  rewards = np.array([row["reward_mean"] for row in rows], float)
  figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)  # and no pyplot, whose state is the whole process's
  axes = figure.add_subplot()
  axes.plot(
      steps, rewards, ".-", color="0.7", lw=0.8, ms=4, label="each update"
  )
  axes.plot(
      steps,
      _moving_mean(rewards, window),
      color="C0",
      lw=2,
      label=f"mean of the last {window}",
  )
  axes.set(xlabel="update", ylabel="mean reward of the responses")
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

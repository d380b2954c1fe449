"""The picture of a measurement of staleness: drift and loss over the steps."""

import os
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Each curve is a field of a row, its line, and what the legend calls it.
_PANELS = {
    "mean |change of log-prob|, nats a token": (
        ("drift_nats", "o-", "true"),
        ("estimate_nats", "x--", "estimate"),
    ),
    "change of the loss, %": (("loss_percent", "o-", ""),),
}
_LINEAR_BELOW = 1e-3  # a drift or a change may be zero


def plot_staleness(
    path: str | os.PathLike[str],
    rows: Sequence[dict[str, Any]],
    *,
    title: str,
) -> None:
  """Draws true and estimated drift, and the change of the loss, by step.

  Args:
    path: of the PNG.
    rows: each with learning_rate, step, drift_nats, estimate_nats and
      loss_percent; at least one. Those at step 0 are zero and not drawn.
    title: facts about the run.

  Raises:
    ValueError: without a row.
  """
  rows = [row for row in rows if row["step"]]
  if not rows:
    raise ValueError("rows=[]: want at least one after step 0")
  figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)  # and no pyplot, whose state is the whole process's
  rates = list(dict.fromkeys(row["learning_rate"] for row in rows))
  panels = figure.subplots(1, len(_PANELS))
  for axes, (label, lines) in zip(panels, _PANELS.items(), strict=True):
    for index, rate in enumerate(rates):
      mine = [row for row in rows if row["learning_rate"] == rate]
      for field, line, name in lines:
        axes.plot(
            [row["step"] for row in mine],
            [row[field] for row in mine],
            line,
            color=f"C{index}",
            label=f"{name} {rate:g}".strip(),
        )
    axes.set(xlabel="optimizer steps behind one state", ylabel=label)
    axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", title="learning rate")
  figure.suptitle(title, fontsize="medium", wrap=True)
  figure.savefig(path, format="png")

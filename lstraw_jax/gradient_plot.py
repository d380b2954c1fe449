"""The picture of gradient reports: dropped against exact, family by family."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lstraw_jax.gradient_report import FamilyReport

_PANELS = {
    "cosine": "cosine of dropped\nand exact gradient",
    "relative_l2": "|dropped - exact|\n/ |exact|",
}
_INCHES = 0.12  # a bar


def plot_gradients(
    path: str | os.PathLike[str],
    reports: Mapping[str, Sequence[FamilyReport]],
    *,
    title: str,
) -> None:
  """Draws cosine and relative L2, a bar for each report in each family.

  Args:
    path: of the PNG.
    reports: rows by what the legend calls them, at least one; all of them of
      the same families.
    title: facts about the run.

  Raises:
    ValueError: without a report, or with families that differ.
  """
  if not reports:
    raise ValueError("reports={}: want at least one")
  families, *others = ([r.family for r in rows] for rows in reports.values())
  if any(other != families for other in others):
    raise ValueError(
        f"reports={list(reports)}: want the same families, so of one model"
    )
  bars = len(families) * (len(reports) + 1)
  figure = Figure(
      figsize=(max(_INCHES * bars + 1.5, 8), 6), dpi=150, layout="constrained"
  )
  FigureCanvasAgg(figure)  # and no pyplot, whose state is the whole process's
  panels = figure.subplots(len(_PANELS), 1, sharex=True)
  for axes, (field, label) in zip(panels, _PANELS.items(), strict=True):
    _draw(axes, reports, field)
    axes.set_ylabel(label)
  panels[-1].set_xticks(
      range(len(families)), families, rotation=45, ha="right", va="top"
  )
  panels[-1].set_xlim(-0.6, len(families) - 0.4)
  figure.suptitle(title, fontsize="medium", wrap=True)
  figure.legend(
      *panels[0].get_legend_handles_labels(),
      loc="outside lower center",
      ncols=4,
      frameon=False,
  )
  figure.savefig(path, format="png")


def _draw(
    axes: Axes, reports: Mapping[str, Sequence[FamilyReport]], field: str
) -> None:
  """Draws a field of all reports; "-" stands where it is not defined."""
  width = 0.8 / len(reports)
  for index, (label, rows) in enumerate(reports.items()):
    values = [getattr(row, field) for row in rows]
    at = np.arange(len(rows)) + (index - (len(reports) - 1) / 2) * width
    heights = [0.0 if value is None else value for value in values]
    axes.bar(at, heights, width, label=label, color=f"C{index % 10}")
    for x, value in zip(at, values, strict=True):
      if value is None:
        axes.text(x, 0, "-", ha="center", va="bottom", color="0.5")
  axes.axhline(0, color="0.3", lw=0.8)
  axes.grid(axis="y", alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)

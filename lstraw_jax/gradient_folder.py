"""The folder of gradient reports, whose files process 0 alone writes.

gradient_report.json  where the numbers came from, and the rows of each report
gradient_report.png   cosine and relative L2 of each

After each report both have all so far, so that a run that ends early is not
lost. Files of an earlier run are replaced.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lstraw_jax.distributed import is_primary
from lstraw_jax.gradient_plot import plot_gradients
from lstraw_jax.gradient_report import FamilyReport
from lstraw_jax.receipt import environment, write_json
from lstraw_jax.rollouts import RolloutGroup


class GradientFolder:
  """Writes the files of a run, or, in all processes but one, nothing."""

  def __init__(
      self, path: str | pathlib.Path, *, config: Mapping[str, Any], title: str
  ):
    """Begins without a report; the folder is made with the first.

    Args:
      path: of the folder.
      config: the resolved settings, as JSON can hold them.
      title: of the picture: facts about the run.
    """
    self.path = pathlib.Path(path)
    self._title = title
    self._source = {**environment(), "config": config, "seed": config["seed"]}
    self._reports: list[dict[str, Any]] = []
    self._rows: dict[str, Sequence[FamilyReport]] = {}

  def add(
      self,
      label: str,
      groups: Sequence[RolloutGroup],
      rows: Sequence[FamilyReport],
      *,
      seconds: Mapping[str, float],
  ) -> None:
    """Adds a report.

    Args:
      label: what the picture calls it; no other report has the same.
      groups: whose gradient it was.
      rows: of `gradient_report`.
      seconds: spent in each phase, by name.
    """
    assert label not in self._rows, f"two reports called {label!r}"
    self._rows[label] = rows
    self._reports.append(
        {
            "label": label,
            "group_ids": [g.group_id for g in groups],
            "prompt_tokens": [g.prompt_tokens.size for g in groups],
            "rewards": [[r.reward for r in g.rollouts] for g in groups],
            "seconds": seconds,
            "families": [row._asdict() for row in rows],
        }
    )
    if not is_primary():
      return
    self.path.mkdir(parents=True, exist_ok=True)
    write_json(
        self.path / "gradient_report.json",
        {**self._source, "reports": self._reports},
    )
    plot_gradients(
        self.path / "gradient_report.png", self._rows, title=self._title
    )

"""The folder of a run, whose files process 0 alone writes.

config.json    resolved settings
checkpoints/   see lstraw_jax/checkpoint.py; all processes write these
metrics.jsonl  a row per update
receipt.json   where the numbers came from
reward.png     the curve of the rewards; loss.png without any
model/         on request: the trained model, for transformers
"""

import json
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lstraw_jax.curve_plot import Curve, plot_curve
from lstraw_jax.distributed import is_primary
from lstraw_jax.receipt import write_receipt
from lstraw_jax.run_log import Row, append_row, truncate_after


class RunFolder:
  """Writes the files of a run, or, in all processes but one, nothing."""

  def __init__(self, path: str | pathlib.Path, *, config: Mapping[str, Any]):
    """Makes the folder.

    Args:
      path: of the folder, on a file system that all processes see.
      config: the resolved settings, as JSON can hold them.
    """
    self.path = pathlib.Path(path)
    self.rows: list[Row] = []  # in process 0 also those before a resumption
    self._config = config
    if is_primary():
      self.path.mkdir(parents=True, exist_ok=True)

  @property
  def checkpoints(self) -> pathlib.Path:
    """Where the checkpoints are."""
    return self.path / "checkpoints"

  @property
  def model(self) -> pathlib.Path:
    """Where the trained model is exported to."""
    return self.path / "model"

  def begin(self, *, step: int) -> None:
    """Writes the settings, and cuts the rows back to those until `step`."""
    if is_primary():
      text = json.dumps(self._config, indent=2) + "\n"
      (self.path / "config.json").write_text(text)
      self.rows = truncate_after(self.path / "metrics.jsonl", step)

  def add(self, row: Row) -> None:
    """Adds the row of an update."""
    self.rows.append(row)
    if is_primary():
      append_row(self.path / "metrics.jsonl", row)

  def finish(self, curve: Curve, *, prompt_gradient: str, title: str) -> None:
    """Sums up all updates of the run, those before a resumption included.

    Args:
      curve: what the run is watched by.
      prompt_gradient: "dropped" or "exact".
      title: facts about the run.
    """
    if not is_primary():
      return
    most = max(self.rows, key=lambda row: row["peak_bytes"])
    write_receipt(
        self.path / "receipt.json",
        config=self._config,
        seed=self._config["seed"],
        steps=self.rows[-1]["step"],
        prompt_gradient=prompt_gradient,
        staleness_steps=max(row.get("staleness_steps", 0) for row in self.rows),
        seconds=sum((Counter(row["seconds"]) for row in self.rows), Counter()),
        peak_bytes=most["peak_bytes"],
        peak_source=most["peak_source"],
        curve_field=curve.field,
        curve=curve.of(self.rows),
    )
    path = self.path / f"{curve.name}.png"
    plot_curve(path, curve, self.rows, title=title)

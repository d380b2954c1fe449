"""What a run tells while it trains: a table, and a live line below it.

`Report` prints a row after each update. On a terminal the line shows how far
the present update is; a pipe or a file gets the rows alone, without control
characters.
"""

import contextlib
import math
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lstraw_jax.run_log import Row
from lstraw_jax.tables import Table

_HEADER_EVERY = 20  # rows
_STAGES = {
    "capture": "capture chunk",
    "replay": "replay branch",
    "prompt gradient": "prompt chunk",
}


class Report(contextlib.AbstractContextManager):
  """The table and the live line; as a `capture.Progress` it moves the line.

  Progress may come from any thread. One object serves a whole run, so that
  programs which contain it are compiled once.
  """

  def __init__(
      self,
      table: Table,
      *,
      step: int,
      steps: int,
      console: Console | None = None,
      shown: bool = True,
      beat: Callable[[str], None] | None = None,
  ):
    """Begins a table.

    Args:
      table: its columns; on a terminal, those that fit.
      step: optimizer steps already taken.
      steps: optimizer steps of the whole run.
      console: where to; default: standard output.
      shown: False prints nothing: of several processes, one does.
      beat: told all that the line shows, shown or not; for a watchdog.
    """
    self._beat = beat
    self._step = step
    self._steps = steps
    self._rows = 0
    self._console = console or Console(quiet=not shown)
    # Nothing wraps a file's lines; a terminal's must not be longer than it is.
    width = self._console.width if self._console.is_terminal else math.inf
    self._columns = table.fitting(width)
    self._legend = table.legend
    self._line = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=self._console,
        transient=True,
        disable=not self._console.is_interactive,
    )
    self._task = self._line.add_task(self._description("start"), total=1)

  def __enter__(self) -> "Report":
    self._line.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._line.stop()

  def begin(self, phase: str) -> None:
    """Shows that a phase of an update begins, with nothing to count yet."""
    description = self._description(phase)
    self._tell(description)
    self._line.update(self._task, description=description, completed=0, total=1)

  def __call__(self, stage: str, done: int, total: int) -> None:
    """Shows that `done` of `total` parts of a stage are finished."""
    description = self._description(_STAGES.get(stage, stage))
    self._tell(f"{description} {done}/{total}")
    self._line.update(
        self._task, description=description, completed=done, total=total
    )

  def add(self, row: Row) -> None:
    """Prints the row of a finished update."""
    if self._rows == 0:
      for line in self._legend:
        self._print(line, style="dim")
    if self._rows % _HEADER_EVERY == 0:
      titles = [column.title.rjust(column.width) for column in self._columns]
      self._print(" ".join(titles), style="bold")
    cells = [column.cell(row).rjust(column.width) for column in self._columns]
    self._print(" ".join(cells))
    self._rows += 1
    self._step = row["step"]
    self._line.reset(self._task, description=self._description("start"))

  def _description(self, stage: str) -> str:
    now = min(self._step + 1, self._steps)
    return f"update {now}/{self._steps}: {stage}"

  def _tell(self, what: str) -> None:
    if self._beat is not None:
      self._beat(what)

  def _print(self, line: str, style: str = "") -> None:
    self._console.print(
        Text(line, style),  # as an argument of print it also styles the line
        no_wrap=True,
        overflow="crop" if self._console.is_terminal else "ignore",
        crop=False,
    )

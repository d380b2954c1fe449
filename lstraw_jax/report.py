"""What a run tells while it trains: a table, and a live line below it.

`Report` prints a row after each update. On a terminal the line shows how far
the present update is; a pipe or a file gets the rows alone, without control
characters.
"""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lstraw_jax.run_log import Row

_HEADER_EVERY = 20  # rows
_LEGEND = (
    "ratio, r.max: mean and maximum over tokens, policy / old policy",
    "kl to the reference, entr(opy), gap |replay - sampler|: nats per token",
    "ca(pture) re(spond) sc(ore) rp replay pg prompt gradient op(timizer):"
    " seconds",
)
_UNITS = ("", "k", "M", "G", "T", "P")
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
      *,
      step: int,
      steps: int,
      console: Console | None = None,
      shown: bool = True,
      beat: Callable[[str], None] | None = None,
  ):
    """Begins a table.

    Args:
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
    self._columns = _fitting(width)
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
      for line in _LEGEND:
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


class _Column(NamedTuple):
  title: str
  width: int
  cell: Callable[[Row], str]
  dropped: int = 0  # where room lacks, the highest goes first; 0 stays


def _number_column(title: str, width: int, field: str, dropped: int = 0):
  return _Column(title, width, lambda row: _number(row[field], width), dropped)


def _phase_column(title: str, phase: str, dropped: int):
  cell = lambda row: _duration(row["seconds"].get(phase))
  return _Column(title, 3, cell, dropped)


def _fitting(width: float) -> list[_Column]:
  """Returns the columns that fit side by side."""
  columns = list(_COLUMNS)
  while sum(column.width + 1 for column in columns) - 1 > width:
    least = max(columns, key=lambda column: column.dropped)
    if not least.dropped:
      break
    columns.remove(least)
  return columns


def _number(value: float | None, width: int) -> str:
  """Returns a number with as many digits as fit, two of them significant."""
  if value is None:
    return "-"
  if value == 0:
    return "0"
  for digits in range(width - 2, -1, -1):
    text = f"{value:.{digits}f}"
    if len(text) <= width and abs(value) >= 10.0 ** (1 - digits):
      return text
  texts = (f"{value:.{digits}e}" for digits in (1, 0))
  texts = (t.replace("e+", "e").replace("e0", "e") for t in texts)
  long, short = (t.replace("e-0", "e-") for t in texts)
  return long if len(long) <= width else short


def _scaled(value: float | None, base: int) -> str:
  """Returns a number in four characters: 7.5, 130, 1.5k, 130M."""
  if value is None:
    return "-"
  power = 0
  while value >= 999.5 and power < len(_UNITS) - 1:
    value, power = value / base, power + 1
  return f"{value:.{1 if value < 9.95 else 0}f}{_UNITS[power]}"


def _duration(seconds: float | None) -> str:
  """Returns seconds in three characters: 1.5, 130, 25m, 3h."""
  if seconds is None:
    return "-"
  if seconds < 999.5:
    return f"{seconds:.{1 if seconds < 9.95 else 0}f}"
  minutes = seconds / 60
  return f"{minutes:.0f}m" if minutes < 99.5 else f"{minutes / 60:.0f}h"


def _percent(share: float | None) -> str:
  if share is None:
    return "-"
  return f"{100 * share:.{1 if share < 0.0995 else 0}f}%"


_COLUMNS = (
    _Column("step", 5, lambda row: str(row["step"])),
    _number_column("loss", 7, "loss"),
    _number_column("reward", 6, "reward_mean"),
    _number_column("ratio", 5, "ratio_mean", 10),
    _number_column("r.max", 5, "ratio_max", 4),
    _Column("clip", 4, lambda row: _percent(row["clip_share"]), 5),
    _number_column("kl", 5, "kl_nats", 6),
    _number_column("entr", 5, "entropy_nats", 7),
    _number_column("grad", 5, "grad_norm", 3),
    _number_column("gap", 5, "sampler_gap_nats", 8),
    _Column("tok/s", 5, lambda row: _scaled(row["tokens_per_s"], 1000), 2),
    _phase_column("ca", "capture", 1),
    _phase_column("re", "respond", 1),
    _phase_column("sc", "score", 9),
    _phase_column("rp", "replay", 1),
    _phase_column("pg", "prompt", 9),
    _phase_column("op", "optimizer", 9),
    _Column("peak", 4, lambda row: _scaled(row["peak_bytes"], 1024), 2),
)

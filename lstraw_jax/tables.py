"""The tables that runs print: which columns, and how a number fits in one."""

from collections.abc import Callable
from typing import NamedTuple

from lstraw_jax.run_log import Row

_UNITS = ("", "k", "M", "G", "T", "P")


class Column(NamedTuple):
  """A column of a table."""

  title: str
  width: int
  cell: Callable[[Row], str]
  dropped: int = 0  # where room lacks, the highest goes first; 0 stays


class Table(NamedTuple):
  """The columns of a table, and the lines that explain them."""

  columns: tuple[Column, ...]
  legend: tuple[str, ...]

  def fitting(self, width: float) -> list[Column]:
    """Returns the columns that fit side by side."""
    columns = list(self.columns)
    while sum(column.width + 1 for column in columns) - 1 > width:
      least = max(columns, key=lambda column: column.dropped)
      if not least.dropped:
        break
      columns.remove(least)
    return columns


def _number_column(title: str, width: int, field: str, dropped: int = 0):
  return Column(title, width, lambda row: _number(row[field], width), dropped)


def _phase_column(title: str, phase: str, dropped: int):
  cell = lambda row: _duration(row["seconds"].get(phase))
  return Column(title, 3, cell, dropped)


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


_STEP = Column("step", 5, lambda row: str(row["step"]))
_LOSS = _number_column("loss", 7, "loss")
_SPEED = Column("tok/s", 5, lambda row: _scaled(row["tokens_per_s"], 1000), 2)
_PEAK = Column("peak", 4, lambda row: _scaled(row["peak_bytes"], 1024), 2)

GRPO = Table(
    columns=(
        _STEP,
        _LOSS,
        _number_column("reward", 6, "reward_mean"),
        _number_column("ratio", 5, "ratio_mean", 10),
        _number_column("r.max", 5, "ratio_max", 4),
        Column("clip", 4, lambda row: _percent(row["clip_share"]), 5),
        _number_column("kl", 5, "kl_nats", 6),
        _number_column("entr", 5, "entropy_nats", 7),
        _number_column("grad", 5, "grad_norm", 3),
        _number_column("gap", 5, "sampler_gap_nats", 8),
        Column("st", 2, lambda row: str(row["staleness_steps"]), 12),
        _number_column("drift", 5, "drift_nats", 11),
        _SPEED,
        _phase_column("ca", "capture", 1),
        _phase_column("re", "respond", 1),
        _phase_column("sc", "score", 9),
        _phase_column("rp", "replay", 1),
        _phase_column("pg", "prompt", 9),
        _phase_column("op", "optimizer", 9),
        _PEAK,
    ),
    legend=(
        "ratio, r.max: mean and maximum over tokens, policy / old policy;"
        " st(ale) steps",
        "kl to the reference, entr(opy), gap |replay - sampler|, drift: nats"
        " per token",
        "ca(pture) re(spond) sc(ore) rp replay pg prompt gradient op(timizer):"
        " seconds",
    ),
)
SFT = Table(
    columns=(
        _STEP,
        _LOSS,
        _number_column("grad", 5, "grad_norm"),
        _SPEED,
        _phase_column("ca", "capture", 1),
        _phase_column("pg", "prompt", 1),
        _phase_column("op", "optimizer", 9),
        Column("s", 4, lambda row: _duration(sum(row["seconds"].values()))),
        _PEAK,
    ),
    legend=(
        "loss: nats per token that carries it, before the update",
        "ca(pture) pg prompt gradient op(timizer), s in all: seconds",
    ),
)

"""Rows of `metrics.jsonl`: one JSON object an update, in full.

A resumed run first cuts the file back to where its checkpoint was.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from lstraw_jax.metrics import PeakMemory
from lstraw_jax.sft_step import SftMetrics
from lstraw_jax.update_metrics import UpdateMetrics

Row = dict[str, Any]


def make_row(
    metrics: UpdateMetrics | SftMetrics,
    *,
    step: int,
    tokens: int,
    seconds: Mapping[str, float],
    peak: PeakMemory,
) -> Row:
  """Returns all there is to tell about an update, as JSON can hold it.

  Args:
    metrics: of the update.
    step: optimizer steps taken, with this one.
    tokens: worked on in this update.
    seconds: spent in each phase of this update.
    peak: most memory held so far.

  Returns:
    `step`, the fields of `metrics` (the entries of a dict beside the others),
    `tokens_per_s` over all phases, `seconds`, `peak_bytes`, `peak_source`. A
    number that is not finite is None.
  """
  numbers: dict[str, float] = {"step": step}
  for name, value in metrics._asdict().items():
    numbers |= value if isinstance(value, dict) else {name: value}
  spent = sum(seconds.values())
  numbers["tokens_per_s"] = tokens / spent if spent else 0.0
  return {
      **{k: v if math.isfinite(v) else None for k, v in numbers.items()},
      "seconds": dict(seconds),
      "peak_bytes": peak.bytes,
      "peak_source": peak.source,
  }


def append_row(path: str | os.PathLike[str], row: Row) -> None:
  """Adds a row to `metrics.jsonl` and returns when it is on the disk."""
  with open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(row, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def truncate_after(path: str | os.PathLike[str], step: int) -> list[Row]:
  """Cuts off the rows of updates after `step` and returns those that stay.

  A last line that was not written to its end goes as well. A file that does not
  exist has no rows. Call this before the first `append_row` of a run.

  Raises:
    ValueError: for another line that is not a row.
  """
  path = pathlib.Path(path)
  lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
  rows, size = [], 0
  for number, line in enumerate(lines, 1):
    if not line.endswith(b"\n"):
      break
    try:
      row = json.loads(line)
      after = row["step"] > step
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(f"{path}:{number}: not a row: {line[:80]}") from error
    if after:
      break
    rows.append(row)
    size += len(line)
  if size < sum(map(len, lines)):
    os.truncate(path, size)
  return rows

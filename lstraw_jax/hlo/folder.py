"""The folder of a dump: a folder a stage, a page, and a summary.

STAGE/         see `hlo_dump`
index.html     all stages on a page
summary.json   what was compiled, and the numbers that a comparison needs
diff.html      what changed since another dump, if that was asked
profile/       traces of the stages, if they were run
"""

import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from lstraw_jax.capacity.stage_programs import STAGES
from lstraw_jax.hlo.page import page
from lstraw_jax.hlo.report import StageReport

_KIND = "lstraw_jax dump of compiled stages"
_COMPARED = ("compiled", "memory", "cost", "sent", "ops")


def check_folder(folder: pathlib.Path) -> None:
  """Raises ValueError if something is there that is no dump."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"out={str(folder)!r}: it is a file, want a folder")
  if folder.is_dir() and any(folder.iterdir()):
    _read(folder, flag="out", fix="choose a new or an empty folder")


def read_earlier(
    folder: pathlib.Path, *, out: pathlib.Path, stages: Sequence[str]
) -> dict[str, Any]:
  """Returns the summary of a dump to compare with.

  Args:
    folder: of it.
    out: where the new one will be.
    stages: that will be in the new one.

  Raises:
    ValueError: if there is no dump, or none with such a stage.
  """
  if folder.resolve() == out.resolve():
    raise ValueError(f"diff={str(folder)!r}: that is out, to be overwritten")
  fix = "give the out of an earlier run"
  summary = _read(folder, flag="diff", fix=fix)
  if not set(stages) & set(summary["stages"]):
    raise ValueError(
        f"diff={str(folder)!r}: it has {', '.join(summary['stages']) or 'none'}"
        f" of the stages; want one of {', '.join(stages)}"
    )
  return summary


def begin(folder: pathlib.Path) -> None:
  """Removes an earlier dump from a folder that was checked, and marks it."""
  for name in (*STAGES, "profile"):
    shutil.rmtree(folder / name, ignore_errors=True)
  for name in ("index.html", "diff.html"):
    (folder / name).unlink(missing_ok=True)
  folder.mkdir(parents=True, exist_ok=True)
  _write(folder, {"kind": _KIND, "stages": {}})


def complete(
    folder: pathlib.Path, stages: Sequence[str], **about: Any
) -> tuple[dict[str, StageReport], dict[str, Any]]:
  """Writes page and summary of stages that were dumped; returns what it read.

  Args:
    folder: of the dump.
    stages: whose folders are there.
    **about: for the summary, `title` and `target` among it.
  """
  reports = {stage: StageReport.read(folder / stage) for stage in stages}
  # The process that compiled may have another jax than this one.
  version = reports[stages[0]].compiled["jax"]
  facts = {"target": about["target"], "jax": version}
  (folder / "index.html").write_text(page(about["title"], facts, reports))
  summary = {
      "kind": _KIND,
      **about,
      "jax": version,
      "stages": {
          stage: {name: getattr(report, name) for name in _COMPARED}
          for stage, report in reports.items()
      },
  }
  _write(folder, summary)
  return reports, summary


def _write(folder: pathlib.Path, summary: Mapping[str, Any]) -> None:
  (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _read(folder: pathlib.Path, *, flag: str, fix: str) -> dict[str, Any]:
  try:
    summary = json.loads((folder / "summary.json").read_text())
  except (OSError, ValueError):
    summary = None
  if not isinstance(summary, dict) or summary.get("kind") != _KIND:
    raise ValueError(
        f"{flag}={str(folder)!r}: there is no dump, whose summary.json tells;"
        f" {fix}"
    )
  return summary

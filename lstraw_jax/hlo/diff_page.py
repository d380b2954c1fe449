"""What changed from one dump to another, for a terminal and as a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from lstraw_jax.hlo.diff import Change
from lstraw_jax.hlo.html import Column, document, heading, note, table

_UNCHANGED = "counts of operations that did not change are left out"


def diff_table(stages: Mapping[str, Sequence[Change]]) -> Table:
  """Returns the changes of each stage for a terminal."""
  shown = Table(box=box.SIMPLE, caption=_UNCHANGED, caption_justify="left")
  for name in ("stage", "what"):
    shown.add_column(name)
  for name in ("before", "after", "change"):
    shown.add_column(name, justify="right", no_wrap=True)
  for stage, changes in stages.items():
    shown.add_section()
    for row, found in enumerate(changes):
      shown.add_row("" if row else stage, *found.texts())
  return shown


def diff_page(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    stages: Mapping[str, Sequence[Change]],
) -> str:
  """Returns the changes as a page, under what the two summaries are of."""
  sides = [
      [name, summary["title"], summary["jax"]]
      for name, summary in (("before", before), ("after", after))
  ]
  columns = [
      Column(""),
      *(Column(name, "number") for name in ("before", "after", "change")),
  ]
  return document(
      "What changed",
      table([Column(""), Column("compiled"), Column("jax")], sides),
      note(_UNCHANGED),
      *(
          heading(stage, level=2) + table(columns, [x.texts() for x in changes])
          for stage, changes in stages.items()
      ),
  )

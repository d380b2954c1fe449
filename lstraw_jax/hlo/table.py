"""The stages of a dump in a table for a terminal."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from lstraw_jax.hlo.quantities import quantity
from lstraw_jax.hlo.report import StageReport

_KINDS = ("argument", "temp", "output")


def stage_table(reports: Mapping[str, StageReport]) -> Table:
  """Returns a row for each stage: what it takes, and what it sends most."""
  table = Table(
      box=box.SIMPLE,
      caption="bytes on a device; collective: times x bytes of its array",
      caption_justify="left",
  )
  table.add_column("stage", no_wrap=True)
  for name in ("seconds", *_KINDS):
    table.add_column(name, justify="right", no_wrap=True)
  table.add_column("largest collective")
  for stage, report in reports.items():
    table.add_row(
        stage,
        f"{report.compiled['seconds']:.1f}",
        *(quantity(report.memory[f"{kind}_bytes"], "B") for kind in _KINDS),
        _largest(report),
    )
  return table


def _largest(report: StageReport) -> str:
  if not report.collectives:
    return "none"
  found = report.collectives[0]
  size = quantity(found["bytes"], "B")
  return f"{found['times']} x {size} {found['kind']} over {found['axes']}"

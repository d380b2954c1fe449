"""A dump as one page: what each stage holds, computes, and sends."""

from collections.abc import Mapping

from lstraw_jax.hlo.html import (
    Column,
    document,
    heading,
    link,
    side_by_side,
    table,
)
from lstraw_jax.hlo.page_tables import (
    buffer_table,
    collective_tables,
    cost_table,
    memory_table,
    op_tables,
)
from lstraw_jax.hlo.quantities import quantity
from lstraw_jax.hlo.report import StageReport


def page(
    title: str,
    facts: Mapping[str, str],
    reports: Mapping[str, StageReport],
) -> str:
  """Returns the page.

  Args:
    title: what was compiled, in a line.
    facts: more of it, by name.
    reports: of the stages, in order.
  """
  about = table(
      [Column(""), Column("")], [[name, text] for name, text in facts.items()]
  )
  return document(
      title,
      about,
      _overview(reports),
      *(_section(stage, report) for stage, report in reports.items()),
  )


def _overview(reports: Mapping[str, StageReport]) -> str:
  kinds = ("argument", "temp", "output", "alias", "total")
  titles = ("compiled in s", *kinds, "matmul FLOP", "collective bytes")
  rows = [
      [
          stage,
          f"{report.compiled['seconds']:.1f}",
          *(quantity(report.memory[f"{kind}_bytes"], "B") for kind in kinds),
          quantity(report.cost["matmul_flops"]),
          quantity(sum(x["bytes"] for x in report.sent), "B"),
      ]
      for stage, report in reports.items()
  ]
  numbers = [Column(name, "number") for name in titles]
  links = " &middot; ".join(link(f"#{stage}", stage) for stage in reports)
  return f"<p>{links}</p>" + table([Column("stage"), *numbers], rows)


def _section(stage: str, report: StageReport) -> str:
  files = [f"{stage}/{name}.txt" for name in ("hlo", "stablehlo")]
  files += [f"{stage}/{name}.json" for name in vars(report)]
  links = " &middot; ".join(link(x, x.partition("/")[2]) for x in files)
  return "\n".join(
      [
          heading(stage, level=2, anchor=stage),
          f"<p>{links}</p>",
          side_by_side(memory_table(report.memory), cost_table(report.cost)),
          buffer_table(report.buffers),
          collective_tables(report),
          op_tables(report.ops),
      ]
  )

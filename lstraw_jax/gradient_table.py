"""The table of a gradient report, for a terminal or a file."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from lstraw_jax.gradient_report import ALL, FamilyReport

_TITLES = ("weights", "number", "cosine", "rel. L2", "norms", "|exact|", "bf16")
_CAPTION = (
    "dropped against exact: cosine, |dropped - exact| / |exact|, |dropped| /"
    " |exact|. bf16: |exact, bfloat16 sums - exact| / |exact|. -: the gradient"
    " is zero"
)


def gradient_table(rows: Sequence[FamilyReport], *, title: str) -> Table:
  """Returns a table with a line for each row, that of all weights set apart."""
  table = Table(
      title=title,
      caption=_CAPTION,
      box=box.SIMPLE,
      title_justify="left",
      caption_justify="left",
  )
  for name in _TITLES:
    table.add_column(
        name, justify="left" if name == _TITLES[0] else "right", no_wrap=True
    )
  for row in rows:
    if row.family == ALL:
      table.add_section()
    table.add_row(
        row.family,
        f"{row.parameters:,}",
        _number(row.cosine, ".4f"),
        _number(row.relative_l2, ".4f"),
        _number(row.norm_ratio, ".4f"),
        _number(row.exact_norm, ".2e"),
        _number(row.bfloat16_relative_l2, ".1e"),
    )
  return table


def _number(value: float | None, form: str) -> str:
  return "-" if value is None else format(value, form)

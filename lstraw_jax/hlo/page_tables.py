"""The tables of a stage on the page of a dump, each under its heading."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lstraw_jax.hlo.html import (
    Column,
    heading,
    note,
    side_by_side,
    table,
)
from lstraw_jax.hlo.quantities import quantity
from lstraw_jax.hlo.report import Fields, StageReport

_SHOWN = 20  # collectives
_SCOPE_LETTERS = 120
_CONTROL_FLOW = ("while", "body", "closed_call", "eval_jaxpr", "shard_map")
_LOOPS_ONCE = (
    "XLA's own analysis counts the body of a loop once, however often it runs."
)
_NO_ANALYSIS = "The compiler for this target gives no cost analysis of its own."
_MATMUL = (
    "Matrix products are counted from the program's text: each loop as often as"
    " it runs, each branch as taken, nothing but products."
)
_MEMORY = (
    "Bytes on one device, as XLA assigned them. Total: argument + output -"
    " alias + temp, where alias is output that lies in arguments."
)
_BUFFERS = (
    "Those of one allocation that overlap are never there together; 'at peak'"
    " is there when the program holds most. The line is the innermost one of"
    " ours, or that of the operand where XLA added the instruction; a backward"
    " pass written by hand carries the line where its forward is called."
)
_SENT = (
    "Bytes are of the whole array on one device: what an all-gather makes, what"
    " the others take. Times: in one call of the program, the product of the"
    " trip counts of the loops around it; '?' is a loop whose length the"
    " program does not tell, and bytes in it are in no sum; 'at most' is in a"
    " branch that may not be taken."
)


def memory_table(memory: Mapping[str, int]) -> str:
  """Shows memory of the device, and of the host where there is some."""
  rows = [
      [
          name.removesuffix("_bytes").replace("_", " "),
          f"{count:,}",
          quantity(count, "B"),
      ]
      for name, count in memory.items()
      if count or not name.startswith("host_")
  ]
  columns = [Column(""), Column("bytes", "number"), Column("", "number")]
  return heading("Memory", level=3) + note(_MEMORY) + table(columns, rows)


def cost_table(cost: Fields) -> str:
  """Shows the work of a call, and says how it was counted."""
  rows = [["matrix products", quantity(cost["matmul_flops"], "FLOP")]]
  if cost["matmul_flops_a_round"]:
    name = "in loops of unknown length, a round of each"
    rows.append([name, quantity(cost["matmul_flops_a_round"], "FLOP")])
  for name, value in (cost["xla"] or {}).items():
    unit = {"flops": "FLOP", "bytes accessed": "B"}.get(name, "")
    rows.append([f"XLA: {name}", quantity(value, unit)])
  return (
      heading("Cost of a call, on one device", level=3)
      + note(_MATMUL)
      + note(_LOOPS_ONCE if cost["xla"] else _NO_ANALYSIS)
      + table([Column(""), Column("", "number")], rows)
  )


def buffer_table(buffers: Sequence[Fields]) -> str:
  """Shows buffers, and the lines that made them."""
  rows = [
      [
          quantity(buffer["bytes"], "B"),
          buffer["kind"],
          "at peak" if buffer["at_peak"] else "",
          _sizes(buffer["shape"]),
          buffer["instruction"],
          buffer["source"],
          _short(buffer["scope"]),
      ]
      for buffer in buffers
  ]
  columns = [
      Column("size", "number"),
      Column("is"),
      Column(""),
      Column("shape"),
      Column("instruction"),
      Column("line"),
      Column("scope", "long"),
  ]
  title = f"The {len(buffers)} largest buffers"
  return heading(title, level=3) + note(_BUFFERS) + table(columns, rows)


def collective_tables(report: StageReport) -> str:
  """Shows what is sent: sums, and the largest operations."""
  title = heading("Between devices", level=3)
  if not report.sent:
    return title + note("Nothing is sent.")
  sums = table(
      [
          Column("operation"),
          Column("mesh axes"),
          Column("operations", "number"),
          Column("bytes in all", "number"),
          Column("of unknown times", "number"),
      ],
      [
          [
              x["kind"],
              x["axes"],
              str(x["operations"]),
              quantity(x["bytes"], "B"),
              str(x["unknown"] or ""),
          ]
          for x in report.sent
      ],
  )
  shown = report.collectives[:_SHOWN]
  largest = table(
      [
          Column("operation"),
          Column("mesh axes"),
          Column("bytes", "number"),
          Column("times", "number"),
          Column("in all", "number"),
          Column("instruction"),
          Column("line"),
          Column("scope", "long"),
      ],
      [_collective(x) for x in shown],
  )
  rest = len(report.collectives) - len(shown)
  more = note(f"{rest} smaller ones are in collectives.json.") if rest else ""
  return title + note(_SENT) + sums + largest + more


def op_tables(ops: Mapping[str, Mapping[str, int]]) -> str:
  """Shows counts of operations beside each other."""
  titles = {
      "operations": "operation",
      "fusions": "fusion by kind",
      "fused": "operation inside fusions",
  }
  tables = [
      table(
          [Column(title), Column("number", "number")],
          [[what, f"{count:,}"] for what, count in ops[name].items()],
      )
      for name, title in titles.items()
  ]
  return heading("Operations", level=3) + side_by_side(*tables)


def _collective(x: Fields) -> list[str]:
  total: Any = x["total_bytes"]
  return [
      x["kind"],
      x["axes"],
      quantity(x["bytes"], "B"),
      x["times"],
      "?" if total is None else quantity(total, "B"),
      x["instruction"],
      x["source"],
      _short(x["scope"]),
  ]


def _short(scope: str) -> str:
  """Leaves out of a scope the program's name, and mere control flow."""
  name, *inner = scope.split("/")
  parts = [name] if not name.startswith("jit(") else []
  parts += [part for part in inner if part not in _CONTROL_FLOW]
  text = "/".join(parts)
  if len(text) <= _SCOPE_LETTERS:
    return text
  return f"{text[: _SCOPE_LETTERS // 2]} ... {text[-_SCOPE_LETTERS // 2 :]}"


def _sizes(shape: str) -> str:
  """Leaves out of a shape how it lies in memory."""
  return re.sub(r"\{[^}]*\}", "", shape)

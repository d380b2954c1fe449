"""Pages of text and tables that need no other file to be read."""

import html
from collections.abc import Sequence
from typing import Literal, NamedTuple

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24;
       max-width: 96em; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.5em; } h3 { font-size: 1em; margin: 1.6em 0 0; }
h2 { font-size: 1.25em; margin-top: 2.2em; border-bottom: 1px solid #c8ced6; }
p { margin: .4em 0; max-width: 60em; } .note { color: #57606a; }
table { border-collapse: collapse; margin: .5em 0 1em; }
th, td { padding: .2em 1em .2em 0; vertical-align: top; text-align: left;
         border-bottom: 1px solid #eaeef2; white-space: nowrap; }
th { color: #57606a; font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.w { white-space: normal; overflow-wrap: anywhere; }
.side { display: flex; gap: 0 4em; flex-wrap: wrap; }
.side > div { max-width: 36em; }
"""


class Column(NamedTuple):
  """A column of a table."""

  title: str
  style: Literal["", "number", "long"] = ""  # to the right; may be broken


_MARKS = {"": "", "number": ' class="n"', "long": ' class="w"'}


def document(title: str, *parts: str) -> str:
  """Returns a page of parts that are HTML."""
  body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
      f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
      f"<body>\n{body}\n</body></html>\n"
  )


def heading(text: str, *, level: int, anchor: str = "") -> str:
  """Returns a heading, to which #anchor leads."""
  where = f' id="{html.escape(anchor)}"' if anchor else ""
  return f"<h{level}{where}>{html.escape(text)}</h{level}>"


def note(text: str) -> str:
  """Returns a paragraph that explains."""
  return f'<p class="note">{html.escape(text)}</p>'


def link(address: str, text: str) -> str:
  """Returns a link."""
  return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of texts."""
  marks = [_MARKS[column.style] for column in columns]
  head = "".join(
      f"<th{mark}>{html.escape(column.title)}</th>"
      for mark, column in zip(marks, columns, strict=True)
  )
  body = "\n".join(
      "<tr>"
      + "".join(
          f"<td{mark}>{html.escape(cell)}</td>"
          for mark, cell in zip(marks, row, strict=True)
      )
      + "</tr>"
      for row in rows
  )
  return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def side_by_side(*parts: str) -> str:
  """Returns parts beside each other where there is room."""
  inner = "\n".join(f"<div>{part}</div>" for part in parts)
  return f'<div class="side">{inner}</div>'

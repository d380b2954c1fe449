"""An optimised program, read from the text that XLA writes of it.

Only what a dump asks for is read: each instruction with its operands and
attributes, the computations it calls, and the stack frames it came from.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import cached_property


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One line of a computation."""

  name: str
  opcode: str
  shape: str  # as written: "f32[8,16]{1,0}", or a tuple of such
  arguments: str  # in parentheses: operands, a constant's value, ...
  attributes: str  # all that follows
  is_root: bool

  @property
  def operands(self) -> list[str]:
    """Names of the instructions whose values it takes."""
    return re.findall(r"%([\w.\-]+)", self.arguments)

  @property
  def scope(self) -> str:
    """The names of jax's scopes and primitives, or of an argument."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1].replace("\\'", "'") if found else ""

  @property
  def frame(self) -> int | None:
    """Number of the stack frame that it came from."""
    found = re.search(r"stack_frame_id=(\d+)", self.attributes)
    return int(found[1]) if found else None

  def called(self, *attributes: str) -> list[str]:
    """Returns the computations that stand in some attributes, in order."""
    names = "|".join(attributes)
    found = re.findall(
        rf"\b(?:{names})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes
    )
    return [
        name.strip().lstrip("%")
        for several, one in found
        for name in (several or one).split(",")
    ]


@dataclasses.dataclass(frozen=True)
class Frame:
  """A line of a Python file, and the frame that called it."""

  file: str
  line: int
  parent: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A module of HLO."""

  name: str
  computations: Mapping[str, tuple[Instruction, ...]]
  entry: str
  frames: Mapping[int, Frame]

  @cached_property
  def instructions(self) -> Mapping[str, Instruction]:
    """All instructions by name; no two have the same."""
    return {x.name: x for body in self.computations.values() for x in body}


def read_program(text: str) -> Program:
  """Reads what `compiled.as_text()` returns, or XLA dumps.

  Raises:
    ValueError: if it is no text of a program.
  """
  computations, entry, body = {}, "", None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      body = computations[header["name"]] = []
      entry = header["name"] if header["entry"] else entry
    elif line.startswith("}"):
      body = None
    elif body is not None and (found := _INSTRUCTION.match(line)):
      body.append(_instruction(found))
  if not entry:
    raise ValueError(f"got {text[:60]!r}..., want an HLO module with an ENTRY")
  return Program(
      name=program_name(text),
      computations={name: tuple(body) for name, body in computations.items()},
      entry=entry,
      frames=_frames(text),
  )


def program_name(text: str) -> str:
  """Returns the name of the program that a text begins with."""
  title = re.match(r"HloModule ([\w.\-]+)", text)
  if not title:
    raise ValueError(f"got {text[:60]!r}..., want the text of an HLO module")
  return title[1]


def array_bytes(shape: str) -> int:
  """Returns the bytes of an array, or of all arrays of a tuple, unpadded."""
  bits = [
      _bits(dtype) * math.prod(_integers(sizes))
      for dtype, sizes in _ARRAY.findall(shape)
  ]
  return sum(-(-x // 8) for x in bits)


def array_sizes(shape: str) -> list[int]:
  """Returns the sizes of the axes of an array, or of a tuple's first."""
  found = _ARRAY.search(shape)
  return _integers(found[2]) if found else []


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_TABLES = ("FileNames", "FileLocations", "StackFrames")


def _instruction(found: re.Match[str]) -> Instruction:
  rest = found["rest"]
  shape_end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
  opening = rest.index("(", shape_end)
  closing = _closing(rest, opening)
  return Instruction(
      name=found["name"],
      opcode=rest[shape_end:opening].strip(),
      shape=rest[:shape_end],
      arguments=rest[opening + 1 : closing],
      attributes=rest[closing + 1 :],
      is_root=found["root"] is not None,
  )


def _closing(text: str, opening: int) -> int:
  """Returns where the parenthesis that opens there is closed."""
  depth = 0
  for mark in _PARENTHESES.finditer(text, opening):
    depth += 1 if mark[0] == "(" else -1
    if depth == 0:
      return mark.start()
  raise ValueError(f"got {text[:60]!r}..., a parenthesis that is never closed")


_PARENTHESES = re.compile(r"[()]")


def _integers(text: str) -> list[int]:
  return [int(x) for x in re.findall(r"\d+", text)]


def _bits(dtype: str) -> int:
  """Returns the bits of an element: f8e4m3fn has 8; a token has none."""
  width = re.search(r"\d+", dtype)
  return int(width[0]) if width else {"pred": 8}.get(dtype, 0)


def _frames(text: str) -> dict[int, Frame]:
  files, locations, frames = (_table(text, name) for name in _TABLES)
  found, shift = {}, None
  for number, frame in frames.items():
    printed = int(frame.get("parent_frame_id", 0))
    # The first is an outermost one, without a parent, yet XLA (of jax 0.10 and
    # 0.11) prints 1 for it: all parents are then one too high.
    shift = printed if shift is None else shift
    assert printed - shift < int(number), "a caller is printed before"
    where = locations[frame["file_location_id"]]
    found[int(number)] = Frame(
        file=files[where["file_name_id"]][""].strip('"'),
        line=int(where["line"]),
        parent=printed - shift or None,
    )
  return found


def _table(text: str, name: str) -> dict[str, dict[str, str]]:
  """Returns the rows of a table at the top: fields, or "" for plain text."""
  section = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
  rows = {}
  for line in (section[1] if section else "").splitlines():
    number, _, row = line.partition(" ")
    fields = dict(re.findall(r"(\w+)=(\d+)", row))
    rows[number] = fields if row.startswith("{") else {"": row}
  return rows

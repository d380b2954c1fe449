"""The largest buffers of a compiled program, and the lines that made them.

XLA gives buffers that live at different times the same memory: those of one
allocation that overlap are never there together. Values at the same place are
one row.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """A place in memory."""

  bytes: int
  kind: str  # argument, output, temporary, constant
  shape: str
  instruction: str  # that made one of the values there; an argument is first
  opcode: str
  scope: str  # of an argument its name
  source: str  # file:line, of an argument of what writes over it
  at_peak: bool  # it is held when the program holds most
  values: int  # that are there, one after the other
  allocation: int
  offset: int


class _Value(NamedTuple):
  name: str  # of the instruction
  index: str  # in a tuple: {1,2}
  shape: str


def largest_buffers(
    program: Program,
    assignment: str,
    live_ranges: str,
    *,
    source: SourceLines,
    count: int,
) -> list[Buffer]:
  """Returns the largest buffers, the largest first.

  Args:
    program: as it was when its buffers were assigned.
    assignment: text of XLA's *buffer-assignment.txt.
    live_ranges: text of its *live-range.txt.
    source: of the same program.
    count: how many.
  """
  held = _held_at_peak(live_ranges)
  places = _places(assignment)
  largest = sorted(places, key=lambda place: -place[0].bytes)[:count]
  return [
      _described(program, place, values, held, source)
      for place, values in largest
  ]


class _Place(NamedTuple):
  bytes: int
  kind: str
  allocation: int
  offset: int


_ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(\{[\d,]*\})? @\d+>"
    r" \(size=(\d+),offset=(\d+)\): (.*)"
)
_HELD = re.compile(r"    ([\w.\-]+)(\{[\d,]*\}): \d+ bytes \(cumulative")


def _places(assignment: str) -> list[tuple[_Place, Sequence[_Value]]]:
  """Returns each place, and what lies there in turn."""
  places = {}
  number, kind = 0, ""
  for line in assignment.splitlines():
    if found := _ALLOCATION.match(line):
      number, kind = int(found[1]), _kind(found[3])
    elif found := _VALUE.match(line):
      name, index, size, offset, shape = found.groups()
      place = _Place(int(size), kind, number, int(offset))
      places.setdefault(place, []).append(_Value(name, index or "{}", shape))
  return list(places.items())


def _kind(text: str) -> str:
  """Returns what an allocation is for, from what stands behind its size."""
  if "parameter " in text:
    return "argument"
  if "constant" in text:
    return "constant"
  return "output" if "maybe-live-out" in text else "temporary"


def _held_at_peak(live_ranges: str) -> set[tuple[str, str]]:
  """Returns (instruction, index) of what is held at the program's peak."""
  _, _, peak = live_ranges.partition("(peak):\n")
  held = set()
  for line in peak.splitlines():
    if not (found := _HELD.match(line)):
      break
    held.add(found.groups())
  return held


def _described(
    program: Program,
    place: _Place,
    values: Sequence[_Value],
    held: set[tuple[str, str]],
    source: SourceLines,
) -> Buffer:
  at_peak = [value for value in values if value[:2] in held]
  # Of all that lies there, what is there at the peak tells most, and of that
  # what has a line.
  told = next(
      (value for value in [*at_peak, *values] if source(value.name)),
      (at_peak or values)[0],
  )
  line = source(told.name)
  if place.kind == "argument":  # the line is that which writes over it
    is_argument = lambda value: _opcode(program, value) == "parameter"
    told = next(filter(is_argument, values), told)
  instruction = program.instructions.get(told.name)
  return Buffer(
      bytes=place.bytes,
      kind=place.kind,
      shape=told.shape,
      instruction=told.name + told.index.replace("{}", ""),
      opcode=_opcode(program, told),
      scope=instruction.scope if instruction else "",
      source=line,
      at_peak=bool(at_peak),
      values=len(values),
      allocation=place.allocation,
      offset=place.offset,
  )


def _opcode(program: Program, value: _Value) -> str:
  instruction = program.instructions.get(value.name)
  return instruction.opcode if instruction else ""

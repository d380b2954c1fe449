"""How often each part of a compiled program runs in one call of it."""

import collections
import dataclasses
import re
from collections.abc import Mapping

from lstraw_jax.hlo.text import Instruction, Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """A number of times, as far as the program's text tells it."""

  known: int = 1  # product of the trip counts that are known
  unknown_loops: int = 0  # loops around it whose trip count is not
  at_most: bool = False  # it lies in a branch that may not be taken

  @property
  def exact(self) -> int | None:
    """The number, or None if it is not known; at most so often in a branch."""
    return None if self.unknown_loops else self.known

  def __str__(self) -> str:
    text = " x ".join([f"{self.known:,}", *["?"] * self.unknown_loops])
    return f"at most {text}" if self.at_most else text

  def inside(self, caller: Instruction) -> "Times":
    """Returns how often what an instruction calls runs, if it runs so often."""
    if caller.opcode == "conditional":
      return dataclasses.replace(self, at_most=True)
    if caller.opcode != "while":
      return self
    trips = _TRIPS.search(caller.attributes)
    if trips is None:
      return dataclasses.replace(self, unknown_loops=self.unknown_loops + 1)
    return dataclasses.replace(self, known=self.known * int(trips[1]))


def times(program: Program) -> Mapping[str, list[Times]]:
  """Returns of each computation how often it runs, once for each call of it.

  A loop's condition counts as often as its body. What is applied to elements,
  as by a reduction, is left out.
  """
  found = collections.defaultdict(list)

  def run(computation: str, often: Times):
    found[computation].append(often)
    for instruction in program.computations[computation]:
      called = instruction.called(*_CALLS)
      if instruction.opcode == "call":
        called += instruction.called("to_apply")
      for name in called:
        run(name, often.inside(instruction))

  run(program.entry, Times())
  return found


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLS = (
    "body",
    "branch_computations",
    "called_computations",
    "calls",
    "condition",
    "false_computation",
    "true_computation",
)

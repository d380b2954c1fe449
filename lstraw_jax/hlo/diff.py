"""What changed from one dump to another, stage by stage."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lstraw_jax.hlo.quantities import change, quantity

_Numbers = tuple[float | None, float | None]


class Change(NamedTuple):
  """A number of both dumps, before and after; None: the dump has none."""

  what: str
  both: _Numbers
  unit: str = ""

  def texts(self) -> list[str]:
    """Returns the cells of a row: what, before, after, change."""
    return [self.what, *map(self._text, self.both), change(*self.both)]

  def _text(self, value: float | None) -> str:
    if value is None:
      return "-"
    return quantity(value, self.unit) if self.unit else f"{value:,}"


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, list[Change]]:
  """Returns what to show of each stage that two summaries have.

  All numbers of memory, work and traffic that are not zero, and the counts of
  operations that differ.
  """
  found = {}
  for stage in after["stages"]:
    if stage in before["stages"]:
      sides = before["stages"][stage], after["stages"][stage]
      found[stage] = [
          *_memory(*(side["memory"] for side in sides)),
          *_cost(*(side["cost"] for side in sides)),
          *_sent(*(side["sent"] for side in sides)),
          *_ops(*(side["ops"] for side in sides)),
      ]
  return found


def _memory(before: dict[str, int], after: dict[str, int]) -> Iterator[Change]:
  for name in after:
    both = before.get(name), after[name]
    if any(both):
      what = name.removesuffix("_bytes").replace("_", " ")
      yield Change(what, both, "B")


def _cost(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
  ours = {
      "matmul_flops": "matrix products",
      "matmul_flops_a_round": "products in unknown loops, a round of each",
  }
  for name, what in ours.items():
    if any(both := (before[name], after[name])):
      yield Change(what, both, "FLOP")
  xla = before["xla"] or {}, after["xla"] or {}
  for name, unit in (("flops", "FLOP"), ("bytes accessed", "B")):
    if any(both := (xla[0].get(name), xla[1].get(name))):
      yield Change(f"XLA: {name}, loops once", both, unit)


def _sent(before: list[Any], after: list[Any]) -> Iterator[Change]:
  old, new = (
      {f"{x['kind']} over {x['axes']}": x for x in side}
      for side in (before, after)
  )
  none = {"bytes": None, "unknown": 0}
  for name in dict.fromkeys([*new, *old]):
    x, y = old.get(name, none), new.get(name, none)
    yield Change(name, (x["bytes"], y["bytes"]), "B")
    if any(unknown := (x["unknown"], y["unknown"])):
      yield Change(f"{name}: operations of unknown times", unknown)


def _ops(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
  for kind in after:
    old, new = before[kind], after[kind]
    yield Change(f"{kind} in all", (sum(old.values()), sum(new.values())))
    for name in sorted(old.keys() | new.keys()):
      if old.get(name) != new.get(name):
        yield Change(f"{kind}: {name}", (old.get(name), new.get(name)))

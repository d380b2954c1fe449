"""What a compiled program sends between devices: how much, where, how often."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lstraw_jax.hlo.replica_groups import (
    axes_along,
    permuted_axes,
    permuted_pairs,
    replica_groups,
)
from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import Instruction, Program, array_bytes
from lstraw_jax.hlo.times import Times, times

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """An operation that sends. An asynchronous one is its start alone."""

  kind: str
  axes: str  # of the mesh, see `axes_along`
  bytes: int  # of the whole array on a device: what goes in, or is gathered
  times: Times  # it runs in a call of the program
  instruction: str
  scope: str
  source: str  # file:line

  @property
  def total_bytes(self) -> int | None:
    """Bytes of all times, or None if their number is not known."""
    exact = self.times.exact
    return None if exact is None else exact * self.bytes

  def as_json(self) -> dict[str, Any]:
    """Returns the fields, those of `times` among them."""
    fields = dataclasses.asdict(self)
    return {
        **fields,
        **fields.pop("times"),
        "times": str(self.times),
        "total_bytes": self.total_bytes,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
  """All operations of a kind along the same axes."""

  kind: str
  axes: str
  operations: int
  bytes: int  # of all times, of those operations where it is known
  unknown: int  # operations where it is not


def collectives(
    program: Program, *, mesh_sizes: Mapping[str, int], source: SourceLines
) -> list[Collective]:
  """Returns the operations that send, those with most bytes first.

  Args:
    program: read from text.
    mesh_sizes: of the mesh that it was compiled for, by axis and in order.
    source: of the same program.
  """
  found = []
  for computation, runs in times(program).items():
    for instruction in program.computations[computation]:
      kind = instruction.opcode.removesuffix("-start")
      if kind not in _KINDS:
        continue
      axes, devices = _along(instruction, kind, mesh_sizes)
      if devices == 1:  # it sends nothing
        continue
      operands = [program.instructions[x] for x in instruction.operands]
      size = sum(array_bytes(x.shape) for x in operands)
      for often in runs:
        found.append(
            Collective(
                kind=kind,
                axes=axes,
                bytes=size * devices if kind == "all-gather" else size,
                times=often,
                instruction=instruction.name,
                scope=instruction.scope,
                source=source(instruction.name),
            )
        )
  # One in a loop of unknown length may be the largest: it stands in its place
  # for one round.
  return sorted(found, key=lambda x: -x.bytes * x.times.known)


def sent(found: Sequence[Collective]) -> list[Sent]:
  """Adds up operations by kind and axes, those with most bytes first."""
  groups = {}
  for x in found:
    groups.setdefault((x.kind, x.axes), []).append(x)
  totals = []
  for (kind, axes), members in groups.items():
    known = [x.total_bytes for x in members if x.total_bytes is not None]
    totals.append(
        Sent(
            kind=kind,
            axes=axes,
            operations=len(members),
            bytes=sum(known),
            unknown=len(members) - len(known),
        )
    )
  return sorted(totals, key=lambda x: -x.bytes)


def _along(
    instruction: Instruction, kind: str, mesh_sizes: Mapping[str, int]
) -> tuple[str, int]:
  """Returns the mesh axes that an operation runs over, and devices a group."""
  if kind == "collective-permute":
    pairs = permuted_pairs(instruction.attributes)
    return permuted_axes(pairs, mesh_sizes), 2
  devices = math.prod(mesh_sizes.values())
  groups = replica_groups(instruction.attributes, devices=devices)
  return axes_along(groups, mesh_sizes), max(map(len, groups))

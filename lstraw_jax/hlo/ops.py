"""What a compiled program is made of: its operations, counted."""

import collections
import dataclasses
import re

from lstraw_jax.hlo.text import Instruction, Program
from lstraw_jax.hlo.times import times


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCounts:
  """Operations as they stand in the text; one in a loop counts once."""

  operations: dict[str, int]  # by opcode, outside fusions
  fusions: dict[str, int]  # by kind, as kLoop, or kCustom __triton_gemm
  fused: dict[str, int]  # by opcode, inside fusions


def count_ops(program: Program) -> OpCounts:
  """Counts operations; those applied to elements, as in a reduction, do not."""
  reached = times(program)
  bodies = {
      name
      for computation in reached
      for x in program.computations[computation]
      if x.opcode == "fusion"
      for name in x.called("calls")
  }
  inside, outside = [], []
  for computation in reached:
    of = inside if computation in bodies else outside
    of += program.computations[computation]
  return OpCounts(
      operations=_counts(x.opcode for x in outside),
      fusions=_counts(_kind(x) for x in outside if x.opcode == "fusion"),
      fused=_counts(x.opcode for x in inside),
  )


def _kind(fusion: Instruction) -> str:
  kind = re.search(r"kind=(\w+)", fusion.attributes)
  backend = re.search(r'"kind":"(\w+)"', fusion.attributes)
  return " ".join(found[1] for found in (kind, backend) if found)


def _counts(names) -> dict[str, int]:
  return dict(collections.Counter(names).most_common())

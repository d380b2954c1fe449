"""Floating-point operations of a program's matrix products, loops counted.

XLA's own analysis, where a backend has one, counts the body of a loop once.
Products are nearly all that a model computes; nothing else is counted here.
"""

import itertools
import math
import re
from typing import NamedTuple

from lstraw_jax.hlo.text import Instruction, Program, array_sizes
from lstraw_jax.hlo.times import times


class MatmulFlops(NamedTuple):
  """Operations of one device; a multiplication and an addition are two."""

  known: int  # in one call, outside the loops below
  a_round: int  # in loops of unknown length, as if each took one round


def matmul_flops(program: Program) -> MatmulFlops:
  """Counts operations of products; all branches count as taken."""
  known = a_round = 0
  for computation, runs in times(program).items():
    for instruction in program.computations[computation]:
      flops = _flops(program, instruction)
      for often in runs:
        if often.exact is None:
          a_round += flops * often.known
        else:
          known += flops * often.known
  return MatmulFlops(known, a_round)


def _flops(program: Program, instruction: Instruction) -> int:
  result = math.prod(array_sizes(instruction.shape))
  return 2 * result * _contracted(program, instruction)


def _contracted(program: Program, instruction: Instruction) -> int:
  """Returns how many products a number of the result adds up; 0 if none."""
  text = instruction.attributes
  match instruction.opcode:
    case "dot":
      axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", text)
      return _of_axes(program, instruction, axes[1] if axes else "")
    case "custom-call" if axes := _CUBLAS.search(text):
      return _of_axes(program, instruction, axes[1])
    case "convolution":
      return _taps(program, instruction)
  return 0


_CUBLAS = re.compile(r'"lhs_contracting_dimensions":\[([\d",]*)\]')


def _of_axes(program: Program, instruction: Instruction, axes: str) -> int:
  """Returns the product of some axes of the first operand."""
  sizes = array_sizes(program.instructions[instruction.operands[0]].shape)
  return math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", axes))


def _taps(program: Program, instruction: Instruction) -> int:
  """Returns the same of a convolution, as which a TPU writes products.

  A batch axis of the product is one that the window covers in steps of its own
  size: a single tap.
  """
  text = instruction.attributes
  labels = re.search(r"dim_labels=\w+_(\w+)->", text)
  assert labels, "a convolution names its axes"
  kernel = array_sizes(program.instructions[instruction.operands[1]].shape)
  sizes, dilations = (_window(text, name) for name in ("size", "lhs_dilate"))
  taps = itertools.starmap(
      lambda size, dilation: -(-size // dilation),
      itertools.zip_longest(sizes, dilations, fillvalue=1),
  )
  return kernel[labels[1].index("i")] * math.prod(taps)


def _window(text: str, name: str) -> list[int]:
  found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx]+)", text)
  return [int(x) for x in found[1].split("x")] if found else []

"""What tests read off a compiled program."""

import math
import re
from typing import NamedTuple

import jax


def buffer_shapes(compiled: jax.stages.Compiled) -> set[tuple[int, ...]]:
  """Returns the shape of every array named in the optimised program."""
  shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
  return {tuple(map(int, shape.split(","))) for shape in shapes}


def buffers_with(compiled: jax.stages.Compiled, *sizes: int) -> list[tuple]:
  """Returns the shapes that have every one of `sizes` among their axes."""
  wanted = sorted(sizes)
  return [
      shape
      for shape in buffer_shapes(compiled)
      if all(shape.count(size) >= wanted.count(size) for size in wanted)
  ]


def temp_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes a program needs beside its inputs and outputs."""
  return compiled.memory_analysis().temp_size_in_bytes


class Collective(NamedTuple):
  """An operation of a compiled program that moves data between devices."""

  kind: str
  shapes: tuple[tuple[int, ...], ...]  # of its results, on one device
  bytes: int
  name: str  # where it comes from: scopes and operation


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
  """Returns the program's collectives, each once, as in its text."""
  found = []
  for result, kind, name in _COLLECTIVE.findall(compiled.as_text()):
    parts = _ARRAY.findall(result)
    shapes = tuple(
        tuple(int(size) for size in sizes.split(",") if size)
        for _, sizes in parts
    )
    widths = [_BYTES[dtype] for dtype, _ in parts]
    total = sum(
        width * math.prod(shape)
        for width, shape in zip(widths, shapes, strict=True)
    )
    found.append(Collective(kind, shapes, total, name))
  return found


_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(
    rf"= (.*?) ({_KINDS})(?:-start)?\(.*?op_name=\"(.*?)\""
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s32": 4, "u32": 4, "bf16": 2, "f32": 4, "f64": 8}

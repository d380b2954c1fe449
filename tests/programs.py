"""What tests read off a compiled program."""

import re

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

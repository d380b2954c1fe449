"""What tests read off a compiled program, and how they compile fast."""

import re
from collections.abc import Callable
from typing import Any

import jax

FAST_OPTIONS = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later releases do not know it
  FAST_OPTIONS["xla_cpu_use_fusion_emitters"] = False


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


def fast_jit(function: Callable, **settings: Any) -> Callable:
  """Compiles a function, jitted or not, up to four times faster.

  Only code generation is simpler: the buffers of the program are the same, to
  about 300 bytes of its temporaries. Settings are those of `jax.jit`, none are
  taken over from a function that is jitted already.
  """
  plain = getattr(function, "__wrapped__", function)
  return jax.jit(plain, compiler_options=FAST_OPTIONS, **settings)

"""The memory of an update by the compiler: its programs, compiled.

Nothing is run, and the machine need not be there.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from lstraw_jax.capacity.kept_bytes import KeptBytes, kept_bytes
from lstraw_jax.capacity.memory_plan import StageMemory
from lstraw_jax.capacity.stage_programs import StagePrograms, stages_of
from lstraw_jax.capacity.workload import Workload
from modeling.sharding import make_mesh


class ProgramMemory(NamedTuple):
  """What the compiler assigned to a program, bytes per device."""

  arguments: int
  outputs: int
  aliased: int  # outputs in the memory of arguments
  temporaries: int

  @property
  def total(self) -> int:
    """Device memory while the program runs."""
    return self.arguments + self.outputs - self.aliased + self.temporaries


def memory_of(compiled: jax.stages.Compiled) -> ProgramMemory:
  """Returns the memory of a program."""
  memory = compiled.memory_analysis()
  assert memory is not None, "every backend that JAX supports has one"
  return ProgramMemory(
      arguments=memory.argument_size_in_bytes,
      outputs=memory.output_size_in_bytes,
      aliased=memory.alias_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
  )


def compile_stages(
    workload: Workload, devices: Sequence[Any]
) -> Iterator[tuple[str, ProgramMemory, float]]:
  """Compiles each stage for some devices, which may be absent.

  Yields:
    Its name, its memory, and the seconds that it took.
  """
  mesh = make_mesh(
      data=workload.data,
      context=workload.context,
      tensor=workload.tensor,
      devices=devices,
  )
  programs = StagePrograms(workload, mesh)
  for stage in stages_of(workload):
    start = time.perf_counter()
    compiled = programs.lower(stage).compile()
    yield stage, memory_of(compiled), time.perf_counter() - start


def compilable(workload: Workload, platform: str) -> Workload:
  """Returns the workload as it can be compiled for absent devices.

  A TPU topology has host memory. One of CUDA lists no memories, and jax then
  drops memory kinds without a word; a CPU counts all memory as the device's.
  There, what lies in host memory is compiled as if it did not, and
  `with_compiled` takes its bytes off again.
  """
  if platform == "tpu":
    return workload
  here: Any = {"memory_kind": "device"}
  return dataclasses.replace(
      workload,
      update=dataclasses.replace(workload.update, **here),
      optimizer=dataclasses.replace(workload.optimizer, **here),
  )


def with_compiled(
    stage: str,
    planned: StageMemory,
    program: ProgramMemory,
    compiled: Workload,
) -> StageMemory:
  """Returns a stage's plan with the compiler's temporaries in place of ours.

  They include what arguments take beyond their bytes, as the padding of a TPU.
  A weight that a stage does not use is no argument, but it is there.

  Args:
    stage: its name.
    planned: by arithmetic.
    program: the memory of its program.
    compiled: what that was compiled for.
  """
  given = program.arguments - _given(stage, compiled, kept_bytes(compiled))
  made = program.total - program.arguments
  return planned._replace(temporaries=made + max(given, 0))


def _given(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """Bytes that a program is given, and that the plan counts by their kind."""
  if stage == "optimizer":
    return kept.trainable + kept.optimizer + kept.gradients
  given = kept.trainable + kept.frozen + kept.recurrent + kept.positions
  on_device = workload.slots_on_device
  given += kept.slots if on_device else 0
  if stage in ("replay", "prompt_gradient"):
    given += kept.gradients
    if workload.exact:
      given += kept.cotangent_recurrent
      given += kept.cotangent_slots if on_device else 0
  if stage == "prompt_gradient":
    given += kept.recurrent  # the boundary that enters
  return given

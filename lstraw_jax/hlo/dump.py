"""Compiles a stage, and writes what the compiler made of it into a folder.

stablehlo.txt     the stage as jax hands it to XLA, with source locations
hlo.txt           the optimised program, as it was when XLA assigned buffers
compiled.json     seconds, versions
memory.json       bytes on a device: XLA's numbers by kind, the same of host
                  memory; total_bytes is argument + output - alias + temp
cost.json         xla: XLA's cost analysis, null where a backend has none;
                  matmul_flops, matmul_flops_a_round: see `hlo_flops`
buffers.json      the largest buffers and the source lines that made them
collectives.json  operations between devices
sent.json         those added up by kind and mesh axes
ops.json          counts of operations
"""

import dataclasses
import glob
import pathlib
import tempfile
import time

import jax
import jaxlib

from lstraw_jax.hlo.buffers import largest_buffers
from lstraw_jax.hlo.collectives import collectives, sent
from lstraw_jax.hlo.flops import matmul_flops
from lstraw_jax.hlo.ops import count_ops
from lstraw_jax.hlo.report import Fields, StageReport
from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import program_name, read_program

_BUFFERS = 20
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def dump_stage(
    lowered: jax.stages.Lowered,
    folder: pathlib.Path,
    *,
    mesh_sizes: dict[str, int],
    root: pathlib.Path,
) -> jax.stages.Compiled:
  """Compiles a stage, writes its files, and returns the program.

  Args:
    lowered: the stage.
    folder: for its files; made if it is not there.
    mesh_sizes: of the mesh that it was lowered for, by axis and in order.
    root: of our sources.

  Raises:
    ValueError: if the compiler refuses it, or leaves no text of what it made.
  """
  folder.mkdir(parents=True, exist_ok=True)
  text = lowered.as_text(debug_info=True)
  (folder / "stablehlo.txt").write_text(text)
  with tempfile.TemporaryDirectory() as dumped:
    start = time.perf_counter()
    compiled = _compiled(lowered, folder.name, dumped)
    seconds = time.perf_counter() - start
    text, assignment, live_ranges = _dumped(pathlib.Path(dumped), compiled)
  (folder / "hlo.txt").write_text(text)
  program = read_program(text)
  source = SourceLines(program, root)
  between = collectives(program, mesh_sizes=mesh_sizes, source=source)
  buffers = largest_buffers(
      program, assignment, live_ranges, source=source, count=_BUFFERS
  )
  flops = matmul_flops(program)
  StageReport(
      compiled={
          "seconds": seconds,
          "jax": jax.__version__,
          "jaxlib": jaxlib.__version__,
      },
      memory=_memory(compiled),
      cost={
          "xla": _cost(compiled),
          "matmul_flops": flops.known,
          "matmul_flops_a_round": flops.a_round,
      },
      buffers=[dataclasses.asdict(buffer) for buffer in buffers],
      collectives=[collective.as_json() for collective in between],
      sent=[dataclasses.asdict(total) for total in sent(between)],
      ops=dataclasses.asdict(count_ops(program)),
  ).write(folder)
  return compiled


def _compiled(
    lowered: jax.stages.Lowered, stage: str, dumped: str
) -> jax.stages.Compiled:
  """Compiles a stage; XLA writes texts into the folder `dumped`."""
  # In XLA_FLAGS these would hold for every program of the process.
  options = {"xla_dump_to": dumped, "xla_dump_hlo_as_text": True}
  try:
    return lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{stage}: the compiler refuses it: {reason}") from error


def _dumped(folder: pathlib.Path, compiled: jax.stages.Compiled) -> list[str]:
  """Returns XLA's texts of a program, its buffers and their live ranges."""
  text = compiled.as_text()
  assert text is not None, "every backend that JAX supports has one"
  name = program_name(text)
  texts = []
  for ending in (".txt", "-buffer-assignment.txt", "-live-range.txt"):
    pattern = f"*.{glob.escape(name)}.*after_optimizations{ending}"
    found = sorted(folder.glob(pattern))
    if not found:
      there = ", ".join(sorted(x.name for x in folder.iterdir())[:5])
      raise ValueError(
          f"{name}: this compiler dumped no file {pattern}, which a dump needs;"
          f" it made: {there or 'nothing'}"
      )
    texts.append(found[-1].read_text())
  return texts


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
  stats = compiled.memory_analysis()
  found = {
      f"{where}{kind}_bytes": getattr(stats, f"{where}{kind}_size_in_bytes")
      for where in ("", "host_")
      for kind in _MEMORY
  }
  fresh = found["output_bytes"] - found["alias_bytes"]
  total = found["argument_bytes"] + fresh + found["temp_bytes"]
  return found | {"total_bytes": total}


def _cost(compiled: jax.stages.Compiled) -> Fields | None:
  """Returns the numbers of the whole program, without those of operands."""
  found = compiled.cost_analysis()
  if not found:
    return None
  return {name: found[name] for name in sorted(found) if "{" not in name}

"""Runs a compiled stage on the devices that are there, under the profiler."""

import pathlib

import jax

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.hlo.stage_arrays import stage_arrays


def profile_stage(
    stage: str,
    workload: Workload,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    folder: pathlib.Path,
) -> None:
  """Runs a stage twice, and traces the second run.

  Args:
    stage: one of `STAGES`.
    workload: its sizes.
    lowered: the stage.
    compiled: the same.
    folder: where the trace goes.
  """

  def arguments():  # of each run its own: a stage consumes some of them
    made = stage_arrays(stage, workload, lowered, compiled)
    return jax.block_until_ready(made)

  jax.block_until_ready(compiled(*arguments()))
  ready = arguments()
  with jax.profiler.trace(folder):
    jax.block_until_ready(compiled(*ready))

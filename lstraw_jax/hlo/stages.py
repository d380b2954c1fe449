"""Dumps stages of an update, one after the other."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.hlo.dump import dump_stage
from lstraw_jax.hlo.profile import profile_stage
from modeling.sharding import AXES, make_mesh


def dump_stages(
    workload: Workload,
    devices: Sequence[Any],
    stages: Sequence[str],
    folder: pathlib.Path,
    *,
    root: pathlib.Path,
    profile: bool,
) -> Iterator[str]:
  """Yields each stage when its files are there.

  Args:
    workload: the update.
    devices: to compile for; they may be absent.
    stages: of those that the update has.
    folder: of the dump; see `hlo_folder`.
    root: of our sources.
    profile: whether to run each stage, too, and keep a trace.
  """
  sizes = {axis: getattr(workload, axis) for axis in AXES}
  programs = StagePrograms(workload, make_mesh(**sizes, devices=devices))
  for stage in stages:
    lowered = programs.lower(stage)
    compiled = dump_stage(lowered, folder / stage, mesh_sizes=sizes, root=root)
    if profile:
      trace = folder / "profile" / stage
      profile_stage(stage, workload, lowered, compiled, trace)
    yield stage

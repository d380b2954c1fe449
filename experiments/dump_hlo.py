"""What the compiler makes of an update: memory, work, traffic, by stage.

    python -m experiments.dump_hlo --model=qwen3.6-27b --target=h20-3e:8 \
        --prompt_tokens=2097152 --response_tokens=8192 --trainable=lora:16 \
        --stage=all --out=runs/dump

Compiles the programs of training for a machine that need not be there, and
writes a page, index.html, beside the programs' texts and all numbers as JSON:
`lstraw_jax/hlo/folder.py` and `dump.py` list the files. `--diff` compares
with an earlier dump. `--target=local` is the devices of this machine, on which
`--profile` also runs each stage, on zeros, and keeps a trace.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
from absl import flags
from rich.console import Console

from experiments import command_line, plan_child
from experiments.plan_flags import describe, read_workload
from lstraw_jax.capacity.stage_programs import check_stage, stages_of
from lstraw_jax.capacity.targets import Machine, find_machine
from lstraw_jax.capacity.topology import absent_devices
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.hlo import folder as hlo_folder
from lstraw_jax.hlo.diff import compare
from lstraw_jax.hlo.diff_page import diff_page, diff_table
from lstraw_jax.hlo.stages import dump_stages
from lstraw_jax.hlo.table import stage_table

_STAGE = flags.DEFINE_string("stage", "all", "A stage of an update, or all.")
_TARGET = flags.DEFINE_string(
    "target",
    "h20-3e:8",
    "Devices, as NAME:COUNT, see lstraw_jax/capacity/targets.py; or local, or"
    " local:COUNT, for those of this machine.",
)
_OUT = flags.DEFINE_string("out", "runs/dump", "Folder of the dump.")
_DIFF = flags.DEFINE_string("diff", "", "Folder of a dump to compare with.")
_PROFILE = flags.DEFINE_bool(
    "profile", False, "Also run each stage, and trace it; on local devices."
)
_ROOT = pathlib.Path(__file__).parents[1]


def main(argv):
  del argv
  machine = find_target(_TARGET.value)
  workload = read_workload(devices=machine.devices)
  stages = [_STAGE.value]
  if _STAGE.value == "all":
    stages = list(stages_of(workload))
  for stage in stages:
    check_stage(stage, workload)
  out = pathlib.Path(_OUT.value)
  if plan_child.IN_CHILD.value:
    for stage in dumped(workload, machine, stages, out):
      plan_child.tell(stage=stage)
    return
  check_memory(workload, machine)
  if _PROFILE.value and machine.name != "local":
    raise ValueError(
        f"profile: target={machine} is not here to run on; want --target=local"
    )
  hlo_folder.check_folder(out)
  earlier = None
  if _DIFF.value:
    folder = pathlib.Path(_DIFF.value)
    earlier = hlo_folder.read_earlier(folder, out=out, stages=stages)
  title = describe(workload, machine)
  console = Console()
  console.print(title)
  hlo_folder.begin(out)
  with console.status("") as status:
    done = dumped(workload, machine, stages, out)
    for number, stage in enumerate(stages, start=1):
      status.update(f"{stage}, {number} of {len(stages)}: compiling")
      next(done)
    list(done)  # the child ends
  reports, summary = hlo_folder.complete(
      out,
      stages,
      title=title,
      target=str(machine),
      workload=dataclasses.asdict(workload),
  )
  console.print(stage_table(reports))
  if earlier:
    changes = compare(earlier, summary)
    (out / "diff.html").write_text(diff_page(earlier, summary, changes))
    console.print(diff_table(changes))
    console.print(f"{out}/diff.html has the comparison")
  console.print(f"{out}/index.html has the rest")


def find_target(text: str) -> Machine:
  """Returns a machine by its name; local has the devices that are here."""
  name, _, count = text.partition(":")
  if name != "local":
    try:
      return find_machine(text)
    except ValueError as error:
      raise ValueError(f"{error}; or local, the devices here") from error
  here = len(jax.devices())
  if ":" in text and not (count.isdecimal() and 1 <= int(count) <= here):
    raise ValueError(
        f"target={text!r}: want 1 to {here} devices, or just local"
    )
  return Machine(name, int(count or here))


def check_memory(workload: Workload, machine: Machine) -> None:
  """Refuses what would be compiled into another program."""
  absent = machine.name != "local" and machine.target.platform == "cuda"
  if absent and workload.update.memory_kind != "device":
    raise ValueError(
        f"state_memory={workload.update.memory_kind!r}: jax knows no host"
        f" memory of target={machine}, which is not here; want device, or local"
        " GPUs"
    )


def dumped(
    workload: Workload,
    machine: Machine,
    stages: Sequence[str],
    out: pathlib.Path,
) -> Iterator[str]:
  """Yields stages as they are dumped, here or by another process."""
  is_here = machine.name == "local"
  if not is_here and not plan_child.IN_CHILD.value:
    for told in plan_child.run_child("experiments.dump_hlo", machine):
      yield told["stage"]
    return
  if is_here:
    devices = jax.devices()[: machine.devices]
  else:
    devices = absent_devices(machine)
  yield from dump_stages(
      workload, devices, stages, out, root=_ROOT, profile=_PROFILE.value
  )


if __name__ == "__main__":
  command_line.run(main)

"""Does an update fit a machine, how far does it go, and what would help?

    python -m experiments.plan_capacity --model=qwen3.6-27b --target=h20-3e:8 \
        --prompt_tokens=2097152 --response_tokens=8192 --trainable=lora:16

Plans by arithmetic, in a second, without a device. `--compile` has XLA compile
the very programs of training for the machine, which need not be there, and
compares. Writes plan.json and plan.png.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import flags
from rich.console import Console

from experiments import command_line, plan_child
from experiments.plan_flags import describe, model_name, read_workload
from lstraw_jax.capacity import tables
from lstraw_jax.capacity.advice import advise, longest_prompt
from lstraw_jax.capacity.compiled_memory import (
    ProgramMemory,
    compilable,
    compile_stages,
    with_compiled,
)
from lstraw_jax.capacity.memory_plan import MemoryPlan, StageMemory, plan_memory
from lstraw_jax.capacity.plot import plot_plan
from lstraw_jax.capacity.targets import Machine, find_machine
from lstraw_jax.capacity.topology import absent_devices
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline import StageCost, estimate

_TARGET = flags.DEFINE_string(
    "target",
    "h20-3e:8",
    "Devices, as NAME:COUNT; see lstraw_jax/capacity/targets.py.",
)
_COMPILE = flags.DEFINE_bool("compile", False, "Compile the programs as well.")
_OUT = flags.DEFINE_string(
    "out", "runs/plan", "Folder of the JSON and the PNG."
)


def main(argv):
  del argv
  machine = find_machine(_TARGET.value)
  workload = read_workload(devices=machine.devices)
  if plan_child.IN_CHILD.value:
    compile_here(workload, machine)
    return
  if pathlib.Path(_OUT.value).is_file():
    raise ValueError(f"out={_OUT.value!r}: want a folder, but that is a file")
  console = Console()
  console.print(describe(workload, machine))
  plan, costs = plan_memory(workload), estimate(workload, machine.target)
  compiled = compile_apart(workload, plan, machine, console)
  console.print(tables.memory_table(plan, compiled))
  if apart := tables.disagreement(plan, compiled):
    console.print(apart)
  if plan.host:
    on_host = plan.host * min(machine.devices, machine.target.devices_per_host)
    console.print(
        f"in host memory: {plan.host / 1e9:,.2f} GB for each device,"
        f" {on_host / 1e9:,.2f} GB a host"
    )
  console.print(tables.cost_table(costs, machine.target))
  limit = machine.target.memory_bytes
  console.print(tables.verdict(plan, machine))
  longest = None
  if limit is not None:
    longest = longest_prompt(workload, limit)
    if_room = ", if the host has room" if plan.host else ""
    console.print(f"longest prompt that fits: {longest:,} tokens{if_room}")
    if plan.peak > limit:
      advice = advise(workload, limit)
      console.print(tables.advice_table(advice, limit))
  save(workload, machine, plan, compiled, costs, longest)
  console.print(f"plan.json and plan.png are in {_OUT.value}")


def compile_here(workload: Workload, machine: Machine) -> None:
  """Compiles in this process, and tells the parent each stage's memory."""
  workload = compilable(workload, machine.target.platform)
  found = compile_stages(workload, absent_devices(machine))
  for stage, memory, seconds in found:
    plan_child.tell(stage=stage, memory=memory, seconds=seconds)


def compile_apart(
    workload: Workload, plan: MemoryPlan, machine: Machine, console: Console
) -> dict[str, StageMemory]:
  """Has another process compile each stage; returns plans with its bytes."""
  if not _COMPILE.value:
    return {}
  made_for = compilable(workload, machine.target.platform)
  if made_for != workload:
    console.print(
        "compiled with everything on the device, since the compiler knows no"
        f" host memory of {machine.name}; that tier is arithmetic"
    )
  found = {}
  with console.status("compiling") as status:
    for told in plan_child.run_child("experiments.plan_capacity", machine):
      stage, memory = told["stage"], ProgramMemory(*told["memory"])
      found[stage] = with_compiled(stage, plan.stages[stage], memory, made_for)
      console.print(f"compiled {stage} in {told['seconds']:.0f} s")
      status.update("compiling the next stage")
  return found


def save(
    workload: Workload,
    machine: Machine,
    plan: MemoryPlan,
    compiled: dict[str, StageMemory],
    costs: dict[str, StageCost],
    longest: int | None,
) -> None:
  """Writes all numbers, and the picture."""
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  limit = machine.target.memory_bytes
  numbers: dict[str, Any] = {
      "target": str(machine),
      "workload": dataclasses.asdict(workload),
      "device_bytes": limit,
      "planned": {k: v._asdict() for k, v in plan.stages.items()},
      "compiled": {k: v._asdict() for k, v in compiled.items()},
      "peak_bytes": plan.peak,
      "host_bytes_per_device": plan.host,
      "longest_prompt_tokens": longest,
      "costs": {k: v._asdict() for k, v in costs.items()},
  }
  (folder / "plan.json").write_text(json.dumps(numbers, indent=2) + "\n")
  peaks = [stage.total for stage in compiled.values()]
  plot_plan(
      folder / "plan.png",
      workload,
      limit=limit,
      compiled=[(workload.prompt_tokens, max(peaks))] if peaks else [],
      with_published=model_name() == "qwen3.6-27b",
      title=describe(workload, machine),
  )


if __name__ == "__main__":
  command_line.run(main)

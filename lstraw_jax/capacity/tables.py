"""The tables and the verdict of a capacity plan, as text."""

from collections.abc import Mapping, Sequence

from rich.console import JustifyMethod
from rich.table import Table

from lstraw_jax.capacity.advice import Advice
from lstraw_jax.capacity.memory_plan import MemoryPlan, StageMemory
from lstraw_jax.capacity.targets import Machine, Target
from lstraw_jax.roofline import StageCost

BAND = (0.8, 1.25)  # of planned to compiled bytes
_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "prompt_state": "prompt state",
    "cotangents": "cotangents",
    "boundaries": "boundaries",
    "temporaries": "temporaries",
}


def memory_table(
    plan: MemoryPlan, compiled: Mapping[str, StageMemory]
) -> Table:
  """Shows each stage's bytes per device.

  Args:
    plan: by arithmetic.
    compiled: by the compiler, or empty.
  """
  unit, scale = ("GB", 1e9) if plan.peak >= 1e8 else ("MB", 1e6)
  table = Table(title=f"{unit} per device", title_justify="left")
  table.add_column("", no_wrap=True)
  for name in plan.stages:
    table.add_column(_words(name), justify="right")
  shown = lambda count: f"{count / scale:,.2f}" if count else "-"
  add = lambda title, cells: table.add_row(title, *cells)
  stages = plan.stages.values()
  for field, title in _ROWS.items():
    add(title, [shown(getattr(stage, field)) for stage in stages])
  table.add_section()
  add("peak", [shown(stage.total) for stage in stages])
  if compiled:
    found = [compiled[name] for name in plan.stages]
    add("compiled peak", [shown(stage.total) for stage in found])
    add("  temporaries", [shown(stage.temporaries) for stage in found])
    ratios = agreement(plan, compiled).values()
    add("peak / compiled", [f"{ratio:.2f}" for ratio in ratios])
  return table


def agreement(
    plan: MemoryPlan, compiled: Mapping[str, StageMemory]
) -> dict[str, float]:
  """Returns planned by compiled bytes of each stage."""
  return {
      name: plan.stages[name].total / found.total
      for name, found in compiled.items()
  }


def disagreement(
    plan: MemoryPlan, compiled: Mapping[str, StageMemory]
) -> str | None:
  """Says in which stages planned and compiled bytes are far apart, if any."""
  ratios = agreement(plan, compiled)
  apart = [_words(name) for name, r in ratios.items() if not in_band(r)]
  if not apart:
    return None
  low, high = BAND
  return (
      f"the plan and the compiler disagree (outside {low}..{high}) in"
      f" {', '.join(apart)}: trust the compiler"
  )


def cost_table(costs: Mapping[str, StageCost], target: Target) -> Table:
  """Shows what each stage does and how long that takes at the stated rates."""
  table = Table(
      title="per device and update; seconds at the peak rates of the target",
      title_justify="left",
  )
  table.add_column("stage")
  for title in ("TFLOP", "memory GB", "links GB", "host GB", "seconds"):
    table.add_column(title, justify="right")
  table.add_column("bound")
  for stage, cost in costs.items():
    seconds, bound = cost.seconds(target), cost.bound(target)
    table.add_row(
        _words(stage),
        f"{cost.flops / 1e12:,.1f}",
        f"{cost.memory_bytes / 1e9:,.1f}",
        f"{cost.collective_bytes / 1e9:,.1f}",
        f"{cost.host_bytes / 1e9:,.1f}",
        "-" if seconds is None else f"{seconds:,.1f}",
        bound or "-",
    )
  return table


def advice_table(advice: Sequence[Advice], limit: int) -> Table:
  """Shows what would help, and whether it would be enough."""
  table = Table(title="what would help", title_justify="left")
  columns: tuple[tuple[str, JustifyMethod], ...] = (
      ("change", "left"),
      ("peak GB", "right"),
      ("host GB", "right"),
      ("enough", "left"),
  )
  for title, justify in columns:
    table.add_column(title, justify=justify, no_wrap=True)
  for one in advice:
    enough = "yes" if one.peak <= limit else "no"
    table.add_row(
        f"--{one.flag}",
        _gb(one.peak),
        _gb(one.host),
        enough,
    )
  return table


def verdict(plan: MemoryPlan, machine: Machine) -> str:
  """Says whether the plan fits, by how much, and which stage is the largest."""
  limit = machine.target.memory_bytes
  peak = f"peak {plan.peak / 1e9:,.2f} GB a device, in {_words(plan.largest)}"
  if limit is None:
    return f"{peak}; the memory of {machine.name} is not known"
  left = limit - plan.peak
  has = f"{machine.name} has {limit / 1e9:,.2f} GB"
  if left >= 0:
    return f"FITS: {peak}; {has}, {left / 1e9:,.2f} GB to spare"
  return f"DOES NOT FIT: {peak}; {has}, {-left / 1e9:,.2f} GB too few"


def in_band(ratio: float) -> bool:
  """Whether planned and compiled bytes agree."""
  return BAND[0] <= ratio <= BAND[1]


def _words(stage: str) -> str:
  return stage.replace("_", " ")


def _gb(count: int) -> str:
  return "-" if count == 0 else f"{count / 1e9:,.2f}"

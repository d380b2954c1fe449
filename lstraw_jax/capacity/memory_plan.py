"""The memory of an update by arithmetic: no array, no program, no device.

What lives through a stage is known to the byte from shapes and the mesh. What a
program needs besides, its temporaries, is estimated (`temporaries.py`); the
compiler's own figure is in `compiled_memory.py`.

Bytes are per device.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lstraw_jax.capacity.kept_bytes import KeptBytes, kept_bytes
from lstraw_jax.capacity.stage_programs import stages_of
from lstraw_jax.capacity.temporaries import temporaries
from lstraw_jax.capacity.workload import Workload


class StageMemory(NamedTuple):
  """What is alive on a device at the peak of a stage."""

  weights: int
  optimizer: int
  gradients: int
  prompt_state: int
  cotangents: int
  boundaries: int
  temporaries: int

  @property
  def total(self) -> int:
    """All of it."""
    return sum(self)


class MemoryPlan(NamedTuple):
  """The stages of an update, and what lies in host memory all the while."""

  stages: Mapping[str, StageMemory]
  host: int  # bytes of host memory for each device

  @property
  def largest(self) -> str:
    """The stage that holds most."""
    return max(self.stages, key=lambda name: self.stages[name].total)

  @property
  def peak(self) -> int:
    """What it holds."""
    return self.stages[self.largest].total


def plan_memory(workload: Workload) -> MemoryPlan:
  """Plans an update.

  Raises:
    ValueError: if the model does not fit the mesh.
  """
  kept = kept_bytes(workload)
  stages = {
      name: StageMemory(
          weights=_weights(workload, kept),
          optimizer=_moments(name, workload, kept),
          gradients=kept.gradients,
          prompt_state=_prompt_states(name, workload, kept),
          cotangents=_cotangents(name, workload, kept),
          boundaries=_boundaries(name, workload, kept),
          temporaries=temporaries(name, workload, kept),
      )
      for name in stages_of(workload)
  }
  return MemoryPlan(stages, _host(workload, kept))


def _weights(workload: Workload, kept: KeptBytes) -> int:
  reference = kept.trainable if workload.with_kl else 0
  return kept.trainable + kept.frozen + reference


def _moments(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """Those in host memory come to the device for their step."""
  on_device = workload.optimizer.memory_kind == "device"
  return kept.optimizer if on_device or stage == "optimizer" else 0


def _prompt_states(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """Those of the turn, or kept over steps; the reference has one of its own."""
  count = workload.states_kept
  if stage != "optimizer":
    count = max(count, 1)
  if stage == "score" and workload.with_kl:
    count += 1
  slots = kept.slots if workload.slots_on_device else 0
  return count * (slots + kept.positions + kept.recurrent)


def _cotangents(stage: str, workload: Workload, kept: KeptBytes) -> int:
  if not workload.exact or stage not in ("replay", "prompt_gradient"):
    return 0
  slots = kept.cotangent_slots if workload.slots_on_device else 0
  return slots + kept.cotangent_recurrent


def _boundaries(stage: str, workload: Workload, kept: KeptBytes) -> int:
  """The tape's, and in the sweep those between, of one stretch of chunks."""
  if not workload.exact or stage == "optimizer":
    return 0
  on_device = workload.update.tape.memory_kind == "device"
  count = workload.boundaries if on_device else 0
  if stage == "prompt_gradient":
    entering = min(workload.update.tape.boundary_every, workload.chunks)
    count += entering - 1 if on_device else entering
  return count * kept.recurrent


def _host(workload: Workload, kept: KeptBytes) -> int:
  total = 0
  if workload.optimizer.memory_kind != "device":
    total += kept.optimizer
  if not workload.slots_on_device:
    total += max(workload.states_kept, 1 + workload.with_kl) * kept.slots
    total += kept.cotangent_slots if workload.exact else 0
  if workload.exact and workload.update.tape.memory_kind != "device":
    total += workload.boundaries * kept.recurrent
  return total

"""Does an update fit, how far does it go, and what would help?"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from lstraw_jax.capacity.memory_plan import plan_memory
from lstraw_jax.capacity.workload import Workload
from modeling.decoder_config import LoraConfig

_LONGEST = (1 << 31) - 1  # tokens: positions are int32


class Advice(NamedTuple):
  """One change, and what it would give."""

  setting: str  # of a run
  flag: str  # of the planner
  peak: int  # bytes per device
  host: int


def peak_bytes(workload: Workload) -> int:
  """Returns the peak of an update on a device, by arithmetic."""
  return plan_memory(workload).peak


def longest_prompt(workload: Workload, limit: int) -> int:
  """Returns the longest prompt that fits a device of `limit` bytes, 0 if none.

  More tokens never need less memory, so that halving finds it.
  """
  fits = lambda tokens: peak_bytes(_of_length(workload, tokens)) <= limit
  if not fits(1):
    return 0
  low, high = 1, _LONGEST
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low


def advise(workload: Workload, limit: int) -> list[Advice]:
  """Returns what would lower the peak, the most helpful change first.

  Changes that suffice alone stand before those that do not.
  """
  before = peak_bytes(workload)
  found = []
  for setting, flag, changed in _changes(workload):
    plan = plan_memory(changed)
    if plan.peak < before:
      found.append(Advice(setting, flag, plan.peak, plan.host))
  return sorted(found, key=lambda advice: (advice.peak > limit, advice.peak))


def _changes(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
  """Yields each setting that bounds memory, moved one step to less."""
  update = workload.update
  updated = lambda **changes: dataclasses.replace(
      workload, update=dataclasses.replace(update, **changes)
  )
  if workload.model.lora is None:
    model = workload.model.replace(
        lora=LoraConfig(rank=16, alpha=16.0), param_dtype="bfloat16"
    )
    yield (
        "lora.rank=16",
        "trainable=lora:16",
        dataclasses.replace(workload, model=model),
    )
  if workload.exact and not workload.supervised:
    yield (
        "train.prompt_gradient=dropped",
        "prompt_gradient=dropped",
        updated(prompt_gradient="dropped"),
    )
  if workload.exact:
    if update.cotangent_dtype == "float32":
      yield (
          "train.cotangent_dtype=bfloat16",
          "cotangent_dtype=bfloat16",
          updated(cotangent_dtype="bfloat16"),
      )
    tape = update.tape
    every = 4 * tape.boundary_every
    yield (
        f"capture.boundary_every={every}",
        f"boundary_every={every}",
        updated(tape=dataclasses.replace(tape, boundary_every=every)),
    )
    if tape.memory_kind == "device":
      yield (
          "capture.memory_kind=pinned_host",
          "boundary_memory=pinned_host",
          updated(tape=dataclasses.replace(tape, memory_kind="pinned_host")),
      )
  if workload.slots_on_device:
    yield (
        "state.memory_kind=pinned_host",
        "state_memory=pinned_host",
        updated(memory_kind="pinned_host"),
    )
  if workload.optimizer.memory_kind == "device":
    yield (
        "optimizer.memory_kind=pinned_host",
        "optimizer_memory=pinned_host",
        dataclasses.replace(
            workload,
            optimizer=dataclasses.replace(
                workload.optimizer, memory_kind="pinned_host"
            ),
        ),
    )
  chunk = update.capture_chunk_tokens // 2
  if chunk >= 1 and chunk % workload.context == 0:
    yield (
        f"train.capture_chunk_tokens={chunk}",
        f"chunk_tokens={chunk}",
        updated(capture_chunk_tokens=chunk),
    )
  block = update.replay.block_tokens // 2
  if block >= 1 and block % workload.context == 0 and not workload.supervised:
    replay = dataclasses.replace(update.replay, block_tokens=block)
    yield (
        f"train.replay_block_tokens={block}",
        f"block_tokens={block}",
        updated(replay=replay),
    )
  yield from _more_devices(workload)


def _more_devices(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
  context = 2 * workload.context
  try:
    more = dataclasses.replace(workload, context=context)
    plan_memory(more)
  except ValueError:  # the model or the chunk does not divide over so many
    return
  yield f"mesh.context={context}", f"mesh=context={context}", more


def _of_length(workload: Workload, tokens: int) -> Workload:
  return dataclasses.replace(workload, prompt_tokens=tokens)

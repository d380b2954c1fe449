"""Refuses a run that cannot fit its devices, before anything is allocated."""

from typing import Any, NamedTuple

from jax.sharding import Mesh

from lstraw_jax.capacity.advice import advise
from lstraw_jax.capacity.memory_plan import plan_memory
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.distributed import say
from lstraw_jax.metrics import device_memory
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import DecoderConfig

_SHOWN = 4  # changes that an error lists


class Extent(NamedTuple):
  """The largest that the data of a run has; 0 responses: there are none."""

  prompt_tokens: int
  response_tokens: int
  group_size: int


def check_fits(
    config: Any,
    extent: Extent,
    *,
    model: DecoderConfig,
    mesh: Mesh,
    update: UpdateConfig,
    optimizer: OptimizerConfig,
    force: bool,
) -> None:
  """Plans the memory of a run and compares it with that of a device.

  Nothing is compared where neither `memory.device_bytes` nor the backend tells
  how much that is.

  Args:
    config: the settings.
    extent: of the data.
    model: of the run, as the others.
    mesh: its own.
    update: its settings.
    optimizer: its settings.
    force: only say that it is too little.

  Raises:
    ValueError: if it is too little, with what would help; or if
      `memory.device_bytes` is negative.
  """
  given = config.memory.device_bytes
  if given < 0:
    raise ValueError(
        f"memory.device_bytes={given}: want a number of bytes, or 0 to ask the"
        " device"
    )
  limit = given or device_memory()
  if not limit:
    return
  workload = Workload(
      model=model,
      **mesh.shape,
      **extent._asdict(),
      update=update,
      optimizer=optimizer,
  )
  plan = plan_memory(workload)
  if plan.peak <= limit:
    return
  needs = (
      f"the run needs about {_gb(plan.peak)} a device, in {plan.largest}, of"
      f" the {_gb(limit)} that there are"
  )
  if force:
    say(f"{needs}; started because of --force")
    return
  helps = [
      f"\n  --config.{advice.setting}: {_gb(advice.peak)}"
      for advice in advise(workload, limit)[:_SHOWN]
  ]
  raise ValueError(
      f"{needs}. What would help:{''.join(helps)}\nexperiments/plan_capacity"
      " tells what takes it; --force starts the run all the same"
  )


def _gb(count: int) -> str:
  return f"{count / 1e9:,.3g} GB"

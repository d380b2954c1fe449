"""The stages of an update, each as the sum of what its segments cost."""

import dataclasses

from lstraw_jax.capacity.stage_programs import stages_of
from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, total
from lstraw_jax.roofline.families import layers_of
from lstraw_jax.roofline.kept import (
    boundaries_kept,
    boundaries_taken,
    cotangents_taken,
    gradient_sums_cost,
    optimizer_cost,
    slots_written,
)
from lstraw_jax.roofline.segments import Segments, segments_of
from lstraw_jax.roofline.vocabulary import head_cost, look_up_cost


def estimate(workload: Workload, target: Target) -> dict[str, StageCost]:
  """Counts each stage of an update, as its phase runs in `train_step`.

  * capture: all chunks of the prompt.
  * score: all responses, once. With a KL penalty also the reference's own
    capture, which comes first; without one no update runs this stage, but a
    caller of `score` does.
  * replay: all responses, walked and pulled back.
  * prompt_gradient: all chunks, and again those that the tape left out.
  * optimizer: one step.

  Args:
    workload: the sizes; those of the mesh divide the model's.
    target: its platform, which decides how experts are multiplied.

  Returns:
    Costs per device, of the stages that `stages_of` names.
  """
  return {
      stage: stage_cost(stage, workload, target)
      for stage in stages_of(workload)
  }


def stage_cost(stage: str, workload: Workload, target: Target) -> StageCost:
  """Counts one of the stages."""
  if stage == "optimizer":
    return optimizer_cost(workload, target)
  costs = [
      segments_cost(segments, workload, target)
      for segments in segments_of(stage, workload)
  ]
  if stage == "capture":
    costs += [slots_written(workload), boundaries_kept(workload)]
  if stage == "score" and workload.with_kl:
    costs += [stage_cost("capture", _without_tape(workload), target)]
  if stage == "prompt_gradient":
    costs += [cotangents_taken(workload), boundaries_taken(workload)]
  return total(costs)


def _without_tape(workload: Workload) -> Workload:
  """That of a reference, whose states nothing is pulled back through."""
  update = dataclasses.replace(workload.update, prompt_gradient="dropped")
  return dataclasses.replace(workload, update=update)


def segments_cost(
    segments: Segments, workload: Workload, target: Target
) -> StageCost:
  """Counts all layers of some segments, both ends, and the gradients' sums."""
  layers = layers_of(workload, target)
  return total(
      [
          look_up_cost(segments, workload),
          *(kind.cost(segments, workload) for kind in layers),
          head_cost(segments, workload),
          gradient_sums_cost(segments, workload, target),
      ]
  )

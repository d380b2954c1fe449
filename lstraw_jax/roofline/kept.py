"""What one device moves to keep states and sums, and to take a step."""

from lstraw_jax.capacity.kept_bytes import recurrent_bytes, slot_bytes
from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost
from lstraw_jax.roofline.families import layers_of
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.vocabulary import head_matrices, table_elements
from lstraw_jax.roofline.widths import widths


def slots_written(workload: Workload) -> StageCost:
  """Counts what a capture stores of its tokens: read, then written."""
  return _frames(workload).repeated(2)


def cotangents_taken(workload: Workload) -> StageCost:
  """Counts the cotangents of each chunk's own slots, which a sweep reads."""
  return _frames(workload, cotangent=True)


def _frames(workload: Workload, *, cotangent: bool = False) -> StageCost:
  """Counts all slots of all chunks once."""
  slots = workload.chunks * workload.chunk_tokens
  size = slot_bytes(workload, slots=slots, cotangent=cotangent)
  on_host = 0 if workload.slots_on_device else size
  return StageCost(memory_bytes=size, host_bytes=on_host)


def boundaries_kept(workload: Workload) -> StageCost:
  """Counts the recurrent states that a capture copies to the tape."""
  if not workload.exact:
    return StageCost()
  if workload.update.tape.memory_kind == "device":
    size = workload.boundaries * recurrent_bytes(workload)
    return StageCost(memory_bytes=2 * size)
  return boundaries_taken(workload)


def boundaries_taken(workload: Workload) -> StageCost:
  """Counts those of host memory, brought to the device; others are there."""
  if workload.update.tape.memory_kind == "device":
    return StageCost()
  size = workload.boundaries * recurrent_bytes(workload)
  return StageCost(memory_bytes=size, host_bytes=size)


def gradient_sums_cost(
    segments: Segments, workload: Workload, target: Target
) -> StageCost:
  """Counts the addition of each segment's gradients to the sums.

  A gradient is written and read, the sums are read and written in float32.
  """
  if not segments.pulled_back:
    return StageCost()
  _, wide, _, trained = widths(workload.model)
  size = 2 * (trained + wide) * trained_elements(workload, target)
  return StageCost(memory_bytes=size).repeated(segments.count)


def optimizer_cost(workload: Workload, target: Target) -> StageCost:
  """Counts AdamW, which has no products.

  Gradients are read for their norm and for the step, weights and both moments
  read and written. Moments in host memory come to the device and go back.
  """
  _, wide, _, trained = widths(workload.model)
  count = trained_elements(workload, target)
  moments = 2 * 2 * trained * count
  on_device = workload.optimizer.memory_kind == "device"
  return StageCost(
      memory_bytes=(2 * wide + 2 * trained) * count + moments,
      host_bytes=0 if on_device else moments,
  )


def trained_elements(workload: Workload, target: Target) -> int:
  """Returns a device's part of the trained weights, without norms and such."""
  model = workload.model
  layers = layers_of(workload, target)
  stacked = [
      *((kind.times, kind.matrices) for kind in layers),
      (1, head_matrices(workload)),
  ]
  count = sum(
      times * matrix.size // matrix.parts
      for times, matrices in stacked
      for matrix in matrices
      if matrix.trained
  )
  if model.lora is None and not model.tie_word_embeddings:
    count += table_elements(workload) // workload.data
  return count

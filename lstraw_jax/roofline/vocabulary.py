"""What the two ends of a model cost one device: look-up and head.

Rows of the table, and columns of the head, lie over `context` and `tensor`:
each device has all tokens of a segment and a part of the vocabulary.
"""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, gathered, reduced, total
from lstraw_jax.roofline.products import Matrix, adapter, product_cost
from lstraw_jax.roofline.segments import Segments
from lstraw_jax.roofline.widths import widths


def look_up_cost(segments: Segments, workload: Workload) -> StageCost:
  """Counts the look-up: each device looks for all tokens in its rows.

  What it finds, [T, D], is summed over `tensor` and scattered over `context`.
  If the table is trained, cotangents are gathered, and a gradient of the size
  of the device's rows is written.
  """
  model, width = workload.model, widths(workload.model).narrow
  trained = segments.pulled_back and model.lora is None
  found = width * segments.tokens * model.hidden_size
  table = width * table_elements(workload)
  received = reduced(found, workload.tensor)
  received += (1 + trained) * gathered(found, workload.context)
  received += (1 + trained) * gathered(table, workload.data)
  moved = (1 + trained) * 2 * found + trained * table
  if workload.data > 1:
    moved += table * (1 + 1 / workload.data)
  cost = StageCost(memory_bytes=moved, collective_bytes=received)
  return cost.repeated(segments.count)


def table_elements(workload: Workload) -> int:
  """Returns the table's elements that a device uses."""
  model = workload.model
  shards = workload.context * workload.tensor
  return model.vocab_size // shards * model.hidden_size


def head_matrices(workload: Workload) -> list[Matrix]:
  """Returns those of the head, which may be the table; `data` has parts."""
  model, width = workload.model, widths(workload.model)
  shards = workload.context * workload.tensor
  head = Matrix(
      d_in=model.hidden_size,
      d_out=model.vocab_size // shards,
      trained=model.lora is None,
      stored_bytes=width.param,
      used_bytes=width.narrow,
      parts=workload.data,
      replicas=workload.data,
      cut="out",
      cut_over=shards,
  )
  if model.tie_word_embeddings:
    return [head]
  wide = head._replace(used_bytes=width.wide)  # as its adapter works
  return [head, *adapter("lm_head", wide, workload)]


def head_cost(segments: Segments, workload: Workload) -> StageCost:
  """Counts log-probs of a few tokens at a time.

  Hidden states are gathered over `context`. Maximum, sum, picked logit and
  entropy of each token are added up over the vocabulary, in float32; a backward
  needs the first two again. Logits are written and read in each pass, and so
  are their cotangents.
  """
  rows = segments.head_chunks * segments.head_tokens
  if not rows:
    return StageCost()
  model, pulled = workload.model, segments.pulled_back
  narrow, wide, *_ = widths(model)
  shards = workload.context * workload.tensor
  hidden = segments.count * segments.tokens * model.hidden_size * narrow
  logits = rows * (model.vocab_size // shards) * wide
  received = gathered(hidden, workload.context)
  received += reduced((4 + 2 * pulled) * rows * wide, shards)
  products = (
      product_cost(
          matrix,
          tokens=segments.head_tokens,
          calls=segments.head_chunks,
          pulled_back=pulled,
      )
      for matrix in head_matrices(workload)
  )
  passes = 1 + 2 * pulled
  moved = StageCost(memory_bytes=passes * 2 * logits, collective_bytes=received)
  return total([*products, moved])

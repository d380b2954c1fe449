"""Bytes of the arrays that a segment makes in a model of any family."""

from typing import NamedTuple

from lstraw_jax.capacity.workload import Workload
from modeling.expert_exchange import SLACK


class Segment(NamedTuple):
  """What a program evaluates at once."""

  tokens: int  # over all shards of `context`
  of_prompt: bool  # a chunk; else a block of a response
  backward: bool  # whether it is pulled back


def made_bytes(workload: Workload, *, shards: int) -> int:
  """Returns the bytes of an element of weights as a layer uses them.

  0 where they are used as they lie: neither cast nor gathered.

  Args:
    workload: the sizes.
    shards: devices that each have a part of a weight at rest.
  """
  model = workload.model
  cast = model.param_dtype != model.dtype
  return model.activation_dtype.itemsize if cast or shards > 1 else 0


def table_bytes(workload: Workload) -> float:
  """Returns the bytes of the embedding, and the head, if they are cast."""
  model = workload.model
  if model.param_dtype == model.dtype:
    return 0
  tables = 1 if model.tie_word_embeddings else 2
  size = tables * model.vocab_size * model.hidden_size
  parts = workload.context * workload.tensor
  return size * model.activation_dtype.itemsize / parts


def exchange_bytes(
    workload: Workload, segment: Segment, *, per_token: int
) -> float:
  """Returns the bytes of tokens sent to experts, [rows, D]."""
  model = workload.model
  rows = SLACK * segment.tokens / workload.context * per_token
  return rows * model.hidden_size * model.activation_dtype.itemsize

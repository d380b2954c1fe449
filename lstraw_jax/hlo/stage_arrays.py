"""Arrays that a compiled stage can be run on: sizes and layout are its own.

Weights, tokens and sums are zeros, which costs what other numbers would. The
prompt is there, so that attention runs over as many keys as in an update: a
capture or a prompt gradient is that of the last chunk, which has all others
before it. All of a response carries loss.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.prompt_state import PromptState
from modeling.sharding import sharding


def stage_arrays(
    stage: str,
    workload: Workload,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
) -> tuple[Any, ...]:
  """Returns new arguments of a stage; some of them are consumed by a call.

  Args:
    stage: one of `STAGES`.
    workload: its sizes.
    lowered: the stage.
    compiled: the same, for devices that are there.
  """
  shapes, _ = lowered.args_info  # a stage has no keyword arguments but statics
  where, _ = compiled.input_shardings
  mesh = next(iter(jax.tree.leaves(where))).mesh
  # Of an argument that the program does not use there is no sharding.
  where = jax.tree.map(
      lambda _, place: place or sharding(mesh, ()), shapes, where
  )
  fill = partial(_filled, stage, workload)

  @partial(jax.jit, out_shardings=where)
  def make():
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return fill(*zeros)

  return make()


def filled_positions(
    *, slots: int, chunk_tokens: int, context: int, length: jax.Array
) -> jax.Array:
  """Returns the positions [S] of the slots of a prompt; -1 is an empty one.

  Slots lie as `stripes.py` says: over the shards in turn, each with its share
  of every frame.
  """
  share = chunk_tokens // context
  shape = context, slots // chunk_tokens, share
  shard, frame, within = jnp.indices(shape, jnp.int32)
  positions = (frame * chunk_tokens + shard * share + within).ravel()
  return jnp.where(positions < length, positions, -1)


def _filled(stage: str, workload: Workload, *arguments: Any) -> Any:
  """Returns the arguments of a stage with what zeros cannot say."""
  length = workload.prompt_tokens - 1
  last = workload.chunks - 1
  match stage:
    case "capture":
      policy, state, tokens, frame, ends = arguments
      state = _with_prompt(state, last * workload.chunk_tokens)
      frame = jnp.full_like(frame, last)
      return policy, state, tokens, frame, jnp.full_like(ends, length)
    case "score" | "replay":
      policy, prompt, branches, *sums = arguments
      prompt = _with_prompt(prompt, length)
      return policy, prompt, jax.tree.map(_ones, branches), *sums
    case "prompt_gradient":
      policy, prompt, recurrent, tokens, frame, labels, *sums = arguments
      prompt = _with_prompt(prompt, length)
      frame = jnp.full_like(frame, last)
      labels = jax.tree.map(_ones, labels)
      return policy, prompt, recurrent, tokens, frame, labels, *sums
    case "optimizer":
      *state, denominator = arguments
      return *state, jnp.ones_like(denominator)
  raise AssertionError(f"{stage} is no stage")


def _ones(x: jax.Array) -> jax.Array:
  """Token ids stay 0; masks are set, and numbers not zero."""
  return x if jnp.issubdtype(x.dtype, jnp.integer) else jnp.ones_like(x)


def _with_prompt(state: PromptState, length: int) -> PromptState:
  """Returns a state whose first `length` tokens are there, in every row."""
  lengths = jnp.full_like(state.length, length)
  row = filled_positions(
      slots=state.capacity,
      chunk_tokens=state.chunk_tokens,
      context=state.mesh.shape["context"],
      length=lengths[0],
  )
  return dataclasses.replace(
      state,
      positions=jnp.broadcast_to(row, state.positions.shape),
      length=lengths,
  )

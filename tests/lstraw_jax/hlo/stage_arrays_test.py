"""Stages that are run without an update: on prompts that are there."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capacity.stage_programs import STAGES, StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.capture import capture
from lstraw_jax.hlo.stage_arrays import filled_positions, stage_arrays
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.sharding import make_mesh
from tests import tiny

CONFIG = tiny.config(dtype="float32")
PROMPT, CHUNK = 45, 8  # the last of six chunks has four tokens
SIZES = {"data": 2, "context": 2, "tensor": 1}
WORKLOAD = Workload(
    model=CONFIG,
    **SIZES,
    prompt_tokens=PROMPT,
    response_tokens=10,
    group_size=3,
    update=UpdateConfig(
        prompt_gradient="exact",
        replay=ReplayConfig(block_tokens=8, head_chunk_tokens=8),
        capture_chunk_tokens=CHUNK,
        response_multiple=8,
    ),
)


@functools.cache
def programs():
  return StagePrograms(WORKLOAD, make_mesh(**SIZES))


@functools.cache
def compiled(stage):
  lowered = programs().lower(stage)
  return lowered, lowered.compile()


@pytest.mark.parametrize("length", [1, 8, 29, 45, 48])
def test_positions_are_those_that_a_capture_fills(length):
  policy = tiny.policy(CONFIG, mesh=make_mesh(context=4))
  tokens = tiny.tokens(length + 1)
  state = capture(policy, [tokens], chunk_tokens=CHUNK, capacity=64)
  found = filled_positions(
      slots=64, chunk_tokens=CHUNK, context=4, length=jnp.int32(length)
  )
  np.testing.assert_array_equal(found, state.positions[0])


@pytest.mark.parametrize("stage", STAGES)
def test_arguments_fit_the_program_and_its_results_are_finite(stage):
  lowered, program = compiled(stage)
  for _ in range(2):  # what a call consumes is made anew
    arguments = stage_arrays(stage, WORKLOAD, lowered, program)
    results = jax.block_until_ready(program(*arguments))
  for leaf in jax.tree.leaves(results):
    assert np.isfinite(leaf).all()


def test_a_capture_is_that_of_the_last_chunk():
  lowered, program = compiled("capture")
  arguments = stage_arrays("capture", WORKLOAD, lowered, program)
  before = jax.device_get(arguments[1].positions)
  after = program(*arguments)
  filled = PROMPT - 1
  for row, new in zip(before, np.asarray(after.positions), strict=True):
    assert sorted(row[row >= 0]) == [*range(filled // CHUNK * CHUNK)]
    assert sorted(new[new >= 0]) == [*range(filled)]
  np.testing.assert_array_equal(after.length, [filled] * 2)


def test_all_of_every_response_carries_loss():
  lowered, program = compiled("replay")
  arguments = stage_arrays("replay", WORKLOAD, lowered, program)
  replayed = program(*arguments)
  responses = 2 * 3 * WORKLOAD.response_slots
  assert float(replayed.stats.tokens) == responses
  # Weights of zero know nothing.
  np.testing.assert_allclose(
      replayed.log_probs, -math.log(CONFIG.vocab_size), rtol=1e-5
  )


def test_the_prompt_gradient_is_that_of_the_last_chunk():
  lowered, program = compiled("prompt_gradient")
  arguments = stage_arrays("prompt_gradient", WORKLOAD, lowered, program)
  frame = arguments[4]
  assert int(frame) == WORKLOAD.chunks - 1 == 5

"""What sparse attention holds beside its state: tiles, whatever the prompt.

Temporaries are read off programs in float32: in bfloat16 the CPU compiler keeps
a float32 copy of all latents, which no accelerator does.
"""

from functools import partial

import jax
import pytest

from tests import programs
from tests.large import (
    LARGE_GLM,
    SLOTS,
    compiled_capture,
    compiled_replay,
    compiled_sweep,
)

pytestmark = pytest.mark.first_class

STAGES = {
    "capture": partial(compiled_capture, config=LARGE_GLM),
    "replay": partial(compiled_replay, config=LARGE_GLM),
    "exact replay": partial(compiled_replay, config=LARGE_GLM, exact=True),
    "sweep": partial(compiled_sweep, config=LARGE_GLM),
}


@pytest.mark.parametrize("stage", STAGES)
def test_temporaries_do_not_depend_on_the_prompt(stage):
  """But for a copy of its positions."""
  small = STAGES[stage](slots=SLOTS)
  large = STAGES[stage](slots=4 * SLOTS)
  one, four = map(programs.temp_bytes, (small, large))
  print(f"{stage}: {one:,} bytes, {four:,} with 4 times the slots")
  assert four - one < 4.6 * 3 * SLOTS


def test_memory_does_not_grow_with_the_group():
  few, many = (STAGES["replay"](group_size=size) for size in (2, 16))
  one = programs.temp_bytes(few)
  print(f"bytes: G=2 {one:,}, G=16 {programs.temp_bytes(many):,}")
  assert abs(programs.temp_bytes(many) / one - 1) < 0.01


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_but_the_state_has_the_size_of_the_prompt(stage):
  """No scores, no mask, no copy of a layer; who sees what goes by positions."""
  slots = 4 * SLOTS
  stored = LARGE_GLM.slot_shapes(batch=1, slots=slots)
  shapes = {(1, slots), *(x.shape for x in jax.tree.leaves(stored))}
  compiled = STAGES[stage](slots=slots)
  assert {*programs.buffers_with(compiled, slots)} == shapes

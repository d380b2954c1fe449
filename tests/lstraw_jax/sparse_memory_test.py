"""What sparse attention holds beside its state: tiles, whatever the prompt.

Temporaries are read off programs in float32: in bfloat16 the CPU compiler keeps
a float32 copy of all latents, which no accelerator does.
"""

from functools import partial

import pytest

from lstraw_jax.prompt_state import nbytes
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
  assert four - one < 8.1 * 3 * SLOTS
  assert four < 1.02 * one


def test_memory_does_not_grow_with_the_group():
  few, many = (STAGES["replay"](group_size=size) for size in (2, 16))
  one = programs.temp_bytes(few)
  print(f"bytes: G=2 {one:,}, G=16 {programs.temp_bytes(many):,}")
  assert abs(programs.temp_bytes(many) / one - 1) < 0.01


def test_no_buffer_holds_the_scores_of_a_chunk():
  """[queries, keys] exists for a tile of each alone."""
  for stage, compile in STAGES.items():
    rows = [
        shape
        for shape in programs.buffers_with(compile(slots=4 * SLOTS), 4 * SLOTS)
        if shape[-2:] != (4 * SLOTS, LARGE_GLM.latent_dim)
    ]
    print(stage, sorted(rows))
  assert nbytes(LARGE_GLM, capacity=1)

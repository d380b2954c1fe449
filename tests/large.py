"""A model of sizes that occur nowhere else, and programs compiled from shapes.

The axes of a buffer of such a program tell what it holds.
"""

import functools

import jax

from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import DecoderConfig
from modeling.sharding import make_mesh
from tests import tiny

BLOCK, VOCAB, SLOTS, HEAD_ROWS, CHUNK = 1031, 263, 3072, 64, 512
LARGE = tiny.config(
    dtype="float32",
    vocab_size=VOCAB,
    full_attention_interval=2,
    num_hidden_layers=16,
)
LARGE_GLM = tiny.config("tiny-glm", dtype="float32", vocab_size=VOCAB)


def shapes(
    *,
    slots: int = SLOTS,
    config: DecoderConfig = LARGE,
    group_size: int = 2,
    exact: bool = True,
) -> StagePrograms:
  """Returns the programs of an update with responses of two blocks."""
  update = UpdateConfig(
      prompt_gradient="exact" if exact else "dropped",
      replay=ReplayConfig(block_tokens=BLOCK, head_chunk_tokens=HEAD_ROWS),
      capture_chunk_tokens=CHUNK,
      response_multiple=2 * BLOCK,
  )
  workload = Workload(
      model=config,
      prompt_tokens=slots + 1,
      response_tokens=2 * BLOCK,
      group_size=group_size,
      update=update,
  )
  assert workload.capacity == slots, "slots: a step of the ladder of buckets"
  return StagePrograms(workload, make_mesh())


@functools.cache
def compiled_replay(
    *,
    group_size: int = 2,
    slots: int = SLOTS,
    config: DecoderConfig = LARGE,
    exact: bool = False,
) -> jax.stages.Compiled:
  """Compiles replay."""
  programs = shapes(
      slots=slots, config=config, group_size=group_size, exact=exact
  )
  return programs.lower("replay").compile()


@functools.cache
def compiled_capture(
    *, slots: int = SLOTS, config: DecoderConfig = LARGE
) -> jax.stages.Compiled:
  """Compiles the capture of one chunk."""
  return shapes(slots=slots, config=config).lower("capture").compile()


@functools.cache
def compiled_sweep(
    *, slots: int = SLOTS, config: DecoderConfig = LARGE
) -> jax.stages.Compiled:
  """Compiles the reverse sweep over one chunk, without a loss of its own."""
  programs = shapes(slots=slots, config=config)
  return programs.lower("prompt_gradient").compile()

"""A model of sizes that occur nowhere else, and programs compiled from shapes.

The axes of a buffer of such a program tell what it holds.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp

from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.policy import Policy, make_policy
from lstraw_jax.prompt_gradient import pull_back_chunk
from lstraw_jax.prompt_state import PromptState, empty_prompt_state
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.state_cotangent import StateCotangent, zero_cotangent
from modeling.qwen3_5 import abstract_model
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.sharding import make_mesh
from tests import tiny

BLOCK, VOCAB, SLOTS, HEAD_ROWS, CHUNK = 1031, 263, 3072, 64, 512
LARGE = tiny.config(
    dtype="float32",
    vocab_size=VOCAB,
    full_attention_interval=2,
    num_hidden_layers=16,
)


def shapes(
    config: Qwen3_5Config, *, slots: int
) -> tuple[Policy, PromptState, StateCotangent]:
  """Returns a policy, a prompt state and its cotangent, as shapes."""
  policy = make_policy(abstract_model(config))
  prompt = jax.eval_shape(
      partial(
          empty_prompt_state,
          config,
          mesh=make_mesh(),
          capacity=slots,
          chunk_tokens=CHUNK,
          batch=1,
      )
  )
  return policy, prompt, jax.eval_shape(zero_cotangent, policy, prompt)


@functools.cache
def compiled_replay(
    *,
    group_size: int = 2,
    slots: int = SLOTS,
    config: Qwen3_5Config = LARGE,
    exact: bool = False,
) -> jax.stages.Compiled:
  """Replay of responses of two blocks."""
  policy, prompt, cotangent = shapes(config, slots=slots)
  shape = partial(jax.ShapeDtypeStruct, (1, group_size, 2 * BLOCK))
  branches = BranchBatch(
      inputs=shape(jnp.int32),
      targets=shape(jnp.int32),
      valid=shape(bool),
      loss_mask=shape(bool),
      old_log_probs=shape(jnp.float32),
      ref_log_probs=None,
      advantages=jax.ShapeDtypeStruct((1, group_size), jnp.float32),
  )
  lowered = replay.lower(
      policy,
      prompt,
      branches,
      jax.eval_shape(zero_gradients, policy),
      cotangent if exact else None,
      config=ReplayConfig(block_tokens=BLOCK, head_chunk_tokens=HEAD_ROWS),
  )
  return lowered.compile()


@functools.cache
def compiled_sweep(*, slots: int = SLOTS) -> jax.stages.Compiled:
  """The reverse sweep over one chunk, without a loss of its own."""
  policy, prompt, cotangent = shapes(LARGE, slots=slots)
  shape = jax.ShapeDtypeStruct
  lowered = pull_back_chunk.lower(
      policy,
      prompt,
      prompt.recurrent,
      shape((1, CHUNK), jnp.int32),
      shape((), jnp.int32),
      None,
      jax.eval_shape(zero_gradients, policy),
      cotangent,
      shape((), jnp.float32),
      head_chunk_tokens=0,
  )
  return lowered.compile()

"""A prompt and a group of responses, drawn at random, with a random model."""

import dataclasses

import numpy as np
from flax import nnx

from lstraw_jax.policy import Policy, make_policy
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.rollouts import (
    BranchBatch,
    Rollout,
    RolloutGroup,
    to_branch_batch,
)
from modeling.models import make_model
from modeling.presets import preset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """A prompt and a group of responses, all tokens drawn at random."""

  policy: Policy
  prompt_tokens: np.ndarray  # [P]
  branches: BranchBatch  # leaves [1, G, R]
  chunk_tokens: int
  config: ReplayConfig


def make_problem(
    *,
    model: str,
    prompt_tokens: int,
    response_tokens: int,
    group_size: int,
    chunk_tokens: int,
) -> Problem:
  """Draws weights, tokens and rewards."""
  config = preset(model)
  policy = make_policy(make_model(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(0, config.vocab_size, n).astype(np.int32)
  prompt = draw(prompt_tokens)
  rollouts = [
      Rollout(
          tokens=draw(response_tokens),
          reward=0.0,
          log_probs=None,
          loss_mask=np.ones(response_tokens, bool),
      )
      for _ in range(group_size)
  ]
  group = RolloutGroup(
      group_id="0", prompt_tokens=prompt, rollouts=tuple(rollouts)
  )
  branches = to_branch_batch(
      [group],
      advantages=[rng.normal(size=group_size)],
      multiple=response_tokens,
      old_log_probs_from_rollouts=False,
      mesh=policy.mesh,
  )
  return Problem(
      policy=policy,
      prompt_tokens=prompt,
      branches=branches,
      chunk_tokens=chunk_tokens,
      config=ReplayConfig(),
  )

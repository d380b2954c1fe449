"""Staleness: how far a reused prompt state is from one captured anew.

A state that serves several optimizer steps was written by weights of the past.
Its drift is how much that moves the responses' log-probs under the weights of
now, in nats:

    drift = mean over tokens that carry loss of |log p_stale - log p_fresh|

1. The oracle captures the prompts again and scores the responses behind both
   states. It costs what reuse was to save.
2. The estimate is the same oracle on short prompts. Beside the state lies its
   *witness*: the state of the last few tokens of each prompt as prompts of
   their own, by the same weights. Later that alone is captured again, and the
   responses are scored behind the old and the new one.

The estimate costs as many tokens of capture as the witness has, and two scores
of the responses, whatever the length of the prompt. Both drifts have one cause,
weights that read what others wrote, so that they grow together: attention
averages over slots and the recurrent state forgets, hence neither adds up over
a prompt. Their ratio depends on model and length and moves slowly; where a
prompt was captured again it is known, and `prompt_states.py` corrects by it.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lstraw_jax.capture import capture
from lstraw_jax.objectives import (
    ObjectiveConfig,
    denominator,
    grpo_token_losses,
    token_weights,
)
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.scoring import log_probs_behind


class Witness(NamedTuple):
  """The ends of some prompts, and their state as prompts of their own."""

  prompts: tuple[np.ndarray, ...]
  state: PromptState


def drift_nats(
    branches: BranchBatch, *, stale: jax.Array, fresh: jax.Array
) -> float:
  """Returns the mean |stale - fresh| over the tokens that carry loss.

  Args:
    branches: the responses; without a token that carries loss it is nan.
    stale: their log-probs [B,G,R] behind the reused state.
    fresh: those behind a state of the weights of now.
  """
  return float(_mean_distance(stale, fresh, branches.loss_mask))


def loss_change_percent(
    branches: BranchBatch,
    *,
    stale: jax.Array,
    fresh: jax.Array,
    objective: ObjectiveConfig,
) -> float:
  """Returns 100 |loss(stale) - loss(fresh)| / |loss(fresh)|.

  The loss is that of an update on these responses alone: the clipped objective
  with the stored log-probs of the sampler as the old policy's, its sum divided
  by its denominator. At the step that sampled them the ratio is 1, and with
  centred advantages the loss 0: the measure begins a step later.

  Args:
    branches: the responses, with the log-probs of their sampler.
    stale: log-probs [B,G,R] behind the reused state.
    fresh: those behind a state of the weights of now.
    objective: settings.

  Raises:
    ValueError: without the sampler's log-probs.
  """
  if branches.old_log_probs is None:
    raise ValueError(
        "branches.old_log_probs=None: want those of the sampler; with the"
        " policy's own the ratio is 1 and the loss that of no change"
    )
  before, now = (
      float(_loss(log_probs, branches, objective=objective))
      for log_probs in (stale, fresh)
  )
  if before == now:
    return 0.0
  return 100 * abs(before - now) / abs(now) if now else float("inf")


def capture_witness(
    policy: Policy,
    prompts: Sequence[np.ndarray],
    *,
    tokens: int,
    chunk_tokens: int,
) -> Witness:
  """Captures the last tokens of each prompt as a prompt of its own.

  Args:
    policy: the weights, those that capture the prompts themselves.
    prompts: token ids [P] of each.
    tokens: of each prompt; all of it if it has no more.
    chunk_tokens: of the capture of the prompts; here at most.
  """
  shards = policy.mesh.shape["context"]
  ends = tuple(prompt[-tokens:] for prompt in prompts)
  chunk_tokens = min(chunk_tokens, -(-tokens // shards) * shards)
  return Witness(ends, capture(policy, ends, chunk_tokens=chunk_tokens))


def estimate_drift(
    policy: Policy,
    witness: Witness,
    branches: BranchBatch,
    *,
    config: ReplayConfig,
) -> float:
  """Returns an estimate of the drift of the state that a witness belongs to.

  With a witness of whole prompts it is the oracle.

  Args:
    policy: the weights of now.
    witness: made with the state, by the same weights.
    branches: responses to the prompts, of now or of some steps ago.
    config: temperature and sizes of the scores.
  """
  fresh = capture(
      policy, witness.prompts, chunk_tokens=witness.state.chunk_tokens
  )
  return drift_nats(
      branches,
      stale=log_probs_behind(policy, witness.state, branches, config=config),
      fresh=log_probs_behind(policy, fresh, branches, config=config),
  )


@jax.jit
def _mean_distance(stale, fresh, loss_mask):
  distance = jnp.where(loss_mask, jnp.abs(stale - fresh), 0.0)
  return distance.sum() / loss_mask.sum(dtype=distance.dtype)


@partial(jax.jit, static_argnames="objective")
def _loss(log_probs, branches: BranchBatch, *, objective: ObjectiveConfig):
  assert branches.old_log_probs is not None, "the caller checks"
  losses = grpo_token_losses(
      log_probs,
      branches.old_log_probs,
      branches.ref_log_probs,
      advantages=branches.advantages,
      loss_mask=branches.loss_mask,
      config=objective,
  ).loss
  weights = token_weights(
      branches.loss_mask,
      aggregation=objective.aggregation,
      dtype=losses.dtype,
  )
  count = denominator(branches.loss_mask, aggregation=objective.aggregation)
  return (weights * losses).sum() / count.astype(losses.dtype)

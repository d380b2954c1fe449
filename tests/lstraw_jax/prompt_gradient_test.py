"""The exact gradient against one ordinary graph over prompts and responses."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.state_cotangent import zero_cotangent
from modeling.layer_state import empty_recurrent
from tests import tiny

TOLERANCE = 1e-9  # float64, relative to the largest entry of a leaf
KINDS = {
    "dense": tiny.config("tiny"),
    "moe": tiny.config("tiny-moe"),
    "adapters": tiny.config("tiny", lora=tiny.ALL_ADAPTERS),
}
P = 150  # no multiple of a chunk
PROMPT = tiny.tokens(P)
LENGTHS = {2: (9, 20), 5: (1, 20, 5, 13, 8)}
REPLAY = ReplayConfig(block_tokens=8, head_chunk_tokens=8)


@functools.cache
def group(size):
  return tiny.group(PROMPT, LENGTHS[size], masked=0.2)


def exact(
    policy,
    groups,
    *,
    chunk_tokens=64,
    boundary_every=1,
    config=REPLAY,
    loss=None,
    memory_kind="device",
    with_branches=True,
):
  """Returns gradients dropped and exact, and both losses."""
  prompt, tape = capture_with_tape(
      policy,
      [group.prompt_tokens for group in groups],
      tape=TapeConfig(boundary_every=boundary_every, memory_kind=memory_kind),
      chunk_tokens=chunk_tokens,
      memory_kind=memory_kind,
  )
  gradients, cotangent = zero_gradients(policy), zero_cotangent(policy, prompt)
  branch_loss = jnp.zeros(())
  if with_branches:
    branches = tiny.branches(*groups, mesh=policy.mesh)
    found = replay(
        policy, prompt, branches, gradients, cotangent, config=config
    )
    gradients, cotangent, branch_loss = (
        found.gradients,
        found.cotangent,
        found.loss,
    )
  dropped = tiny.copied(gradients)
  gradients, prompt_loss = add_prompt_gradient(
      policy, prompt, tape, gradients, cotangent, policy_step=0, loss=loss
  )
  return dropped, gradients, branch_loss, prompt_loss


@partial(jax.jit, static_argnames=("prompt_tokens", "objective"))
def whole_sequences(
    policy: Policy,
    tokens,
    advantages,
    keep,
    weights,
    *,
    prompt_tokens,
    objective,
):
  """Gradient and losses of [G, P + R] tokens, in one graph from nothing.

  Nothing of the update is used but the model.
  """
  rows, count = tokens.shape

  def loss(trainable):
    model = policy.replace(trainable=trainable).model
    offset = jnp.arange(count - 1, dtype=jnp.int32)
    hidden, _ = model(
        tokens[:, :-1],
        positions_BT=jnp.broadcast_to(offset, (rows, count - 1)),
        prefixes=(),
        recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=rows),
    )
    log_probs = jnp.take_along_axis(
        jax.nn.log_softmax(model.logits(hidden)), tokens[:, 1:, None], axis=-1
    )[..., 0]
    on_prompt = log_probs[0, : prompt_tokens - 1] * weights[1:]
    answers, mask = log_probs[:, prompt_tokens - 1 :], keep
    ratio = jnp.exp(answers - jax.lax.stop_gradient(answers))
    losses = -ratio * advantages[:, None] * mask
    scale = 1.0
    if objective.aggregation == "response_mean":
      scale = jnp.maximum(mask.sum(1, keepdims=True), 1)
    return (losses / scale).sum(), -on_prompt.sum()

  def total(trainable):
    branch, prompt = loss(trainable)
    return branch + prompt, (branch, prompt)

  (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(
      policy.trainable
  )
  return gradients, *losses


def oracle(policy, group, *, weights=None, config=REPLAY, with_branches=True):
  length = max(r.tokens.size for r in group.rollouts)
  pad = lambda x: np.pad(x, (0, length - x.size))
  tokens = np.stack(
      [np.append(group.prompt_tokens, pad(r.tokens)) for r in group.rollouts]
  )
  keep = np.stack([pad(r.loss_mask) for r in group.rollouts])
  advantages = np.array([r.reward for r in group.rollouts], np.float32)
  prompt_tokens = group.prompt_tokens.size
  weights = np.zeros(prompt_tokens) if weights is None else weights
  return whole_sequences(
      policy,
      jnp.asarray(tokens),
      jnp.asarray(advantages, jnp.float64) * float(with_branches),
      jnp.asarray(keep, jnp.float64),
      jnp.asarray(weights),
      prompt_tokens=prompt_tokens,
      objective=config.objective,
  )


@pytest.mark.parametrize(
    "kind,chunk_tokens,boundary_every,group_size",
    [
        ("dense", 64, 1, 2),
        ("dense", 16, 3, 5),
        ("moe", 64, 3, 5),
        ("adapters", 128, 1, 5),
        ("dense", P, 1, 2),
    ],
)
def test_exact_is_the_gradient_of_one_graph_over_everything(
    x64, kind, chunk_tokens, boundary_every, group_size
):
  policy = tiny.policy(KINDS[kind])
  dropped, found, loss, _ = exact(
      policy,
      [group(group_size)],
      chunk_tokens=chunk_tokens,
      boundary_every=boundary_every,
  )
  wanted, wanted_loss, _ = oracle(policy, group(group_size))
  error = tiny.largest_difference(found, wanted)
  print(kind, error, tiny.largest_difference(dropped, wanted))
  assert error < TOLERANCE
  assert tiny.largest_difference(dropped, wanted) > 1e-3
  assert abs(loss - wanted_loss) < TOLERANCE * abs(wanted_loss)

"""The update's gradient against PyTorch, through the prompt and without.

PyTorch computes the whole thing its own way: a cached prompt, under `no_grad`
or with its graph, one call a response, the loss written out below, `backward`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.objectives import ObjectiveConfig, denominator
from lstraw_jax.policy import make_policy
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import Rollout, RolloutGroup, to_branch_batch
from lstraw_jax.state_cotangent import zero_cotangent
from modeling import checkpoint_names
from modeling.sharding import make_mesh

torch = pytest.importorskip("torch")

from tests import glm_oracle, torch_oracle  # noqa: E402, they import torch

pytestmark = pytest.mark.reference

LOSS_TOLERANCE = 1e-9
GRADIENT_TOLERANCE = 1e-9  # of the largest entry of a leaf
OBJECTIVE = ObjectiveConfig(kl_coef=0.3)
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(0, 96, 71)
ADVANTAGES = np.array([1.3, -0.4, 0.7])
LENGTHS = (5, 19, 40)
MASKS = [RNG.random(length) < 0.8 for length in LENGTHS]
# Old log-probs within 0.5 of the policy's: some ratios are clipped.
OLD_SHIFTS = [RNG.uniform(-0.5, 0.5, length) for length in LENGTHS]
REF_SHIFTS = [RNG.uniform(-1.0, 1.0, length) for length in LENGTHS]
MODELS = {
    "dense": torch_oracle.build,
    "moe": partial(torch_oracle.build, moe=True),
    "glm": glm_oracle.build,
}


def torch_loss(log_probs, old, ref, advantage, mask):
  """Mean over the kept tokens of one response."""
  ratio = torch.exp(log_probs - old)
  clipped = torch.clamp(ratio, 0.8, 1.28)
  surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
  kl = torch.exp(ref - log_probs) - (ref - log_probs) - 1
  return (surrogate + 0.3 * kl)[torch.tensor(mask)].mean()


def torch_update(model, responses, *, exact):
  """Runs `backward`; returns the loss, and old and reference log-probs."""
  prompt = torch.tensor(PROMPT)
  total, olds, refs = 0.0, [], []
  with glm_oracle.exact():
    for i, response in enumerate(responses):
      log_probs = torch_oracle.response_log_probs(
          model, prompt, torch.tensor(response), prompt_gradient=exact
      )
      olds.append(log_probs.detach() + torch.tensor(OLD_SHIFTS[i]))
      refs.append(log_probs.detach() + torch.tensor(REF_SHIFTS[i]))
      loss = torch_loss(log_probs, olds[i], refs[i], ADVANTAGES[i], MASKS[i])
      (loss / len(responses)).backward()
      total += float(loss.detach()) / len(responses)
  return total, [x.numpy() for x in olds], [x.numpy() for x in refs]


def our_branches(responses, olds, refs):
  group = RolloutGroup(
      group_id="a",
      prompt_tokens=PROMPT,
      rollouts=tuple(
          Rollout(tokens=x, reward=0.0, log_probs=None, loss_mask=mask)
          for x, mask in zip(responses, MASKS, strict=True)
      ),
  )
  branches = to_branch_batch(
      [group],
      advantages=[ADVANTAGES],
      multiple=8,
      old_log_probs_from_rollouts=False,
      mesh=make_mesh(),
  )
  length = branches.inputs.shape[2]
  pad = lambda rows: jnp.asarray(
      [[np.pad(row, (0, length - row.size)) for row in rows]]
  )
  return dataclasses.replace(
      branches,
      advantages=jnp.asarray([ADVANTAGES]),
      old_log_probs=pad(olds),
      ref_log_probs=pad(refs),
  )


@pytest.mark.parametrize("exact", [False, True], ids=["dropped", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_the_grpo_gradient_is_pytorch_s(x64, model, exact):
  theirs = MODELS[model]()
  config = torch_oracle.our_config(theirs)
  torch_oracle.use_our_frequencies(theirs, config)
  rng = np.random.default_rng(1)
  responses = [rng.integers(0, 96, n).astype(np.int32) for n in LENGTHS]
  wanted_loss, olds, refs = torch_update(theirs, responses, exact=exact)
  wanted = torch_oracle.our_gradients(theirs, config)

  policy = make_policy(torch_oracle.our_model(theirs, config))
  policy = jax.tree.map(jnp.asarray, policy)
  prompt, tape = capture_with_tape(
      policy, [PROMPT], tape=TapeConfig(boundary_every=3), chunk_tokens=16
  )
  branches = our_branches(responses, olds, refs)
  replayed = replay(
      policy,
      prompt,
      branches,
      zero_gradients(policy),
      zero_cotangent(policy, prompt) if exact else None,
      config=ReplayConfig(
          objective=OBJECTIVE,
          block_tokens=16,
          head_chunk_tokens=7,
      ),
  )
  gradients = replayed.gradients
  if exact:
    gradients, _ = add_prompt_gradient(
        policy, prompt, tape, gradients, replayed.cotangent, policy_step=0
    )
  count = int(denominator(branches.loss_mask, aggregation="response_mean"))
  assert count == len(responses)
  assert 0 < replayed.stats.clipped < replayed.stats.tokens
  loss_error = abs(float(replayed.loss) / count - wanted_loss)
  assert loss_error < LOSS_TOLERANCE
  ours = {
      path: x.get_value()
      for path, x in checkpoint_names.variables(gradients).items()
  }
  errors = {}
  for path, gradient in wanted.items():
    size = np.abs(gradient).max()
    if path not in ours:  # not trained: indexers, and the routers' biases
      assert size == 0, path
      continue
    assert size > 0, path
    errors[path] = (
        np.abs(np.asarray(ours[path]) / count - gradient).max() / size
    )
    assert errors[path] < GRADIENT_TOLERANCE, (path, errors[path])
  print(f"loss {loss_error:.1e}, worst gradient {max(errors.values()):.1e}")

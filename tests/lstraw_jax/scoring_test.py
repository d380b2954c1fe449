"""Scores behind a captured prompt against one pass over prompt and response."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture
from lstraw_jax.log_probs import TokenScores
from lstraw_jax.scoring import score
from modeling.layer_state import empty_recurrent
from tests import tiny

FLOAT64_TOLERANCE = 1e-11
NAMES = ("tiny", "tiny-moe", "tiny-glm")
CONFIGS = {name: tiny.config(name) for name in NAMES}
PROMPT = tiny.tokens(21)
OTHER = tiny.tokens(18, seed=9)  # of another length, in the same bucket
LENGTHS = (1, 20, 5, 13)
TEMPERATURE = 0.7


@functools.cache
def captured(name):
  """The prompt's state under the policy of that name."""
  return tiny.captured(tiny.policy(CONFIGS[name]), PROMPT)


def scores(name, branches, *, prompt=None, block_tokens=7):
  """Scores branches behind a prompt's state, by default that of PROMPT."""
  return score(
      tiny.policy(CONFIGS[name]),
      captured(name) if prompt is None else prompt,
      branches,
      temperature=TEMPERATURE,
      block_tokens=block_tokens,
      head_chunk_tokens=3,
  )


@jax.jit
def full_pass(policy, sequences, lengths, targets):
  """Scores of targets [G, R] by one pass over sequences [G, P - 1 + R]."""
  offset = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
  hidden, _ = policy.model(
      sequences,
      positions_BT=jnp.where(offset < lengths[:, None], offset, -1),
      prefixes=(),
      recurrent=empty_recurrent(
          policy.config, mesh=policy.mesh, batch=sequences.shape[0]
      ),
  )
  logits = policy.model.logits(hidden[:, -targets.shape[1] :])
  log_probs = jax.nn.log_softmax(logits / TEMPERATURE)
  picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
  return TokenScores(picked[..., 0], -(jnp.exp(log_probs) * log_probs).sum(-1))


def oracle(name, branches):
  """Scores [1, G, R] of one pass, 0 where nothing is asked."""
  inputs, targets, valid = branches.inputs, branches.targets, branches.valid
  prompts = np.tile(PROMPT[None, :-1], (inputs.shape[1], 1))
  found = full_pass(
      tiny.policy(CONFIGS[name]),
      np.concatenate([prompts, inputs[0]], axis=1),
      len(PROMPT) - 1 + valid[0].sum(1, dtype=jnp.int32),
      targets[0],
  )
  return jax.tree.map(
      lambda x: np.where(branches.loss_mask, x[None], 0), jax.device_get(found)
  )


@pytest.mark.parametrize(
    "name,block_tokens",
    [
        ("tiny", 7),
        ("tiny-moe", 64),
        pytest.param("tiny-glm", 7, marks=pytest.mark.first_class),
    ],
)
def test_ragged_responses_score_as_in_one_pass(x64, name, block_tokens):
  branches = tiny.branches(tiny.group(PROMPT, LENGTHS))
  found = scores(name, branches, block_tokens=block_tokens)
  wanted = oracle(name, branches)
  assert found.log_probs.shape == (1, 4, 20)
  for ours, theirs in zip(found, wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=FLOAT64_TOLERANCE, rtol=0)
  mask = np.asarray(branches.loss_mask)
  assert mask.sum(2).tolist() == [list(LENGTHS)]
  assert (found.log_probs[mask] < 0).all()
  assert (found.log_probs[~mask] == 0).all()


def test_prompts_of_a_batch_score_as_each_alone(x64):
  """Also where one has fewer responses: the missing ones score 0."""
  policy = tiny.policy(CONFIGS["tiny"])
  groups = tiny.group(PROMPT, LENGTHS), tiny.group(OTHER, (20, 3), seed=5)
  branches = tiny.branches(*groups)
  both = scores(
      "tiny",
      branches,
      prompt=capture(policy, [PROMPT, OTHER], chunk_tokens=8),
  )
  for row, prompt in enumerate((PROMPT, OTHER)):
    alone = scores(
        "tiny",
        jax.tree.map(lambda x, row=row: x[row : row + 1], branches),
        prompt=tiny.captured(policy, prompt),
    )
    for ours, theirs in zip(both, alone, strict=True):
      np.testing.assert_allclose(
          ours[row], theirs[0], atol=FLOAT64_TOLERANCE, rtol=0
      )
  real = np.asarray(both.log_probs < 0).sum(2)
  assert real.tolist() == [list(LENGTHS), [20, 3, 0, 0]]


def test_a_token_without_loss_is_context_all_the_same(x64):
  group = tiny.group(PROMPT, LENGTHS)
  masked = tiny.group(PROMPT, LENGTHS, masked=0.5)
  mask = np.asarray(tiny.branches(masked).loss_mask)
  assert 5 < mask.sum() < sum(LENGTHS) - 5
  whole = scores("tiny", tiny.branches(group)).log_probs
  found = scores("tiny", tiny.branches(masked)).log_probs
  np.testing.assert_array_equal(found, np.where(mask, whole, 0))


def test_a_response_scores_the_same_whatever_its_siblings(x64):
  branches = tiny.branches(tiny.group(PROMPT, LENGTHS))
  order = jnp.array([2, 0, 3, 1])
  whole = scores("tiny", branches)
  permuted = scores("tiny", jax.tree.map(lambda x: x[:, order], branches))
  jax.tree.map(
      lambda ours, theirs: np.testing.assert_array_equal(
          ours, theirs[:, order]
      ),
      permuted,
      whole,
  )


def test_padding_tokens_do_not_matter(x64):
  branches = tiny.branches(tiny.group(PROMPT, LENGTHS))
  garbage = lambda x: jnp.where(branches.valid, x, 77)
  changed = dataclasses.replace(
      branches,
      inputs=garbage(branches.inputs),
      targets=garbage(branches.targets),
  )
  jax.tree.map(
      np.testing.assert_array_equal,
      scores("tiny", changed),
      scores("tiny", branches),
  )


def test_scoring_leaves_the_prompt_bitwise_as_it_was(x64):
  before = tiny.copied(captured("tiny"))
  scores("tiny", tiny.branches(tiny.group(PROMPT, LENGTHS)))
  jax.tree.map(
      np.testing.assert_array_equal, tiny.copied(captured("tiny")), before
  )

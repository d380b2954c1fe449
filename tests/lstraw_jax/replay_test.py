"""Replay against one ordinary graph over all branches, and what it holds."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.objectives import ObjectiveConfig, denominator
from lstraw_jax.policy import make_policy
from lstraw_jax.prompt_state import empty_prompt_state, nbytes
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.scoring import score
from modeling.models import abstract_model
from modeling.sharding import make_mesh
from tests import programs, tiny
from tests.large import (
    BLOCK,
    HEAD_ROWS,
    LARGE,
    SLOTS,
    VOCAB,
    compiled_replay,
)

GRADIENT_TOLERANCE = 1e-10  # float64, relative to the largest entry of a leaf
FLOAT64_TOLERANCE = 1e-12
KINDS = {
    "dense": tiny.config("tiny"),
    "moe": tiny.config("tiny-moe"),
    "glm": tiny.config("tiny-glm"),
    "adapters": tiny.config("tiny", lora=tiny.ALL_ADAPTERS),
}
WITH_GLM = pytest.mark.parametrize(
    "kind", ["dense", pytest.param("glm", marks=pytest.mark.first_class)]
)
PROMPT_TOKENS = 21
PROMPT = tiny.tokens(PROMPT_TOKENS)
OTHER = tiny.tokens(18, seed=9)  # of another length, in the same bucket
LENGTHS = (1, 20, 5, 13)
PLAIN = ReplayConfig(head_chunk_tokens=8)
# Every term of the objective at once; tool tokens are masked.
FULL = dataclasses.replace(
    PLAIN,
    temperature=0.7,
    block_tokens=7,
    objective=ObjectiveConfig(kl_coef=0.1, aggregation="token_mean"),
)


@functools.cache
def captured(kind, *, prompt_tokens=PROMPT_TOKENS):
  """The prompt's state under the policy of that kind."""
  return tiny.captured(tiny.policy(KINDS[kind]), PROMPT[:prompt_tokens])


def plain_branches():
  """Four ragged responses whose every token carries loss."""
  return tiny.branches(tiny.group(PROMPT, LENGTHS))


def full_branches(kind):
  """The same with tool tokens, old and reference log-probs at some distance."""
  branches = tiny.branches(tiny.group(PROMPT, LENGTHS, masked=0.3))
  unknown = jnp.zeros(branches.inputs.shape)
  branches = dataclasses.replace(
      branches, old_log_probs=unknown, ref_log_probs=unknown
  )
  _, _, log_probs = oracle(
      tiny.policy(KINDS[kind]), captured(kind), branches, config=FULL
  )
  rng = np.random.default_rng(0)
  near = lambda std: log_probs + std * rng.normal(size=log_probs.shape)
  return dataclasses.replace(
      branches, old_log_probs=near(0.4), ref_log_probs=near(0.4)
  )


def replayed(kind, branches, config=PLAIN, *, prompt=None, **settings):
  """Replays branches behind a prompt's state, by default that of PROMPT."""
  policy = tiny.policy(KINDS[kind])
  prompt = captured(kind) if prompt is None else prompt
  config = dataclasses.replace(config, **settings)
  gradients = zero_gradients(policy)
  return replay(policy, prompt, branches, gradients, None, config=config)


def part(branches, *, row=0, index):
  """One branch, as a batch of its own."""
  return jax.tree.map(lambda x: x[row : row + 1, index : index + 1], branches)


def sum_of(parts):
  """Gradients and loss of several replays, added up."""
  told = [jax.device_get((one.gradients, one.loss)) for one in parts]
  return jax.tree.map(lambda *x: sum(x), *told)


@partial(jax.jit, static_argnames="config")
def oracle(policy, prompt, branches, *, config):
  """Loss, gradient and log-probs of a prompt's branches, in one graph.

  The prompt's state is a constant. Nothing of the update is used but the model.
  """
  branches = jax.tree.map(lambda x: x[0], branches)
  rows, steps = branches.inputs.shape

  def loss(trainable):
    model = policy.replace(trainable=trainable).model
    offset = jnp.arange(steps, dtype=jnp.int32)[None]
    positions = prompt.length[:, None] + offset
    hidden, _ = model(
        branches.inputs,
        positions_BT=jnp.where(branches.valid, positions, -1),
        prefixes=(prompt.prefix,) if prompt.capacity else (),
        recurrent=jax.tree.map(
            lambda x: jnp.repeat(x, rows, axis=2), prompt.recurrent
        ),
    )
    logits = model.logits(hidden) / config.temperature
    log_probs = jnp.take_along_axis(
        jax.nn.log_softmax(logits), branches.targets[..., None], axis=-1
    )[..., 0]
    return grpo(log_probs, branches, config.objective), log_probs

  (total, log_probs), gradients = jax.value_and_grad(loss, has_aux=True)(
      policy.trainable
  )
  return total, gradients, jnp.where(branches.loss_mask, log_probs, 0.0)[None]


def grpo(log_probs, branches: BranchBatch, objective):
  """The unnormalised loss of a group, written out."""
  old = branches.old_log_probs
  old = jax.lax.stop_gradient(log_probs) if old is None else old
  ratio = jnp.exp(log_probs - old)
  low, high = 1 - objective.clip_eps_low, 1 + objective.clip_eps_high
  advantages = branches.advantages[:, None].astype(ratio.dtype)
  losses = -jnp.minimum(
      ratio * advantages, jnp.clip(ratio, low, high) * advantages
  )
  if objective.kl_coef:
    apart = branches.ref_log_probs - log_probs
    losses += objective.kl_coef * (jnp.exp(apart) - apart - 1)
  weights = branches.loss_mask.astype(losses.dtype)
  if objective.aggregation == "response_mean":
    weights /= weights.sum(1, keepdims=True)
  return jnp.where(branches.loss_mask, losses * weights, 0.0).sum()


def assert_equals_oracle(kind, branches, found, config):
  """Holds loss, gradients and log-probs against the oracle."""
  loss, gradients, log_probs = oracle(
      tiny.policy(KINDS[kind]), captured(kind), branches, config=config
  )
  ours = (found.gradients, found.loss, found.log_probs)
  wanted = (gradients, loss, log_probs)
  assert tiny.largest_difference(ours, wanted) < GRADIENT_TOLERANCE
  leaves = jax.tree.leaves(jax.device_get(found.gradients))
  assert leaves and all(np.abs(leaf).max() > 1e-6 for leaf in leaves)


@pytest.mark.parametrize(
    "kind,block_tokens", [("dense", 7), ("moe", 64), ("glm", 7)]
)
def test_the_gradient_is_that_of_one_graph_behind_a_constant_prompt(
    x64, kind, block_tokens
):
  branches = plain_branches()
  found = replayed(kind, branches, block_tokens=block_tokens)
  assert_equals_oracle(kind, branches, found, PLAIN)


@pytest.mark.first_class
def test_every_term_of_the_objective_reaches_every_adapter(x64):
  branches = full_branches("adapters")
  found = replayed("adapters", branches, FULL)
  assert_equals_oracle("adapters", branches, found, FULL)
  mask = np.asarray(branches.loss_mask)
  log_probs = np.asarray(found.log_probs)[mask]
  ratio = np.exp(log_probs - np.asarray(branches.old_log_probs)[mask])
  apart = np.asarray(branches.ref_log_probs)[mask] - log_probs
  advantages = np.broadcast_to(branches.advantages[..., None], mask.shape)
  advantages = advantages[mask]
  clipped = ((advantages > 0) & (ratio > 1.28)) | (
      (advantages < 0) & (ratio < 0.8)
  )
  assert 2 < clipped.sum() < mask.sum() - 2 and mask.sum() < sum(LENGTHS) - 4
  stats = found.stats
  assert float(stats.tokens) == mask.sum()
  assert float(stats.clipped) == clipped.sum()
  np.testing.assert_allclose(stats.ratio_sum, ratio.sum(), rtol=1e-10)
  np.testing.assert_allclose(stats.ratio_max, ratio.max(), rtol=1e-10)
  np.testing.assert_allclose(
      stats.kl_sum, (np.exp(apart) - apart - 1).sum(), rtol=1e-10
  )


def test_a_response_longer_than_a_block_has_the_gradient_of_one_block(x64):
  whole = replayed("dense", plain_branches(), block_tokens=64)
  cut = replayed("dense", plain_branches(), block_tokens=7)
  assert tiny.largest_difference(cut, whole) < GRADIENT_TOLERANCE


def test_the_first_ratio_is_exactly_one(x64):
  for block_tokens in (64, 7):
    found = replayed("dense", plain_branches(), block_tokens=block_tokens)
    means = found.stats.means()
    assert means["ratio_mean"] == means["ratio_max"] == 1.0
    assert means["clip_share"] == means["kl_nats"] == 0.0


def test_log_probs_and_entropy_are_those_of_scoring(x64):
  branches = plain_branches()
  scores = score(
      tiny.policy(KINDS["dense"]),
      captured("dense"),
      branches,
      temperature=1.0,
      block_tokens=64,
      head_chunk_tokens=8,
  )
  found = replayed("dense", branches, block_tokens=7)
  np.testing.assert_allclose(
      found.log_probs, scores.log_probs, atol=FLOAT64_TOLERANCE, rtol=0
  )
  np.testing.assert_allclose(
      found.stats.entropy_sum, scores.entropy.sum(), rtol=FLOAT64_TOLERANCE
  )


@WITH_GLM
def test_a_group_is_the_sum_of_its_branches(x64, kind):
  """In blocks of another size than the group's, which does not matter."""
  branches = plain_branches()
  whole = replayed(kind, branches, block_tokens=64)
  ones = [
      replayed(kind, part(branches, index=index), block_tokens=16)
      for index in range(len(LENGTHS))
  ]
  log_probs = np.concatenate([one.log_probs for one in ones], axis=1)
  summed = (*sum_of(ones), log_probs)
  together = (whole.gradients, whole.loss, whole.log_probs)
  assert tiny.largest_difference(summed, together) < FLOAT64_TOLERANCE


def test_prompts_of_a_batch_are_the_sum_of_their_branches(x64):
  """Those that fill up the smaller group add nothing and are not counted."""
  policy, prompts = tiny.policy(KINDS["dense"]), (PROMPT, OTHER)
  groups = tiny.group(PROMPT, LENGTHS), tiny.group(OTHER, (20, 3), seed=5)
  branches = tiny.branches(*groups)
  whole = replayed(
      "dense",
      branches,
      prompt=capture(policy, prompts, chunk_tokens=8),
      block_tokens=16,
  )
  ones = {
      (row, index): replayed(
          "dense",
          part(branches, row=row, index=index),
          prompt=tiny.captured(policy, prompts[row]),
          block_tokens=16,
      )
      for row, group in enumerate(groups)
      for index in range(len(group.rollouts))
  }
  found = (whole.gradients, whole.loss)
  assert tiny.largest_difference(found, sum_of(ones.values())) < 1e-11
  for (row, index), one in ones.items():
    np.testing.assert_allclose(
        whole.log_probs[row, index], one.log_probs[0, 0], atol=1e-11, rtol=0
    )
  assert not whole.log_probs[1, 2:].any()
  counted = partial(denominator, branches.loss_mask)
  assert counted(aggregation="response_mean") == len(ones) == 6
  assert counted(aggregation="token_mean") == sum(LENGTHS) + 23
  assert float(whole.stats.tokens) == sum(LENGTHS) + 23


def test_gradients_are_added_to_those_given(x64):
  policy, branches = tiny.policy(KINDS["dense"]), plain_branches()
  whole = replayed("dense", branches, block_tokens=64)
  given = jax.tree.map(lambda x: 2.0 * x + 1.0, whole.gradients)
  wanted = jax.tree.map(lambda x: 3.0 * x + 1.0, tiny.copied(whole.gradients))
  config = dataclasses.replace(PLAIN, block_tokens=64)
  found = replay(
      policy, captured("dense"), branches, given, None, config=config
  )
  assert tiny.largest_difference(found.gradients, wanted) < FLOAT64_TOLERANCE
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_the_order_of_the_branches_does_not_matter(x64):
  branches = plain_branches()
  order = jnp.array([3, 1, 0, 2])
  whole = replayed("dense", branches, block_tokens=64)
  permuted = replayed(
      "dense",
      jax.tree.map(lambda x: x[:, order], branches),
      block_tokens=64,
  )
  assert (
      tiny.largest_difference(permuted.gradients, whole.gradients)
      < FLOAT64_TOLERANCE
  )
  np.testing.assert_array_equal(permuted.log_probs, whole.log_probs[:, order])


@WITH_GLM
def test_one_token_behind_a_prompt_of_one_token_and_its_progress(x64, kind):
  """The prompt's state is empty: this is the gradient of the plain model."""
  policy, calls = tiny.policy(KINDS[kind]), []
  prompt = captured(kind, prompt_tokens=1)
  branches = tiny.branches(tiny.group(PROMPT[:1], (1, 1, 1)), multiple=1)
  found = replay(
      policy,
      prompt,
      branches,
      zero_gradients(policy),
      None,
      config=PLAIN,
      progress=lambda *call: calls.append(call),
  )
  jax.effects_barrier()
  assert sorted(calls) == [("replay", n, 3) for n in (1, 2, 3)]
  nothing = empty_prompt_state(
      KINDS[kind], mesh=make_mesh(), capacity=0, chunk_tokens=8, batch=1
  )
  loss, gradients, log_probs = oracle(policy, nothing, branches, config=PLAIN)
  ours = (found.gradients, found.loss, found.log_probs)
  wanted = (gradients, loss, log_probs)
  assert tiny.largest_difference(ours, wanted) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("kind", ["dense", "glm"])
def test_replay_leaves_the_prompt_bitwise_as_it_was(x64, kind):
  before = tiny.copied(captured(kind))
  jax.block_until_ready(replayed(kind, plain_branches(), block_tokens=7))
  assert not any(x.is_deleted() for x in jax.tree.leaves(captured(kind)))
  jax.tree.map(
      np.testing.assert_array_equal, tiny.copied(captured(kind)), before
  )


@pytest.mark.parametrize(
    "name,value",
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("block_tokens", 0),
        ("head_chunk_tokens", 0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"{name}={value}: want"):
    dataclasses.replace(PLAIN, **{name: value})


@pytest.mark.first_class
def test_memory_does_not_grow_with_the_group():
  """Temporaries alone: of the inputs and outputs [G, R] grow, 18 B a token."""
  few, many = compiled_replay(group_size=2), compiled_replay(group_size=16)
  one_branch = programs.temp_bytes(few)
  print(f"bytes: G=2 {one_branch:,}, G=16 {programs.temp_bytes(many):,}")
  assert one_branch > 10 * nbytes(LARGE, capacity=BLOCK)  # a branch dominates
  assert abs(programs.temp_bytes(many) / one_branch - 1) < 0.01


@pytest.mark.first_class
def test_memory_does_not_grow_with_the_prompt_beyond_its_state():
  """No gradient of its keys and values exists, nor a copy of any layer."""
  small, large = compiled_replay(slots=SLOTS), compiled_replay(slots=4 * SLOTS)
  growth = programs.temp_bytes(large) - programs.temp_bytes(small)
  state_growth = nbytes(LARGE, capacity=3 * SLOTS) - nbytes(LARGE, capacity=0)
  print(f"4 times the slots: state +{state_growth:,} bytes, replay +{growth:,}")
  assert growth < 2 * 3 * SLOTS  # who sees which slot
  analyses = [program.memory_analysis() for program in (small, large)]
  inputs = [analysis.argument_size_in_bytes for analysis in analyses]
  assert inputs[1] - inputs[0] == state_growth


@pytest.mark.first_class
def test_memory_grows_with_depth_by_inputs_and_keys_alone():
  """Activations are rematerialised layer by layer.

  Measured: 18 arrays [T, D] for a linear and a full layer, among them keys,
  values and their gradients for two blocks; 68 if the full layers kept their
  activations.
  """
  deep = LARGE.replace(num_hidden_layers=32)
  growth = programs.temp_bytes(compiled_replay(config=deep))
  growth -= programs.temp_bytes(compiled_replay())
  blocks = deep.num_blocks - LARGE.num_blocks
  assert growth / blocks < 22 * BLOCK * LARGE.hidden_size * 4


def test_the_gradients_are_accumulated_in_place():
  policy = make_policy(abstract_model(LARGE))
  gradients = jax.tree.leaves(jax.eval_shape(zero_gradients, policy))
  wanted = sum(leaf.size * leaf.dtype.itemsize for leaf in gradients)
  assert compiled_replay().memory_analysis().alias_size_in_bytes == wanted


@pytest.mark.first_class
def test_no_buffer_holds_the_vocabulary_for_more_rows_than_a_chunk():
  with_vocab = programs.buffers_with(compiled_replay(), VOCAB)
  assert (1, HEAD_ROWS, VOCAB) in with_vocab
  rows = [np.prod(shape) // VOCAB for shape in with_vocab]
  assert max(rows) == max(HEAD_ROWS, LARGE.hidden_size)


@pytest.mark.parametrize(
    "keys,count",
    [("the block's own", BLOCK), ("the branch's", 2 * BLOCK), ("all", SLOTS)],
)
def test_no_buffer_holds_the_scores_of_a_block(keys, count):
  """Attention pads keys to blocks of 512: that size is looked for as well."""
  padded = -(-count // 512) * 512
  assert programs.buffers_with(compiled_replay(), BLOCK, 512)
  for size in {count, padded}:
    assert not programs.buffers_with(compiled_replay(), BLOCK, size)

"""Choices that were recorded are made again: of tokens, and of experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.capture import capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import Rollout, RolloutGroup
from lstraw_jax.sampling import SamplingConfig, sample, to_rollouts
from lstraw_jax.scoring import log_probs_behind
from modeling import checkpoint_names
from modeling.layer_state import NOTHING_RECORDED, Record
from modeling.sharding import make_mesh
from tests import tiny

pytestmark = pytest.mark.first_class

TOLERANCE = 1e-11
CONFIG = tiny.config("tiny-glm")
PROMPT = tiny.tokens(38)
BOTH = ("selections", "experts")
REPLAY = ReplayConfig(block_tokens=8, head_chunk_tokens=8)
MESHES = {"one": (1, 1), "many": (1, 4)}


def policy(mesh):
  data, context = MESHES[mesh]
  return tiny.policy(CONFIG, mesh=make_mesh(data=data, context=context))


@functools.cache
def captured(mesh):
  return capture(policy(mesh), [PROMPT], chunk_tokens=16, capacity=48)


@functools.cache
def drawn(mesh, *, record=BOTH) -> RolloutGroup:
  """Responses with what was chosen for them."""
  samples = sample(
      policy(mesh),
      captured(mesh),
      jax.random.key(0)[None],
      group_size=2,
      config=SamplingConfig(max_tokens=11, record=record),
  )
  one = jax.tree.map(lambda x: x[0], samples)
  return RolloutGroup(
      group_id="a",
      prompt_tokens=PROMPT,
      rollouts=to_rollouts(one, rewards=[1.0, -0.5]),
  )


def with_record(group, record):
  """The same responses with other records; `record` maps the old ones."""
  return dataclasses.replace(
      group,
      rollouts=tuple(
          dataclasses.replace(r, record=record(r.record))
          for r in group.rollouts
      ),
  )


def replayed(mesh, group):
  """Log-probs [G,R], and gradients by name."""
  made = policy(mesh)
  found = replay(
      made,
      captured(mesh),
      tiny.branches(group, mesh=made.mesh),
      zero_gradients(made),
      None,
      config=REPLAY,
  )
  gradients = checkpoint_names.variables(found.gradients)
  named = {
      ".".join(path): np.asarray(x.get_value()) for path, x in gradients.items()
  }
  return np.asarray(found.log_probs[0]), named


def none(record):
  del record
  return NOTHING_RECORDED


def other_experts(record):
  """Each token goes to the next expert instead."""
  count = CONFIG.n_routed_experts
  return record._replace(experts=(record.experts + 1) % count)


def latest_tokens(record):
  """Each token attends to the latest ones instead."""
  count = record.selections.shape[-1]
  position = len(PROMPT) - 1 + np.arange(len(record.selections))
  latest = position[:, None] - np.arange(count)
  return record._replace(
      selections=np.broadcast_to(
          latest[:, None], record.selections.shape
      ).astype(np.int32)
  )


@pytest.mark.parametrize("mesh", MESHES)
def test_replay_of_the_sampler_s_choices_is_that_of_its_own(x64, mesh):
  group = drawn(mesh)
  record = group.rollouts[0].record
  assert record.selections.shape == (11, 2, CONFIG.index_topk)
  assert record.experts.shape == (11, 4, CONFIG.num_experts_per_tok)
  log_probs, gradients = replayed(mesh, group)
  wanted, wanted_gradients = replayed(mesh, with_record(group, none))
  np.testing.assert_allclose(log_probs, wanted, atol=TOLERANCE, rtol=0)
  sampled = [r.log_probs for r in group.rollouts]
  np.testing.assert_allclose(
      log_probs[:, :11], np.stack(sampled), atol=TOLERANCE, rtol=0
  )
  error = tiny.largest_difference(gradients, wanted_gradients)
  assert error < TOLERANCE
  assert np.abs(gradients["runs.0.sharers.0.mlp.gate.kernel"]).max() > 1e-6


@pytest.mark.parametrize("change", [other_experts, latest_tokens])
def test_other_choices_are_made_as_they_are_told(x64, change):
  group = with_record(drawn("one"), change)
  log_probs, gradients = replayed("one", group)
  own, _ = replayed("one", drawn("one"))
  assert np.abs(log_probs - own).max() > 0.01
  many, gradients_of_many = replayed("many", group)
  np.testing.assert_allclose(many, log_probs, atol=TOLERANCE, rtol=0)
  assert tiny.largest_difference(gradients_of_many, gradients) < TOLERANCE
  # The router still learns, from the weights of the experts it was given.
  assert np.abs(gradients["runs.0.sharers.0.mlp.gate.kernel"]).max() > 1e-6


def test_scores_choose_as_replay_does(x64):
  group = with_record(drawn("one"), latest_tokens)
  branches = tiny.branches(group)
  scores = log_probs_behind(
      policy("one"), captured("one"), branches, config=REPLAY
  )
  wanted, _ = replayed("one", group)
  np.testing.assert_allclose(scores[0], wanted, atol=TOLERANCE, rtol=0)


def test_one_kind_of_choice_can_be_recorded_alone(x64):
  record = drawn("one", record=("experts",)).rollouts[0].record
  assert record.selections is None and record.experts is not None
  assert drawn("one", record=()).rollouts[0].record == NOTHING_RECORDED


def test_what_a_model_does_not_choose_is_not_recorded():
  qwen = tiny.policy(tiny.config("tiny", dtype="float32"))
  with pytest.raises(ValueError, match="this model chooses nothing"):
    sample(
        qwen,
        capture(qwen, [PROMPT], chunk_tokens=16),
        jax.random.key(0)[None],
        group_size=1,
        config=SamplingConfig(max_tokens=2, record=BOTH),
    )
  with pytest.raises(ValueError, match="replays no choices"):
    qwen.model(
        jnp.zeros((1, 2), jnp.int32),
        positions_BT=jnp.zeros((1, 2), jnp.int32),
        prefixes=(),
        recurrent=None,
        record=Record(experts=jnp.zeros((1, 1, 2, 2), jnp.int32)),
    )


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: SamplingConfig(max_tokens=1, record=("expert",)), "'expert'"),
        (
            lambda: Rollout(
                tokens=PROMPT[:3],
                reward=0.0,
                log_probs=None,
                loss_mask=np.ones(3, bool),
                record=Record(experts=np.zeros((2, 4, 2), np.int32)),
            ),
            r"record.experts.shape=\(2, 4, 2\)",
        ),
    ],
)
def test_records_that_do_not_fit_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_record_of_some_responses_alone_is_refused(x64):
  first, second = drawn("one").rollouts
  group = dataclasses.replace(
      drawn("one"),
      rollouts=(first, dataclasses.replace(second, record=NOTHING_RECORDED)),
  )
  with pytest.raises(ValueError, match="on 1 of 2 responses"):
    tiny.branches(group)

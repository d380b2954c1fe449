"""One device and every mesh: the same values, and the same gradient per leaf.

Prompts leave shards empty (one token; three), fill them unevenly, and end in a
tail; groups are ragged, and so are their responses.
"""

import functools

import jax
import numpy as np
import pytest

from lstraw_jax.capture import capture
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import RolloutGroup
from lstraw_jax.sampling import SamplingConfig, sample
from lstraw_jax.scoring import score
from modeling import checkpoint_names
from modeling.sharding import make_mesh, shardings
from tests import tiny

ONE = (1, 1, 1)
TOLERANCE = 1e-10  # float64, relative to the largest entry of a leaf
KINDS = {
    # Gated DeltaNet by heads on every mesh below,
    "dense": tiny.config(linear_num_key_heads=8, linear_num_value_heads=16),
    # and by state passing: no mesh divides two key heads.
    "moe": tiny.config("tiny-moe"),
}
PROMPT_TOKENS = (1, 38, 3, 33)
LENGTHS = ((1, 20, 5), (7, 2), (13,), (4, 4, 18))
GROUPS = [
    tiny.group(tiny.tokens(count, seed=index), lengths, masked=0.2, seed=index)
    for index, (count, lengths) in enumerate(
        zip(PROMPT_TOKENS, LENGTHS, strict=True)
    )
]
REPLAY = ReplayConfig(block_tokens=16, head_chunk_tokens=8)


def mesh_of(sizes: tuple[int, int, int]):
  data, context, tensor = sizes
  return make_mesh(data=data, context=context, tensor=tensor)


def turns(groups: list[RolloutGroup], rows: int) -> list[list[RolloutGroup]]:
  """Cuts the groups into turns of as many as the mesh has replicas."""
  return [groups[i : i + rows] for i in range(0, len(groups), rows)]


def captured(policy, groups):
  prompts = [group.prompt_tokens for group in groups]
  return capture(policy, prompts, chunk_tokens=16, capacity=48)


@functools.cache
def replayed(kind: str, sizes: tuple[int, int, int]):
  """Returns gradients by weight, the loss, and log-probs by response."""
  mesh = mesh_of(sizes)
  policy = tiny.policy(KINDS[kind], mesh=mesh)
  gradients = zero_gradients(policy)
  loss, tokens, log_probs = 0.0, 0.0, []
  for groups in turns(GROUPS, mesh.shape["data"]):
    found = replay(
        policy,
        captured(policy, groups),
        tiny.branches(*groups, multiple=24, mesh=mesh),
        gradients,
        None,
        config=REPLAY,
    )
    gradients = found.gradients
    loss += float(found.loss)
    tokens += float(found.stats.tokens)
    for group, rows in zip(groups, np.asarray(found.log_probs), strict=True):
      assert not rows[len(group.rollouts) :].any()
      log_probs += list(rows[: len(group.rollouts)])
  for leaf, wanted in zip(
      jax.tree.leaves(gradients),
      jax.tree.leaves(shardings(gradients, mesh)),
      strict=True,
  ):
    assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
  by_name = checkpoint_names.leaves(policy.replace(trainable=gradients).model)
  by_name = {".".join(k): np.asarray(x) for k, x in by_name.items()}
  return by_name, loss, tokens, np.stack(log_probs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)], ids=str
)
def test_every_gradient_is_that_of_one_device(x64, kind, sizes):
  wanted, wanted_loss, wanted_tokens, wanted_log_probs = replayed(kind, ONE)
  found, loss, tokens, log_probs = replayed(kind, sizes)
  assert found.keys() == wanted.keys()
  for name in ("k_proj", "v_proj"):
    assert f"blocks.full_layer.self_attn.{name}.kernel" in found
  errors = {}
  for name, gradient in wanted.items():
    size = np.abs(gradient).max()
    assert size > 1e-6, name
    errors[name] = np.abs(found[name] - gradient).max() / size
  worst = max(errors, key=errors.__getitem__)
  print(f"{kind} {sizes}: worst gradient {worst} {errors[worst]:.1e}")
  assert errors[worst] < TOLERANCE, (worst, errors[worst])
  assert abs(loss - wanted_loss) < TOLERANCE * abs(wanted_loss)
  assert tokens == wanted_tokens
  np.testing.assert_allclose(
      log_probs, wanted_log_probs, atol=TOLERANCE, rtol=0
  )


@pytest.mark.parametrize(
    "kind,sizes", [("dense", (2, 4, 1)), ("moe", (1, 8, 1))], ids=str
)
def test_scores_and_samples_are_those_of_one_device(x64, kind, sizes):
  """Eleven tokens a response: no multiple of any number of shards."""
  found = {}
  for name, mesh in (
      ("one", mesh_of(ONE)),
      ("many", mesh_of(sizes)),
  ):
    policy = tiny.policy(KINDS[kind], mesh=mesh)
    rows = mesh.shape["data"]
    found[name] = []
    for index, groups in enumerate(turns(GROUPS[:2], rows)):
      prompt = captured(policy, groups)
      scores = score(
          policy,
          prompt,
          tiny.branches(*groups, multiple=24, mesh=mesh),
          temperature=1.0,
          block_tokens=16,
          head_chunk_tokens=8,
      )
      keys = jax.random.split(jax.random.key(0), 2)
      samples = sample(
          policy,
          prompt,
          keys[rows * index : rows * (index + 1)],
          group_size=2,
          config=SamplingConfig(max_tokens=11),
      )
      for row, group in enumerate(groups):
        here = jax.tree.map(
            lambda x, b=row: np.asarray(x)[b], (scores, samples)
        )
        count = len(group.rollouts)
        trimmed = jax.tree.map(lambda x, n=count: x[:n], here[0])
        found[name].append((trimmed, here[1]))
  for one, many in zip(found["one"], found["many"], strict=True):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(y, x, atol=TOLERANCE, rtol=0),
        one,
        many,
    )

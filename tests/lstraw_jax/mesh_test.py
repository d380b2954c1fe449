"""One device and every mesh: the same values, and the same gradient per leaf.

Prompts leave shards empty (one token; three), fill them unevenly, and end in a
tail; groups are ragged, and so are their responses.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from lstraw_jax.capture import (
    TapeConfig,
    capture,
    capture_with_tape,
    frame_positions,
)
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.prompt_state import append, empty_prompt_state
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.rollouts import RolloutGroup
from lstraw_jax.sampling import SamplingConfig, sample
from lstraw_jax.scoring import score
from lstraw_jax.state_cotangent import zero_cotangent
from modeling import checkpoint_names
from modeling.sharding import make_mesh, shardings, to_mesh
from tests import tiny

ONE = (1, 1, 1)
TOLERANCE = 1e-10  # float64, relative to the largest entry of a leaf
KINDS = {
    # Gated DeltaNet by heads on every mesh below,
    "dense": tiny.config(linear_num_key_heads=8, linear_num_value_heads=16),
    # and by state passing: no mesh divides two key heads.
    "moe": tiny.config("tiny-moe"),
    "glm": tiny.config("tiny-glm"),
}
# Weights through which the prompt reaches what comes after it.
OF_SLOTS = {
    "dense": ("k_proj", "v_proj"),
    "moe": ("k_proj", "v_proj"),
    "glm": ("kv_a_proj_with_mqa", "kv_b_proj"),
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


class Found(NamedTuple):
  """What a mesh gives for all groups."""

  gradients: dict[str, dict[str, np.ndarray]]  # dropped, exact -> by weight
  loss: float
  tokens: float
  log_probs: np.ndarray  # by response


@functools.cache
def replayed(kind: str, sizes: tuple[int, int, int], *, exact: bool) -> Found:
  """Runs the groups; the exact gradient comes with the one dropped."""
  mesh = mesh_of(sizes)
  policy = tiny.policy(KINDS[kind], mesh=mesh)
  gradients = {"dropped": zero_gradients(policy)}
  if exact:
    gradients["exact"] = zero_gradients(policy)
  loss, tokens, log_probs = 0.0, 0.0, []
  for groups in turns(GROUPS, mesh.shape["data"]):
    prompt, tape = capture_with_tape(
        policy,
        [group.prompt_tokens for group in groups],
        tape=TapeConfig(boundary_every=2),
        chunk_tokens=16,
        capacity=48,
    )
    found = replay(
        policy,
        prompt,
        tiny.branches(*groups, multiple=24, mesh=mesh),
        gradients["dropped"],
        zero_cotangent(policy, prompt) if exact else None,
        config=REPLAY,
    )
    gradients["dropped"] = found.gradients
    if exact:
      for leaf, of_state in zip(
          jax.tree.leaves((found.cotangent.slots, found.cotangent.recurrent)),
          jax.tree.leaves(
              (prompt.slots.learned(policy.config.trained), prompt.recurrent)
          ),
          strict=True,
      ):
        assert leaf.sharding.is_equivalent_to(of_state.sharding, leaf.ndim)
      gradients["exact"], _ = add_prompt_gradient(
          policy,
          prompt,
          tape,
          gradients["exact"],
          found.cotangent,
          policy_step=0,
      )
    loss += float(found.loss)
    tokens += float(found.stats.tokens)
    for group, rows in zip(groups, np.asarray(found.log_probs), strict=True):
      assert not rows[len(group.rollouts) :].any()
      log_probs += list(rows[: len(group.rollouts)])
  if exact:  # so far the prompts' term alone
    gradients["exact"] = jax.tree.map(
        lambda x, y: x + y, gradients["exact"], gradients["dropped"]
    )
  for tree in gradients.values():
    for leaf, wanted in zip(
        jax.tree.leaves(tree),
        jax.tree.leaves(shardings(tree, mesh)),
        strict=True,
    ):
      assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
  named = {which: by_name(tree) for which, tree in gradients.items()}
  return Found(named, loss, tokens, np.stack(log_probs))


def by_name(gradients) -> dict[str, np.ndarray]:
  found = checkpoint_names.variables(gradients)
  return {".".join(path): np.asarray(x[...]) for path, x in found.items()}


EVERY_CELL = [
    (kind, sizes, sizes in ((1, 8, 1), (2, 2, 2)))
    for kind in ("dense", "moe")
    for sizes in ((1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2))
]
# Its heads share a latent, so that no device has a part of them: `tensor` is 1.
GLM_MESHES = ((1, 8, 1), (2, 4, 1), (1, 2, 1), (1, 4, 1))
EVERY_CELL += [("glm", sizes, sizes[1] > 2) for sizes in GLM_MESHES]
SOME_CELLS = ("moe", (1, 8, 1)), ("dense", (2, 2, 2))


@pytest.mark.parametrize(
    "kind,sizes,exact",
    [
        pytest.param(
            *cell,
            id=f"{cell[0]}-{cell[1]}",
            marks=[] if cell[:2] in SOME_CELLS else pytest.mark.first_class,
        )
        for cell in EVERY_CELL
    ],
)
def test_every_gradient_is_that_of_one_device(x64, kind, sizes, exact):
  one = replayed(kind, ONE, exact=True)
  found = replayed(kind, sizes, exact=exact)
  for weight in OF_SLOTS[kind]:
    names = found.gradients["dropped"].keys()
    assert any(
        name.endswith(f".full_layer.self_attn.{weight}.kernel")
        for name in names
    )
  for which, gradients in found.gradients.items():
    wanted = one.gradients[which]
    assert gradients.keys() == wanted.keys()
    errors = {}
    for name, gradient in wanted.items():
      size = np.abs(gradient).max()
      assert size > 1e-6, name
      errors[name] = np.abs(gradients[name] - gradient).max() / size
    worst = max(errors, key=errors.__getitem__)
    print(f"{kind} {sizes} {which}: worst {worst} {errors[worst]:.1e}")
    assert errors[worst] < TOLERANCE, (worst, errors[worst])
  if exact:
    distance = [
        np.abs(x - y).max()
        for x, y in zip(
            *(one.gradients[which].values() for which in ("dropped", "exact")),
            strict=True,
        )
    ]
    assert max(distance) > 1e-2
  assert abs(found.loss - one.loss) < TOLERANCE * abs(one.loss)
  assert found.tokens == one.tokens
  np.testing.assert_allclose(
      found.log_probs, one.log_probs, atol=TOLERANCE, rtol=0
  )


@pytest.mark.parametrize(
    "kind,sizes",
    [
        ("dense", (2, 4, 1)),
        ("moe", (1, 8, 1)),
        pytest.param("glm", (2, 4, 1), marks=pytest.mark.first_class),
    ],
    ids=str,
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


CHOOSING = tiny.config("tiny-glm", index_topk=8)


def with_ties(policy):
  """Returns a policy where about half of all index scores are exactly equal.

  A score is sum_i w_i relu(q_i . k). Of the first indexer one head is left, of
  the second two, so that a sum is 0 for each key that no head likes; with w
  below 0 these rank first. Of them the earliest are to be chosen.
  """
  frozen = jax.tree.map(lambda x: x, policy.frozen)
  kernel = frozen["runs"][0]["full_layer"]["self_attn"]["indexer"]["wq_b"][
      "kernel"
  ]
  size = CHOOSING.index_head_dim
  dead = np.zeros(kernel.shape)
  for run, heads in enumerate((1, 2)):
    dead[run, :, heads * size :] = 1
  kernel[...] = jax.numpy.where(dead, 0, kernel[...])
  return policy.__class__(
      trainable=policy.trainable, frozen=frozen, graphdef=policy.graphdef
  )


@jax.jit
def recorded_chunk(policy, state, tokens, frame, ends):
  """Captures a chunk and returns what was chosen for it, too."""
  positions = frame_positions(state, frame, starts=state.length, ends=ends)
  _, delta = policy.model(
      tokens,
      positions_BT=positions,
      prefixes=(state.prefix,),
      recurrent=state.recurrent,
  )
  return append(state, delta, positions_BT=positions), delta.record


@functools.cache
def choices(sizes: tuple[int, int, int], *, ties: bool):
  """What is chosen for each token of two prompts, ranks left aside."""
  mesh = mesh_of(sizes)
  policy = tiny.policy(CHOOSING, mesh=mesh)
  policy = with_ties(policy) if ties else policy
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 256, (2, 64)).astype(np.int32)
  ends = np.array([61, 38], np.int32)
  state = empty_prompt_state(
      CHOOSING, mesh=mesh, capacity=64, chunk_tokens=16, batch=2
  )
  found = []
  for frame in range(4):
    chunk = tokens[:, 16 * frame : 16 * (frame + 1)]
    state, record = recorded_chunk(
        policy, state, *to_mesh((chunk, np.int32(frame), ends), mesh)
    )
    found.append(jax.device_get(record))
  joined = jax.tree.map(lambda *x: np.concatenate(x, axis=2), *found)
  positions = np.arange(64)[None, :] < ends[:, None]
  return jax.tree.map(lambda x: x[:, positions], joined)


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(
            sizes,
            marks=[] if sizes == (1, 8, 1) else pytest.mark.first_class,
            id=str(sizes),
        )
        for sizes in GLM_MESHES
    ],
)
def test_every_token_attends_to_what_it_does_on_one_device(x64, sizes, ties):
  """The same sets bit for bit, and the same experts, in every layer."""
  one, many = choices(ONE, ties=ties), choices(sizes, ties=ties)
  assert one.selections.shape == (2, 61 + 38, 8)
  for ours, theirs in zip(many, one, strict=True):
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
  late = one.selections[:, np.r_[32:61, 61 + 32 : 61 + 38]]
  assert (late >= 0).all()
  in_order = (np.diff(late) > 0).all(-1).mean()
  print(f"{in_order:.0%} of the choices are the earliest of equal ones")
  assert (in_order > 0.25) == ties

"""The exact gradient against one ordinary graph over prompts and responses."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lstraw_jax.capture import PromptTape, TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_gradient import PromptLoss, add_prompt_gradient
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.state_cotangent import zero_cotangent
from modeling.decoder_config import LoraConfig
from modeling.layer_state import Prefix, empty_recurrent
from tests import tiny

TOLERANCE = 1e-9  # float64, relative to the largest entry of a leaf
KINDS = {
    "dense": tiny.config("tiny"),
    "moe": tiny.config("tiny-moe"),
    "glm": tiny.config("tiny-glm"),
    "adapters": tiny.config("tiny", lora=tiny.ALL_ADAPTERS),
    "glm-adapters": tiny.config("tiny-glm", lora=LoraConfig(rank=2, alpha=4.0)),
}
P = 150  # a multiple of no chunk
LENGTHS = {2: (9, 20), 5: (1, 20, 5, 13, 8)}
REPLAY = ReplayConfig(block_tokens=8, head_chunk_tokens=8)


@functools.cache
def group(size, *, prompt_tokens=P):
  prompt = tiny.tokens(prompt_tokens)
  return tiny.group(prompt, LENGTHS[size], masked=0.2)


def weights_of(prompt_tokens=P):
  """A weight of each prompt token; a third of them carry no loss."""
  rng = np.random.default_rng(3)
  weights = rng.normal(size=prompt_tokens) * (rng.random(prompt_tokens) > 0.3)
  return np.append(0.0, weights[1:])


class Captured(NamedTuple):
  """What the two halves of the exact gradient share."""

  policy: Policy
  prompt: PromptState
  tape: PromptTape


def captured(
    policy, groups, *, chunk_tokens=64, boundary_every=1, memory_kind="device"
) -> Captured:
  prompt, tape = capture_with_tape(
      policy,
      [group.prompt_tokens for group in groups],
      tape=TapeConfig(boundary_every=boundary_every, memory_kind=memory_kind),
      chunk_tokens=chunk_tokens,
      memory_kind=memory_kind,
  )
  return Captured(policy, prompt, tape)


class Found(NamedTuple):
  """Gradients as the library makes them."""

  dropped: nnx.State
  exact: nnx.State
  loss: float  # of the branches
  prompt_loss: float


def found(captured, groups, *, weights=None, branches=True) -> Found:
  policy, prompt, tape = captured
  gradients, cotangent = zero_gradients(policy), zero_cotangent(policy, prompt)
  loss = 0.0
  if branches:
    replayed = replay(
        policy,
        prompt,
        tiny.branches(*groups, mesh=policy.mesh),
        gradients,
        cotangent,
        config=REPLAY,
    )
    gradients, cotangent = replayed.gradients, replayed.cotangent
    loss = float(replayed.loss)
  dropped = tiny.copied(gradients)
  on_tokens = None if weights is None else PromptLoss(weights, 16)
  exact, prompt_loss = add_prompt_gradient(
      policy, prompt, tape, gradients, cotangent, policy_step=0, loss=on_tokens
  )
  return Found(dropped, tiny.copied(exact), loss, float(prompt_loss))


class Sequences(NamedTuple):
  """A group as G whole sequences."""

  tokens: jax.Array  # [G, P + R]
  keep: jax.Array  # [G, R]: 1 for a token that carries loss
  advantages: jax.Array  # [G]
  weights: jax.Array  # [P] of the prompt's own tokens


def sequences(group, *, weights=None, branches=True) -> Sequences:
  longest = max(r.tokens.size for r in group.rollouts)
  pad = lambda x: np.pad(x, (0, longest - x.size))
  rows = [np.append(group.prompt_tokens, pad(r.tokens)) for r in group.rollouts]
  keep = np.array([pad(r.loss_mask) for r in group.rollouts], np.float64)
  advantages = np.array([r.reward for r in group.rollouts], np.float32)
  if weights is None:
    weights = np.zeros(group.prompt_tokens.size)
  return Sequences(
      tokens=jnp.asarray(np.stack(rows)),
      keep=jnp.asarray(keep * branches),
      advantages=jnp.asarray(advantages, jnp.float64),
      weights=jnp.asarray(weights),
  )


@jax.jit
def one_graph(policy: Policy, given: Sequences):
  """Gradient and losses from nothing, without a state or a chunk.

  Nothing of the update is used but the model.
  """
  rows, count = given.tokens.shape
  prompt_tokens = given.weights.size

  def total(trainable):
    model = policy.replace(trainable=trainable).model
    positions = jnp.arange(count - 1, dtype=jnp.int32)
    hidden, _ = model(
        given.tokens[:, :-1],
        positions_BT=jnp.broadcast_to(positions, (rows, count - 1)),
        prefixes=(),
        recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=rows),
    )
    log_probs = picked(model, hidden, given.tokens[:, 1:])
    on_prompt = log_probs[0, : prompt_tokens - 1] * given.weights[1:]
    loss = branch_loss(log_probs[:, prompt_tokens - 1 :], given)
    return loss - on_prompt.sum(), (loss, -on_prompt.sum())

  (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(
      policy.trainable
  )
  return gradients, *losses


@jax.jit
def prompt_term(policy: Policy, given: Sequences):
  """The gradient that reaches the weights through the prompt state alone.

  The state is computed in one graph by weights that are differentiated, and
  the responses behind it by weights that are not.
  """
  rows, count = given.tokens.shape
  filled = given.weights.size - 1
  positions = jnp.arange(count - 1, dtype=jnp.int32)[None]

  def loss(trainable):
    _, delta = policy.replace(trainable=trainable).model(
        given.tokens[:1, :filled],
        positions_BT=positions[:, :filled],
        prefixes=(),
        recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=1),
    )
    # Stored keys are constants: as sinks they have a gradient.
    prefix = Prefix(
        delta.slots,
        positions[:, :filled],
        sink=delta.slots.learned(policy.config.trained),
    )
    hidden, _ = policy.model(
        given.tokens[:, filled:-1],
        positions_BT=jnp.repeat(positions[:, filled:], rows, axis=0),
        prefixes=(prefix,),
        recurrent=jax.tree.map(
            lambda x: jnp.repeat(x, rows, axis=2), delta.recurrent
        ),
    )
    log_probs = picked(policy.model, hidden, given.tokens[:, filled + 1 :])
    return branch_loss(log_probs, given)

  return jax.grad(loss)(policy.trainable)


def picked(model, hidden, targets):
  log_probs = jax.nn.log_softmax(model.logits(hidden))
  return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def branch_loss(log_probs, given: Sequences):
  """GRPO with the policy as its own old policy, a mean over each response."""
  ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))
  losses = -ratio * given.advantages[:, None] * given.keep
  return (losses / jnp.maximum(given.keep.sum(1, keepdims=True), 1)).sum()


def assert_equal(got, wanted, loss, wanted_loss):
  error = tiny.largest_difference(got, wanted)
  print(f"{error:.1e} relative")
  assert error < TOLERANCE
  for leaf in jax.tree.leaves(jax.device_get(got)):
    assert np.abs(leaf).max() > 1e-6
  assert abs(loss - wanted_loss) < TOLERANCE * abs(wanted_loss)


@pytest.mark.parametrize(
    "kind,chunk_tokens,boundary_every,group_size",
    [
        pytest.param("dense", 64, 1, 2, marks=pytest.mark.first_class),
        ("dense", 16, 3, 5),
        ("glm", 64, 1, 2),
        pytest.param("dense", P, 1, 2, marks=pytest.mark.first_class),
        pytest.param("moe", 64, 3, 5, marks=pytest.mark.first_class),
        pytest.param("adapters", 128, 1, 5, marks=pytest.mark.first_class),
        pytest.param("glm-adapters", 16, 3, 5, marks=pytest.mark.first_class),
    ],
)
def test_exact_is_the_gradient_of_one_graph_over_everything(
    x64, kind, chunk_tokens, boundary_every, group_size
):
  policy, groups = tiny.policy(KINDS[kind]), [group(group_size)]
  state = captured(
      policy,
      groups,
      chunk_tokens=chunk_tokens,
      boundary_every=boundary_every,
  )
  ours = found(state, groups)
  wanted, loss, _ = one_graph(policy, sequences(groups[0]))
  assert_equal(ours.exact, wanted, ours.loss, loss)
  assert tiny.largest_difference(ours.dropped, wanted) > 0.1


@pytest.mark.first_class
@pytest.mark.parametrize("kind", ["moe", "dense", "glm"])
def test_exact_less_dropped_is_the_term_of_the_prompt(x64, kind):
  policy, groups = tiny.policy(KINDS[kind]), [group(5)]
  ours = found(captured(policy, groups), groups)
  term = jax.tree.map(np.subtract, ours.exact, ours.dropped)
  wanted = tiny.copied(prompt_term(policy, sequences(groups[0])))
  # Rounding is that of the exact gradient, of which this is a part.
  size = lambda tree: jax.tree.map(lambda x: np.abs(x).max(), tree)
  errors = jax.tree.map(
      lambda x, y, scale: np.abs(x - y).max() / scale,
      term,
      wanted,
      size(ours.exact),
  )
  assert max(jax.tree.leaves(errors)) < TOLERANCE
  # The head is behind the state; all else has a part in it.
  zero = [not leaf.any() for leaf in jax.tree.leaves(wanted)]
  assert sum(zero) == 2  # lm_head and the last norm


@pytest.mark.first_class
def test_a_loss_on_the_prompt_alone_is_supervised_training(x64):
  policy, groups, weights = (
      tiny.policy(KINDS["dense"]),
      [group(2)],
      weights_of(),
  )
  state = captured(policy, groups, boundary_every=3)
  ours = found(state, groups, weights=[weights], branches=False)
  given = sequences(groups[0], weights=weights, branches=False)
  wanted, _, loss = one_graph(policy, given)
  assert_equal(ours.exact, wanted, ours.prompt_loss, loss)


@pytest.mark.first_class
def test_both_losses_go_in_one_sweep(x64):
  policy, groups, weights = (
      tiny.policy(KINDS["dense"]),
      [group(2)],
      weights_of(),
  )
  ours = found(captured(policy, groups), groups, weights=[weights])
  wanted, loss, on_prompt = one_graph(
      policy, sequences(groups[0], weights=weights)
  )
  assert_equal(ours.exact, wanted, ours.loss, loss)
  assert abs(ours.prompt_loss - on_prompt) < TOLERANCE * abs(on_prompt)


@pytest.mark.first_class
def test_prompts_of_a_batch_are_the_sum_of_each(x64):
  """Of unequal length: one has no slot at all, one ends chunks before."""
  policy = tiny.policy(KINDS["dense"])
  groups = [group(2), group(2, prompt_tokens=1), group(2, prompt_tokens=40)]
  state = captured(policy, groups, boundary_every=2)
  ours = found(state, groups)
  graphs = [one_graph(policy, sequences(each)) for each in groups]
  wanted, losses, _ = zip(*map(jax.device_get, graphs), strict=True)
  summed = jax.tree.map(lambda *x: sum(x), *wanted)
  assert_equal(ours.exact, summed, ours.loss, sum(losses))


@pytest.mark.first_class
def test_the_prompt_and_its_tape_are_left_bitwise_as_they_were(x64):
  policy, groups = tiny.policy(KINDS["dense"]), [group(2)]
  state = captured(policy, groups, boundary_every=3)
  kept = (state.prompt, state.tape.boundaries)
  before = tiny.copied(kept)
  first = found(state, groups)
  jax.tree.map(np.testing.assert_array_equal, tiny.copied(kept), before)
  again = found(state, groups)
  jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.first_class
def test_host_memory_gives_the_same_bits():
  """Of slots, of their cotangents and of the boundaries."""
  policy = tiny.policy(tiny.config(dtype="float32"))
  results = {}
  for kind in ("device", "pinned_host"):
    state = captured(policy, [group(2)], boundary_every=2, memory_kind=kind)
    cotangent = zero_cotangent(policy, state.prompt)
    for leaf in jax.tree.leaves((cotangent.slots, state.tape.boundaries)):
      assert leaf.sharding.memory_kind == kind
    results[kind] = found(state, [group(2)])
  jax.tree.map(np.testing.assert_array_equal, *results.values())


@pytest.mark.first_class
def test_latents_in_host_memory_give_the_same_gradients(x64):
  """A layer of them and of their sums is staged, in programs that round anew.

  In float32 the gradients of the two are 1e-8 apart.
  """
  policy, results = tiny.policy(KINDS["glm"]), {}
  for kind in ("device", "pinned_host"):
    state = captured(policy, [group(2)], memory_kind=kind)
    results[kind] = found(state, [group(2)]).exact
  error = tiny.largest_difference(*results.values())
  print(f"{error:.1e} relative")
  assert error < 1e-12


@pytest.mark.parametrize("every,count", [(1, 10), (3, 4), (10, 1), (99, 1)])
def test_every_nth_boundary_is_kept(x64, every, count):
  policy = tiny.policy(KINDS["dense"])
  tape = captured(
      policy, [group(2)], chunk_tokens=16, boundary_every=every
  ).tape
  assert len(tape.boundaries) == count
  one = sum(x.nbytes for x in jax.tree.leaves(tape.boundaries[0]))
  assert tape.nbytes == count * one


def test_a_stale_state_is_refused(x64):
  state = captured(tiny.policy(KINDS["dense"]), [group(2)])
  stale = dataclasses.replace(state.prompt, policy_step=jnp.int32(4))
  with pytest.raises(ValueError, match=r"captured at step 4 but .* step 0"):
    found(state._replace(prompt=stale), [group(2)])


def test_the_tape_of_another_capture_is_refused(x64):
  policy = tiny.policy(KINDS["dense"])
  state = captured(policy, [group(2)])
  other = captured(policy, [group(2, prompt_tokens=40)])
  with pytest.raises(ValueError, match=r"tape: got .*\(1, 64, 1\), want .*192"):
    found(state._replace(tape=other.tape), [group(2)])


@pytest.mark.parametrize(
    "weights,message",
    [
        ([], "got 0 rows, want 1"),
        ([np.ones(P - 1)], "want 150 finite numbers"),
        ([np.ones(P)], "the first of them 0"),
        ([np.append(0.0, np.full(P - 1, np.nan))], "finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(x64, weights, message):
  state = captured(tiny.policy(KINDS["dense"]), [group(2)])
  with pytest.raises(ValueError, match=message):
    found(state, [group(2)], weights=weights, branches=False)


def test_settings_out_of_range_are_refused(x64):
  with pytest.raises(ValueError, match="boundary_every=0: want at least 1"):
    TapeConfig(boundary_every=0)
  policy = tiny.policy(KINDS["dense"])
  prompt = captured(policy, [group(2)]).prompt
  with pytest.raises(ValueError, match="cotangent_dtype='float16': want"):
    zero_cotangent(policy, prompt, dtype="float16")


@pytest.mark.first_class
def test_bfloat16_sums_are_near_and_half_as_large():
  policy = tiny.policy(tiny.config(dtype="float32"))
  state, groups = captured(policy, [group(5)]), [group(5)]
  gradients, bytes_of = {}, {}
  for dtype in ("float32", "bfloat16"):
    cotangent = zero_cotangent(policy, state.prompt, dtype=dtype)
    bytes_of[dtype] = sum(x.nbytes for x in jax.tree.leaves(cotangent.slots))
    replayed = replay(
        policy,
        state.prompt,
        tiny.branches(*groups),
        zero_gradients(policy),
        cotangent,
        config=REPLAY,
    )
    exact, _ = add_prompt_gradient(
        policy,
        state.prompt,
        state.tape,
        replayed.gradients,
        replayed.cotangent,
        policy_step=0,
    )
    gradients[dtype] = exact
  assert bytes_of["float32"] == 2 * bytes_of["bfloat16"]
  error = tiny.largest_difference(*gradients.values())
  assert 1e-4 < error < 0.1

"""The objective's values and gradients, by hand and against loops."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lstraw_jax import objectives
from lstraw_jax.objectives import ObjectiveConfig

FLOAT32_TOLERANCE = 1e-6
FLOAT64_TOLERANCE = 1e-14
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def surrogate(ratio, advantage, **clip):
  """The surrogate of one response with one token of a given ratio."""
  return objectives.clipped_surrogate(
      jnp.log(jnp.array([[ratio]])),
      jnp.zeros((1, 1)),
      advantages=jnp.array([advantage]),
      **(CLIP | clip),
  )


def problem(seed=0, *, responses=4, tokens=7, dtype=np.float32):
  """Random log-probs around each other, advantages and a ragged mask."""
  rng = np.random.default_rng(seed)
  log_probs, old, ref = -rng.gamma(1, 1, (3, responses, tokens)).astype(dtype)
  lengths = rng.integers(1, tokens + 1, responses)
  return {
      "log_probs": jnp.asarray(log_probs),
      "old_log_probs": jnp.asarray(old),
      "ref_log_probs": jnp.asarray(ref),
      "advantages": jnp.asarray(rng.normal(size=responses).astype(dtype)),
      "loss_mask": jnp.asarray(np.arange(tokens)[None] < lengths[:, None]),
  }


def step_loss(log_probs, inputs, config):
  """The loss of a step in one batch."""
  losses = objectives.grpo_token_losses(log_probs, **inputs, config=config).loss
  mask, aggregation = inputs["loss_mask"], config.aggregation
  weights = objectives.token_weights(
      mask, aggregation=aggregation, dtype=losses.dtype
  )
  count = objectives.denominator(mask, aggregation=aggregation)
  return (weights * losses).sum() / count.astype(losses.dtype)


@pytest.mark.parametrize(
    "advantage,ratio,loss,clipped",
    [
        (2.0, 1.1, -2.2, False),
        (2.0, 1.5, -2.56, True),  # 1.28 * 2
        (2.0, 0.5, -1.0, False),  # the minimum is the unclipped term
        (-2.0, 1.1, 2.2, False),
        (-2.0, 0.5, 1.6, True),  # 0.8 * 2
        (-2.0, 1.5, 3.0, False),
        (0.0, 1.5, 0.0, False),
    ],
)
def test_surrogate_equals_hand_derived_values(advantage, ratio, loss, clipped):
  out = surrogate(ratio, advantage)
  chex.assert_trees_all_close(
      (out.loss, out.ratio),
      (jnp.array([[loss]]), jnp.array([[ratio]])),
      rtol=FLOAT32_TOLERANCE,
  )
  assert out.clipped.tolist() == [[clipped]]


def test_surrogate_equals_the_published_minimum(x64):
  inputs = problem(responses=50, dtype=np.float64)
  out = objectives.clipped_surrogate(
      inputs["log_probs"],
      inputs["old_log_probs"],
      advantages=inputs["advantages"],
      **CLIP,
  )
  ratio = np.exp(np.subtract(inputs["log_probs"], inputs["old_log_probs"]))
  a = np.asarray(inputs["advantages"])[:, None]
  expected = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
  np.testing.assert_allclose(out.loss, expected, rtol=FLOAT64_TOLERANCE)
  assert out.loss.dtype == jnp.float64


@pytest.mark.parametrize(
    "advantage,log_ratio,expected",
    [
        (1.0, 0.1, -np.exp(0.1)),
        (1.0, 1.0, 0.0),
        (1.0, 100.0, 0.0),  # exp overflows float32
        (1.0, -1.0, -np.exp(-1.0)),
        (-1.0, 1.0, np.exp(1.0)),
        (-1.0, -1.0, 0.0),
        (0.0, 100.0, 0.0),
    ],
)
def test_gradient_is_the_ratio_times_advantage_and_zero_where_clipped(
    advantage, log_ratio, expected
):
  def loss(log_probs):
    out = objectives.clipped_surrogate(
        log_probs, jnp.zeros(1), advantages=jnp.array(advantage), **CLIP
    )
    return out.loss.sum()

  gradient = jax.grad(loss)(jnp.array([log_ratio]))
  np.testing.assert_allclose(gradient, [expected], rtol=FLOAT32_TOLERANCE)


def test_infinite_bounds_never_clip():
  clip = {"clip_eps_low": 1.0, "clip_eps_high": float("inf")}
  assert surrogate(1e6, 1.0, **clip).loss.item() == pytest.approx(-1e6)
  assert surrogate(1e-6, -1.0, **clip).loss.item() == pytest.approx(1e-6)


@pytest.mark.parametrize("old", [lambda x: x, jax.lax.stop_gradient])
def test_the_policy_as_its_own_old_policy_has_ratio_exactly_one(old):
  inputs = problem()

  def loss(log_probs):
    out = objectives.clipped_surrogate(
        log_probs, old(log_probs), advantages=inputs["advantages"], **CLIP
    )
    return out.loss.sum(), out

  gradient, out = jax.grad(loss, has_aux=True)(inputs["log_probs"])
  assert (out.ratio == 1).all() and not out.clipped.any()
  np.testing.assert_array_equal(
      gradient, np.tile(-inputs["advantages"][:, None], (1, 7))
  )


def test_half_precision_log_probs_are_computed_in_float32():
  inputs = problem()
  low = inputs["log_probs"].astype(jnp.bfloat16)
  out = objectives.clipped_surrogate(
      low, inputs["old_log_probs"], advantages=inputs["advantages"], **CLIP
  )
  assert out.loss.dtype == out.ratio.dtype == jnp.float32
  kl = objectives.kl_penalty(low, inputs["ref_log_probs"], estimator="k3")
  assert kl.dtype == jnp.float32


@pytest.mark.parametrize(
    "estimator,oracle",
    [
        ("k1", lambda lp, ref: lp - ref),
        ("k3", lambda lp, ref: np.exp(ref - lp) - (ref - lp) - 1),
    ],
)
def test_kl_equals_a_float64_oracle(estimator, oracle):
  inputs = problem(responses=50)
  kl = objectives.kl_penalty(
      inputs["log_probs"], inputs["ref_log_probs"], estimator=estimator
  )
  expected = oracle(
      np.asarray(inputs["log_probs"], np.float64),
      np.asarray(inputs["ref_log_probs"], np.float64),
  )
  np.testing.assert_allclose(kl, expected, rtol=1e-5, atol=FLOAT32_TOLERANCE)


def test_k3_does_not_cancel_near_the_reference():
  delta = jnp.array([1e-3], jnp.float32)
  kl = objectives.kl_penalty(jnp.zeros(1), delta, estimator="k3")
  np.testing.assert_allclose(kl, [1e-6 / 2], rtol=1e-3)


@pytest.mark.parametrize("estimator,slope", [("k1", 1.0), ("k3", -1.0)])
def test_kl_gradient_reaches_the_policy_only(estimator, slope):
  def kl(log_probs, ref):
    return objectives.kl_penalty(log_probs, ref, estimator=estimator).sum()

  arguments = jnp.array([-1.0]), jnp.array([-1.0 + np.log(2.0)])
  gradients = jax.grad(kl, (0, 1))(*arguments)
  np.testing.assert_allclose(gradients, [[slope], [0]], rtol=1e-6)


@given(
    st.floats(-80, 0, width=32),
    st.floats(-80, 0, width=32),
)
def test_k3_is_never_negative(log_prob, ref):
  kl = objectives.kl_penalty(
      jnp.array([log_prob]), jnp.array([ref]), estimator="k3"
  )
  assert kl.item() >= 0


@given(st.floats(-(2**-7), 2**-7, width=32))
def test_k3_is_never_negative_near_the_reference(log_prob):
  kl = objectives.kl_penalty(
      jnp.array([log_prob]), jnp.zeros(1), estimator="k3"
  )
  assert kl.item() >= 0


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean"])
def test_aggregation_equals_loops_over_unequal_lengths(aggregation):
  inputs = problem()
  config = ObjectiveConfig(kl_coef=0.1, aggregation=aggregation)
  losses = objectives.grpo_token_losses(**inputs, config=config).loss
  mask = np.asarray(inputs["loss_mask"])
  rows = [np.asarray(losses)[i][mask[i]] for i in range(len(mask))]
  assert len({len(row) for row in rows}) > 1
  if aggregation == "response_mean":
    expected = sum(sum(row) / len(row) for row in rows) / len(rows)
  else:
    expected = sum(map(sum, rows)) / sum(map(len, rows))
  log_probs = inputs.pop("log_probs")
  loss = step_loss(log_probs, inputs, config)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean"])
def test_branches_one_by_one_equal_the_batch_in_value_and_gradient(
    x64, aggregation
):
  inputs = problem(dtype=np.float64)
  log_probs = inputs.pop("log_probs")
  config = ObjectiveConfig(kl_coef=0.1, aggregation=aggregation)
  batched = jax.value_and_grad(step_loss)(log_probs, inputs, config)

  def branch_sum(row, branch):
    losses = objectives.grpo_token_losses(row, **branch, config=config).loss
    weights = objectives.token_weights(
        branch["loss_mask"], aggregation=aggregation, dtype=losses.dtype
    )
    return (weights * losses).sum()

  count, total, gradients = 0, 0.0, []
  for i in range(log_probs.shape[0]):
    branch = {name: array[i] for name, array in inputs.items()}
    value, gradient = jax.value_and_grad(branch_sum)(log_probs[i], branch)
    total += value
    gradients.append(gradient)
    count += int(
        objectives.denominator(branch["loss_mask"], aggregation=aggregation)
    )
  serial = total / count, jnp.stack(gradients) / count
  chex.assert_trees_all_close(serial, batched, rtol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean"])
def test_weights_sum_to_the_denominator(aggregation):
  mask = jnp.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
  weights = objectives.token_weights(mask, aggregation=aggregation)
  count = objectives.denominator(mask, aggregation=aggregation)
  assert weights.dtype == jnp.float32 and count.dtype == jnp.int32
  expected = {"response_mean": 2, "token_mean": 3}[aggregation]
  assert float(weights.sum()) == int(count) == expected
  assert not weights[~mask].any()


@pytest.mark.parametrize("aggregation", ["response_mean", "token_mean"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_in_masked_positions_never_matters(poison, aggregation):
  inputs = problem()
  config = ObjectiveConfig(kl_coef=0.1, aggregation=aggregation)
  mask = inputs["loss_mask"]
  assert not mask.all()
  dirty = {
      name: jnp.where(mask, array, poison) if "log_probs" in name else array
      for name, array in inputs.items()
  }
  results = [
      jax.value_and_grad(step_loss)(case.pop("log_probs"), case, config)
      for case in (inputs, dirty)
  ]
  chex.assert_trees_all_equal(*results)
  assert not results[1][1][~mask].any()


def test_masked_tokens_read_as_neutral():
  inputs = problem()
  out = objectives.grpo_token_losses(
      **inputs, config=ObjectiveConfig(kl_coef=0.1)
  )
  masked = jax.tree.map(lambda x: x[~inputs["loss_mask"]], out)
  assert not masked.loss.any() and not masked.kl.any()
  assert (masked.ratio == 1).all() and not masked.clipped.any()


def test_loss_is_the_surrogate_plus_the_weighted_kl():
  inputs = problem()
  inputs["loss_mask"] = jnp.ones_like(inputs["loss_mask"])
  free = objectives.grpo_token_losses(**inputs, config=ObjectiveConfig())
  taxed = objectives.grpo_token_losses(
      **inputs, config=ObjectiveConfig(kl_coef=0.5)
  )
  expected = free.loss + 0.5 * free.kl
  assert free.kl.any()
  np.testing.assert_allclose(taxed.loss, expected, rtol=FLOAT32_TOLERANCE)


def test_without_a_reference_the_kl_reads_zero():
  inputs = problem() | {"ref_log_probs": None}
  out = objectives.grpo_token_losses(**inputs, config=ObjectiveConfig())
  assert not out.kl.any()


def test_a_kl_coefficient_without_a_reference_is_refused():
  inputs = problem() | {"ref_log_probs": None}
  with pytest.raises(ValueError, match=r"kl_coef=0.1.*ref_log_probs=None"):
    objectives.grpo_token_losses(**inputs, config=ObjectiveConfig(kl_coef=0.1))


@pytest.mark.parametrize(
    "name,value,wanted",
    [
        ("clip_eps_low", -0.1, r"in \[0, 1\]"),
        ("clip_eps_low", 1.1, r"in \[0, 1\]"),
        ("clip_eps_low", float("nan"), r"in \[0, 1\]"),
        ("clip_eps_high", -0.1, ">= 0"),
        ("clip_eps_high", float("nan"), ">= 0"),
        ("kl_coef", -1.0, "finite and >= 0"),
        ("kl_coef", float("inf"), "finite and >= 0"),
        ("kl_estimator", "k2", "k1, k3"),
        ("aggregation", "mean", "response_mean, token_mean"),
    ],
)
def test_config_refuses_by_name_and_lists_what_is_allowed(name, value, wanted):
  with pytest.raises(ValueError, match=f"{name}=.*{wanted}"):
    ObjectiveConfig(**{name: value})

"""The rules that choose experts and weigh them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling import router
from pallas_kernels.shapes import wide_dtype

M, E, A = 64, 16, 4
RULES = {
    "softmax": lambda logits, recorded=None: router.softmax(
        logits, recorded, per_token=A
    ),
    "sigmoid": lambda logits, recorded=None, bias=0.0: router.sigmoid(
        logits,
        recorded,
        bias * jnp.ones(E, wide_dtype(logits.dtype)),
        per_token=A,
        scale=2.5,
    ),
}


def draw(*shape):
  return jnp.asarray(np.random.default_rng(0).normal(size=shape))


def scores(rule, logits):
  logits = np.asarray(logits)
  if rule == "sigmoid":
    return 1 / (1 + np.exp(-logits))
  return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def weighed(rule, logits, experts):
  """Weights of given experts, by numpy."""
  chosen = np.take_along_axis(scores(rule, logits), np.asarray(experts), -1)
  total = {"softmax": 1.0, "sigmoid": 2.5}[rule]
  return total * chosen / chosen.sum(-1, keepdims=True)


@pytest.mark.parametrize("rule", RULES)
def test_the_highest_scores_are_chosen_and_their_weights_normalised(x64, rule):
  logits = draw(M, E)
  weights, experts = RULES[rule](logits)
  order = np.argsort(-scores(rule, logits), axis=-1)[:, :A]
  np.testing.assert_array_equal(experts, order)
  np.testing.assert_allclose(weights, weighed(rule, logits, order), 1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lower_expert(rule):
  few = jnp.round(draw(M, E).astype(jnp.float32))  # many are equal
  _, experts = RULES[rule](few)
  order = np.argsort(-np.asarray(few), axis=-1, kind="stable")[:, :A]
  np.testing.assert_array_equal(experts, order)


def test_the_bias_is_in_the_choice_and_not_in_the_weights(x64):
  logits, bias = draw(M, E), 2.0 * draw(E)
  weights, experts = RULES["sigmoid"](logits, bias=bias)
  biased = scores("sigmoid", logits) + np.asarray(bias)
  np.testing.assert_array_equal(experts, np.argsort(-biased, -1)[:, :A])
  assert np.any(experts != RULES["sigmoid"](logits)[1])
  np.testing.assert_allclose(weights, weighed("sigmoid", logits, experts))


def test_a_bias_near_seven_is_not_rounded():
  """In bfloat16 all of these are 7: the first experts would be chosen."""
  bias = 7.0 + 0.001 * jnp.arange(E, dtype=jnp.float32)
  choose = lambda bias: RULES["sigmoid"](jnp.zeros((1, E)), bias=bias)[1][0]
  assert choose(bias).tolist() == [15, 14, 13, 12]
  rounded = bias.astype(jnp.bfloat16).astype(jnp.float32)
  assert choose(rounded).tolist() == [0, 1, 2, 3]


def test_scores_that_vanish_give_weights_of_zero():
  weights, _ = RULES["sigmoid"](jnp.full((1, E), -200.0))
  assert weights.tolist() == [[0.0] * A]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_float32_and_experts_int32(rule, dtype):
  weights, experts = RULES[rule](draw(M, E).astype(dtype))
  assert (weights.dtype, experts.dtype) == (jnp.float32, jnp.int32)


@pytest.mark.parametrize("rule", RULES)
def test_recorded_experts_are_weighed_and_not_chosen(x64, rule):
  logits = draw(M, E)
  recorded = jnp.tile(jnp.array([9, 2, 14, 3], jnp.int32), (M, 1))
  weights, experts = RULES[rule](logits, recorded)
  np.testing.assert_array_equal(experts, recorded)
  np.testing.assert_allclose(weights, weighed(rule, logits, recorded), 1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_recorded_experts_have_the_gradient_of_chosen_ones(x64, rule):
  logits, by = draw(M, E), draw(M, A)
  experts = RULES[rule](logits)[1]
  gradient = lambda recorded: jax.grad(
      lambda logits: (by * RULES[rule](logits, recorded)[0]).sum()
  )(logits)
  chosen, replayed = gradient(None), gradient(experts)
  np.testing.assert_array_equal(chosen, replayed)
  step, along = 1e-6, draw(M, E)
  moved = [
      (by * RULES[rule](logits + h * along, experts)[0]).sum()
      for h in (step, -step)
  ]
  slope = (moved[0] - moved[1]) / (2 * step)
  assert abs(slope) > 0.1
  np.testing.assert_allclose((chosen * along).sum(), slope, rtol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_another_number_of_recorded_experts_is_refused(rule):
  recorded = jnp.zeros((M, A + 1), jnp.int32)
  message = "5 experts for each token; want num_experts_per_tok=4"
  with pytest.raises(ValueError, match=message):
    RULES[rule](jnp.zeros((M, E)), recorded)

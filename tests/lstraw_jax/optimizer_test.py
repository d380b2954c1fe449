"""What the optimizer does to each kind of weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lstraw_jax.optimizer import OptimizerConfig, make_optimizer
from lstraw_jax.policy import make_policy
from modeling.decoder_config import LoraConfig
from modeling.models import abstract_model
from modeling.parameter import param
from tests import tiny

BASE = OptimizerConfig(learning_rate=0.1)
# Vectors of one layer; stacked over layers they are matrices too.
VECTORS = {"weight", "A_log", "dt_bias"}
MATRICES = {
    "kernel", "embed_tokens", "conv1d", "gate", "gate_up_proj", "down_proj",
}  # fmt: skip


def weights(name="tiny", **changes):
  """Trained weights of a random policy."""
  config = tiny.config(name, dtype="float32", **changes)
  return tiny.policy(config).trainable


def updates(config, weights, gradients):
  """Updates of consecutive steps, for a gradient each."""
  optimizer = make_optimizer(config)

  @jax.jit
  def run(weights, gradients):
    state, found = optimizer.init(weights), []
    for gradient in gradients:
      update, state = optimizer.update(gradient, state, weights)
      found.append(update)
    return found

  with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
    return run(weights, gradients)


def constant(weights, value):
  """A gradient with the same value everywhere."""
  return jax.tree.map(lambda x: jnp.full_like(x, value), weights)


@pytest.mark.parametrize(
    "name,vectors,matrices",
    [
        ("tiny-moe", VECTORS, MATRICES),
        ("tiny-glm", {"weight"}, MATRICES - {"conv1d", "gate"}),
    ],
)
def test_weight_decay_acts_on_matrices_alone(name, vectors, matrices):
  before = weights(name)
  config = dataclasses.replace(BASE, weight_decay=0.5)
  (update,) = updates(config, before, [constant(before, 0.0)])
  decayed, left = set(), set()
  flat = lambda state: dict(nnx.to_flat_state(state))
  values = flat(before)
  for path, change in flat(update).items():
    value = np.asarray(values[path][...])
    if np.any(change[...]):
      decayed.add(path[-1])
      np.testing.assert_allclose(change[...], -0.1 * 0.5 * value, rtol=1e-6)
    else:
      left.add(path[-1])
  assert left == vectors
  assert decayed == matrices


def test_adapters_decay_though_they_are_stacked():
  adapters = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",))
  before = weights(lora=adapters)
  config = dataclasses.replace(BASE, weight_decay=0.5)
  (update,) = updates(config, before, [constant(before, 0.0)])
  assert all(np.any(x) for x in jax.tree.leaves(update))


def test_the_optimizer_state_covers_adapters_alone():
  policy = make_policy(
      abstract_model(tiny.config(dtype="float32", lora=tiny.ALL_ADAPTERS))
  )
  adapters = jax.tree.leaves(policy.trainable)
  state = jax.eval_shape(make_optimizer(BASE).init, policy.trainable)
  moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
  shapes = sorted(leaf.shape for leaf in adapters)
  assert sorted(leaf.shape for leaf in moments) == sorted(shapes * 2)
  assert {leaf.dtype for leaf in moments} == {np.dtype("float32")}
  frozen = sum(leaf.size for leaf in jax.tree.leaves(policy.frozen))
  assert sum(leaf.size for leaf in moments) < 0.5 * frozen


def one_matrix(value, *, seed=0):
  """Weights of a single matrix, and gradients for them."""
  rng = np.random.default_rng(seed)
  state = lambda x: nnx.State({"w": param(jnp.asarray(x), ("embed", "mlp"))})
  draw = lambda: rng.normal(size=(2, 3)).astype(np.float32)
  gradients = [value * draw() for _ in range(6)]
  return state(draw()), [state(g) for g in gradients], gradients


def matrix(state) -> np.ndarray:
  """The matrix of `one_matrix`'s states."""
  return np.asarray(state["w"][...])


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_steps_follow_adamw_at_the_warmed_up_rate(warmup_steps):
  config = OptimizerConfig(
      learning_rate=0.1,
      warmup_steps=warmup_steps,
      beta1=0.8,
      beta2=0.7,
      eps=0.3,
      weight_decay=0.2,
      max_grad_norm=1e9,
  )
  weights, states, gradients = one_matrix(1.0)
  found = updates(config, weights, states)
  mean = square = 0.0
  for step, gradient in enumerate(gradients):
    mean = 0.8 * mean + 0.2 * gradient
    square = 0.7 * square + 0.3 * gradient**2
    direction = (mean / (1 - 0.8 ** (step + 1))) / (
        np.sqrt(square / (1 - 0.7 ** (step + 1))) + 0.3
    )
    rate = 0.1 * min(1.0, (step + 1) / max(warmup_steps, 1))
    wanted = -rate * (direction + 0.2 * matrix(weights))
    np.testing.assert_allclose(matrix(found[step]), wanted, rtol=2e-5)


def test_gradients_are_clipped_by_their_global_norm():
  # With eps 1 the first step of Adam shows the size of the gradient.
  config = dataclasses.replace(BASE, eps=1.0, max_grad_norm=0.5)
  weights, states, gradients = one_matrix(100.0)
  (update,) = updates(config, weights, states[:1])
  clipped = 0.5 * gradients[0] / np.linalg.norm(gradients[0])
  wanted = -0.1 * clipped / (np.abs(clipped) + 1.0)
  np.testing.assert_allclose(matrix(update), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "name,value",
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("eps", 0.0),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", float("nan")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=f"{name}={value}: want"):
    dataclasses.replace(BASE, **{name: value})

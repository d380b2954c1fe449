"""Adapters of experts are what merged weights would be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import presets, sharding
from modeling.decoder_config import LoraConfig
from modeling.experts import Experts

B, T, D, E, A, F, R = 2, 8, 16, 8, 3, 6, 4
LORA = LoraConfig(rank=R, alpha=10.0, targets=("experts",))
CONFIG = presets.preset("tiny-moe").replace(
    hidden_size=D, lora=LORA, dtype="float64", param_dtype="float64"
)
SHAPES = {
    "gate_up_proj": (E, D, 2 * F),
    "gate_up_proj_lora_a": (E, 2, D, R),
    "gate_up_proj_lora_b": (E, 2, R, F),
    "down_proj": (E, F, D),
    "down_proj_lora_a": (E, F, R),
    "down_proj_lora_b": (E, R, D),
}


def make(config=CONFIG, mesh=None):
  mesh = sharding.make_mesh() if mesh is None else mesh
  return Experts(E, F, config=config, mesh=mesh, rngs=nnx.Rngs(0))


def filled(config, weights):
  """Experts with these weights."""
  graph, state = nnx.split(nnx.eval_shape(lambda: make(config)))
  values = {name: jnp.asarray(weights[name]) for name in state}
  nnx.replace_by_pure_dict(state, values)
  return nnx.merge(graph, state)


def tokens():
  rng = np.random.default_rng(1)
  every = np.tile(np.arange(E, dtype=np.int32), (B, T, 1))
  return jnp.asarray(rng.normal(size=(B, T, D))), dict(
      weights=jnp.asarray(rng.uniform(size=(B, T, A))),
      experts=jnp.asarray(rng.permuted(every, axis=-1)[..., :A]),
  )


def random_weights():
  rng = np.random.default_rng(0)
  return {
      name: rng.normal(size=shape) * shape[-2] ** -0.5
      for name, shape in SHAPES.items()
  }


def test_merged_weights_do_what_adapters_do(x64):
  weights = random_weights()
  names = ("gate_up_proj", "down_proj")
  merged = {name: weights[name].copy() for name in names}
  scale = LORA.alpha / R
  for e in range(E):
    a, b = (weights[f"gate_up_proj_lora_{x}"][e] for x in "ab")
    merged["gate_up_proj"][e, :, :F] += scale * a[0] @ b[0]
    merged["gate_up_proj"][e, :, F:] += scale * a[1] @ b[1]
    a, b = (weights[f"down_proj_lora_{x}"][e] for x in "ab")
    merged["down_proj"][e] += scale * a @ b
  x, choice = tokens()
  plain = CONFIG.replace(lora=None)
  adapted = filled(CONFIG, weights)(x, **choice)
  wanted = filled(plain, merged)(x, **choice)
  np.testing.assert_allclose(adapted, wanted, rtol=0, atol=1e-12)
  without = filled(plain, weights)(x, **choice)
  assert np.abs(adapted - without).max() > 1.0


def test_fresh_adapters_change_nothing(x64):
  x, choice = tokens()
  weights = {k: v.get_value() for k, v in nnx.state(make()).items()}
  assert np.any(weights["gate_up_proj_lora_a"])
  assert np.any(weights["down_proj_lora_a"])
  adapted = filled(CONFIG, weights)(x, **choice)
  plain = filled(CONFIG.replace(lora=None), weights)(x, **choice)
  np.testing.assert_array_equal(adapted, plain)
  assert np.any(plain)


def test_a_is_drawn_with_the_scale_of_its_inputs(x64):
  lora = LoraConfig(rank=64, alpha=1.0, targets=("experts",))
  made = make(CONFIG.replace(hidden_size=256, lora=lora))
  gate_up, down = made.gate_up_proj_lora_a[...], made.down_proj_lora_a[...]
  assert math.isclose(gate_up.std(), 256**-0.5, rel_tol=0.05)
  assert math.isclose(down.std(), F**-0.5, rel_tol=0.05)


def test_adapters_are_wide_and_lie_where_their_experts_do():
  mesh = sharding.make_mesh(data=2, context=2, tensor=2)
  config = CONFIG.replace(param_dtype="bfloat16")
  state = nnx.state(nnx.eval_shape(lambda: make(config, mesh)))
  parts = {
      "gate_up_proj": (4, 8, 6),
      "gate_up_proj_lora_a": (4, 2, 8, R),
      "gate_up_proj_lora_b": (4, 2, R, 3),
      "down_proj": (4, 3, 8),
      "down_proj_lora_a": (4, 3, R),
      "down_proj_lora_b": (4, R, 8),
  }
  assert {name: leaf.shape for name, leaf in state.items()} == SHAPES
  for name, leaf in state.items():
    layout = sharding.sharding(mesh, sharding.names(leaf))
    assert layout.shard_shape(leaf.shape) == parts[name], name
    adapter = "lora" in name
    assert type(leaf) is (nnx.LoRAParam if adapter else nnx.Param)
    assert leaf.dtype == ("float32" if adapter else "bfloat16")


def test_experts_without_a_target_have_no_adapter(x64):
  lora = LoraConfig(rank=R, alpha=1.0, targets=("down_proj",))
  state = nnx.state(nnx.eval_shape(lambda: make(CONFIG.replace(lora=lora))))
  assert set(state) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("context", [1, 4])
def test_frozen_weights_get_no_gradient(x64, context):
  """The compiler drops it, out of the loop over rounds as well."""
  mesh = sharding.make_mesh(context=context)
  graph, state = nnx.split(nnx.eval_shape(lambda: make(mesh=mesh)))
  x, choice = tokens()

  def loss(trained, frozen, x):
    return nnx.merge(graph, trained, frozen)(x, **choice).sum()

  def flops(kind):
    trained, frozen = nnx.split_state(state, kind, ...)
    compiled = jax.jit(jax.grad(loss)).lower(trained, frozen, x).compile()
    return compiled.cost_analysis()["flops"]

  # Measured: 0.77.
  assert flops(nnx.LoRAParam) < 0.8 * flops(nnx.Param)

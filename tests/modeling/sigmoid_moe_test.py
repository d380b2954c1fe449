"""GLM's mixture over a mesh is what a loop over tokens computes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import expert_exchange, sharding
from modeling.decoder_config import LoraConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.moe import SigmoidMoE
from modeling.parameter import Buffer
from tests import programs

TOLERANCE = 1e-12  # of the largest entry of each leaf, in float64
B, T, D, E, A, F, R = 2, 8, 16, 8, 2, 6, 3
CONFIG = GlmMoeDsaConfig(
    vocab_size=32,
    hidden_size=D,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    moe_intermediate_size=F,
    n_routed_experts=E,
    num_experts_per_tok=A,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    q_lora_rank=4,
    kv_lora_rank=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    index_n_heads=2,
    index_head_dim=4,
    index_topk=4,
    indexer_types=("full",),
    mlp_layer_types=("sparse",),
    lora=LoraConfig(rank=R, alpha=2.0 * R, targets=("experts", "up_proj")),
    dtype="float64",
    param_dtype="float64",
)
TOKENS = ("batch", "time", None)
ONE = (1, 1, 1)
MESHES = [(1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2)]
# For each row of the batch: do all of its tokens go to experts 0 and 1?
LOADS = {"spread": (0, 0), "two experts": (1, 1), "one row": (0, 1)}


def mesh_of(shape):
  return sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)))


def abstract(shape, dtype="float64"):
  config = CONFIG.replace(dtype=dtype, param_dtype=dtype)
  make = lambda: SigmoidMoE(config, mesh=mesh_of(shape), rngs=nnx.Rngs(0))
  return nnx.split(nnx.eval_shape(make))


def problem(load="spread", dtype="float64"):
  """Weights and tokens at random, numpy arrays; no adapter is zero."""
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.normal(size=shape) * shape[-2] ** -0.5
  state = jax.tree.map(
      lambda leaf: draw((1, *leaf.shape))[0].astype(leaf.dtype),
      abstract(ONE, dtype)[1],
  )
  x = (2.0 * draw((B, T, D))).astype(dtype)
  x[..., 0] = np.array(LOADS[load])[:, None]
  gate = nnx.to_pure_dict(state)["gate"]
  gate["e_score_correction_bias"] *= 0.2  # of scores in (0, 1)
  gate["kernel"][0] = np.where(np.arange(E) < 2, 6.0, -6.0)  # of logits near 1
  return state, x


@functools.cache
def program(shape, replay=False, dtype="float64"):
  """The layer with its gradients, from arrays that lie on the mesh at rest."""
  graph, state = abstract(shape, dtype)
  mesh = mesh_of(shape)
  at_rest = sharding.shardings(state, mesh)
  tokens = sharding.sharding(mesh, TOKENS)

  def value(state, x, recorded):
    out, experts = nnx.merge(graph, state)(x, recorded)
    return jnp.sin(out.astype(jnp.float64)).sum(), (out, experts)

  run = jax.jit(
      jax.value_and_grad(value, argnums=(0, 1), has_aux=True),
      in_shardings=(at_rest, tokens, tokens if replay else None),
      out_shardings=(None, (at_rest, tokens)),
  )
  x = jax.ShapeDtypeStruct((B, T, D), dtype)
  recorded = jax.ShapeDtypeStruct((B, T, A), jnp.int32) if replay else None
  return run.lower(state, x, recorded).compile()


def by_hand(state, x, recorded=None):
  """Output and experts, token by token in float64, adapters as written."""
  w, scale = nnx.to_pure_dict(state), CONFIG.lora.alpha / R
  w = jax.tree.map(np.asarray, w)
  silu = lambda z: z / (1 + np.exp(-z))

  def product(x, kernel, a, b):
    return x @ kernel + scale * (x @ a @ b)

  def expert(token, e):
    mine = {name: leaf[e] for name, leaf in w["experts"].items()}
    a, b = mine["gate_up_proj_lora_a"], mine["gate_up_proj_lora_b"]
    gate = product(token, mine["gate_up_proj"][:, :F], a[0], b[0])
    up = product(token, mine["gate_up_proj"][:, F:], a[1], b[1])
    a, b = mine["down_proj_lora_a"], mine["down_proj_lora_b"]
    return product(silu(gate) * up, mine["down_proj"], a, b)

  def shared(token):
    mine = w["shared_experts"]
    up = product(token, *(mine["up_proj"][k] for k in _LINEAR))
    gate = silu(token @ mine["gate_proj"]["kernel"])
    return (gate * up) @ mine["down_proj"]["kernel"]

  out, experts = np.empty(x.shape), np.empty((*x.shape[:2], A), np.int32)
  bias = w["gate"]["e_score_correction_bias"]
  for at in np.ndindex(*x.shape[:2]):
    score = 1 / (1 + np.exp(-(x[at] @ w["gate"]["kernel"])))
    order = sorted(range(E), key=lambda e: (-(score[e] + bias[e]), e))
    experts[at] = order[:A] if recorded is None else recorded[at]
    total = score[experts[at]].sum() + 1e-20
    out[at] = shared(x[at]) + sum(
        2.5 * score[e] / total * expert(x[at], e) for e in experts[at]
    )
  return out, experts


_LINEAR = ("kernel", "lora_a", "lora_b")


@jax.jit
def gradients(state, x, experts):
  """Those of the dense formula, for given experts."""

  def value(w, x):
    scale, w = CONFIG.lora.alpha / R, dict(w)
    routed, shared = w["experts"], w["shared_experts"]
    merged = lambda name: scale * jnp.einsum(
        "...ir,...ro->...io", routed[f"{name}_lora_a"], routed[f"{name}_lora_b"]
    )
    gate_up = jnp.stack(jnp.split(routed["gate_up_proj"], 2, axis=-1), axis=1)
    gate_up += merged("gate_up_proj")
    down = routed["down_proj"] + merged("down_proj")
    chosen = jax.nn.one_hot(experts, E, dtype=x.dtype).sum(2)
    score = jax.nn.sigmoid(x @ w["gate"]["kernel"]) * chosen
    score *= 2.5 / score.sum(-1, keepdims=True)
    both = jnp.einsum("btd,ehdf->hbtef", x, gate_up)
    out = jnp.einsum(
        "btef,efd,bte->btd", jax.nn.silu(both[0]) * both[1], down, score
    )
    up = shared["up_proj"]
    up = up["kernel"] + scale * up["lora_a"] @ up["lora_b"]
    act = jax.nn.silu(x @ shared["gate_proj"]["kernel"]) * (x @ up)
    return jnp.sin(out + act @ shared["down_proj"]["kernel"]).sum()

  w = jax.tree.map(jnp.asarray, nnx.to_pure_dict(state))
  return jax.grad(value, argnums=(0, 1))(w, x)


def assert_close(got, wanted):
  def check(path, got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    error = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-4)
    assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: {error}"

  jax.tree_util.tree_map_with_path(check, got, wanted)


def assert_right(ours, state, x, recorded=None):
  """Compares output, experts, and gradients leaf by leaf."""
  (_, (out, experts)), (d_state, dx) = ours
  wanted_out, wanted_experts = by_hand(state, x, recorded)
  np.testing.assert_array_equal(experts, wanted_experts)
  assert_close(out, wanted_out)
  assert_close(
      (nnx.to_pure_dict(d_state), dx), gradients(state, x, wanted_experts)
  )


@pytest.mark.first_class
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("shape", [ONE, *MESHES])
def test_any_mesh_gives_what_a_loop_over_tokens_gives(x64, shape, load):
  state, x = problem(load)
  ours = program(shape)(state, x, None)
  assert_right(ours, state, x)
  experts = ours[0][1][1]
  layout = sharding.sharding(mesh_of(shape), TOKENS)
  assert experts.sharding.is_equivalent_to(layout, 3)


@pytest.mark.parametrize(("context", "longest_list"), [(4, 8), (8, 2)])
def test_the_load_of_two_experts_takes_rounds(x64, context, longest_list):
  """Of 4 shards one has both of the experts, of 8 each has its own."""
  _, experts = by_hand(*problem("two experts"))
  assert set(experts.flat) == {0, 1}
  rows = B * T * A // context
  assert longest_list > expert_exchange.round_capacity(rows, context)


@pytest.mark.parametrize("shape", [ONE, (1, 4, 1)])
def test_its_own_experts_recorded_change_nothing(x64, shape):
  state, x = problem()
  chosen = program(shape)(state, x, None)
  replayed = program(shape, replay=True)(state, x, chosen[0][1][1])
  jax.tree.map(np.testing.assert_array_equal, chosen, replayed)


@pytest.mark.parametrize("shape", [ONE, (1, 4, 1)])
def test_other_recorded_experts_get_weights_of_their_own(x64, shape):
  state, x = problem()
  rng = np.random.default_rng(1)
  every = np.tile(np.arange(E, dtype=np.int32), (B, T, 1))
  recorded = rng.permuted(every, axis=-1)[..., :A]
  ours = program(shape, replay=True)(state, x, recorded)
  assert_right(ours, state, x, recorded)
  d_kernel = ours[1][0]["gate"]["kernel"].get_value()
  assert np.abs(d_kernel).max() > 0.1


def test_the_bias_is_a_buffer_without_a_gradient(x64):
  bias = abstract(ONE)[1]["gate"]["e_score_correction_bias"]
  assert type(bias) is Buffer
  _, (d_state, _) = program(ONE)(*problem(), None)
  assert not np.any(d_state["gate"]["e_score_correction_bias"].get_value())


def test_router_and_adapters_alone_are_wide_in_a_bfloat16_model():
  for path, leaf in nnx.to_flat_state(abstract(ONE, "bfloat16")[1]):
    wide = path[0] == "gate" or "lora_" in path[-1]
    assert leaf.dtype == ("float32" if wide else "bfloat16"), path


def test_a_bfloat16_model_chooses_as_float32_does():
  """With biases near 7, as in GLM-5.2: bfloat16 has steps of 1/32 there."""
  state, x = problem(dtype="bfloat16")
  gate = state["gate"]
  rng = np.random.default_rng(2)
  bias = (7 + 0.002 * rng.normal(size=E)).astype(np.float32)
  like = 0.3 * rng.normal(size=(D, 1))
  kernel = (like + 0.003 * rng.normal(size=(D, E))).astype(np.float32)
  gate["e_score_correction_bias"].set_value(bias)
  gate["kernel"].set_value(kernel)
  _, experts = layer("bfloat16")(state, x)

  def choose(kernel, bias, cast):
    logits = cast(x.astype(np.float64) @ kernel.astype(np.float64))
    score = cast(1 / (1 + np.exp(-logits))) + bias.astype(np.float64)
    return np.argsort(-score, axis=-1, kind="stable")[..., :A]

  exact = lambda x: x
  rounded = lambda x: x.astype(jnp.bfloat16).astype(np.float64)
  np.testing.assert_array_equal(experts, choose(kernel, bias, exact))
  differ = lambda *given: np.any(choose(*given) != experts, axis=-1).sum()
  assert differ(kernel, rounded(bias), exact)
  assert differ(rounded(kernel), bias, exact)
  assert differ(kernel, bias, rounded)


@functools.cache
def layer(dtype):
  graph, _ = abstract(ONE, dtype)
  return jax.jit(lambda state, x: nnx.merge(graph, state)(x))


def test_no_buffer_has_tokens_experts_and_hidden(x64):
  """As traced: a CPU has no grouped product and masks rows in its place."""
  graph, state = abstract(ONE)

  def loss(state, x):
    return nnx.merge(graph, state)(x)[0].sum()

  x = jax.ShapeDtypeStruct((B, T, D), "float64")
  traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(state, x)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert "ragged_dot" in text
  shapes = re.findall(r"tensor<((?:\d+x)+)f64>", text)
  sizes = [np.prod([int(n) for n in s.split("x")[:-1]]) for s in shapes]
  assert max(sizes) == E * D * 2 * F < B * T * E * D


def test_experts_and_adapters_stay_where_they_are(x64):
  """Weights are gathered as ZeRO-3 cuts them, and nothing else is."""
  _, context, tensor = shape = (2, 2, 2)
  found = programs.collectives(program(shape))
  shapes = {s for x in found if x.kind == "all-gather" for s in x.shapes}
  experts, inner, shared = E // context, F // tensor, 2 * F // tensor
  assert shapes == {
      (experts, D, 2 * inner), (experts, 2, D, R),
      (experts, inner, D), (experts, R, D),
      (D, E), (D, shared), (shared, D), (D, R),
  }  # fmt: skip

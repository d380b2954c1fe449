"""Experts over a mesh give what a loop over all experts gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import expert_exchange, presets, sharding
from modeling.moe import SoftmaxMoE
from modeling.qwen3_5_config import MoeConfig
from tests import programs

FLOAT64_TOLERANCE = 1e-10  # of the largest entry of each leaf
BFLOAT16_TOLERANCE = 0.03  # likewise; the largest error is 0.014
B, T, D, E, F = 2, 8, 16, 8, 6
CONFIG = presets.preset("tiny-moe").replace(
    hidden_size=D,
    moe=MoeConfig(
        num_experts=E,
        num_experts_per_tok=2,
        moe_intermediate_size=F,
        shared_expert_intermediate_size=10,
    ),
)
TOKENS = ("batch", "time", None)
ONE = (1, 1, 1)
MESHES = [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)]
# For each row of the batch: do all of its tokens go to experts 0 and 1? Where
# only one does, other replicas of `data` take other numbers of rounds.
LOADS = {"spread": (0, 0), "two experts": (1, 1), "one row": (0, 1)}


def mesh_of(shape):
  return sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)))


def abstract(mesh, dtype="float64"):
  config = CONFIG.replace(dtype=dtype, param_dtype=dtype)
  make = lambda: SoftmaxMoE(config, mesh=mesh, rngs=nnx.Rngs(0))
  return nnx.split(nnx.eval_shape(make))


def problem(load="spread", *, ties=False, dtype="float64"):
  """Weights and tokens at random, numpy arrays."""
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.normal(size=shape) * shape[-2] ** -0.5
  state = jax.tree.map(
      lambda leaf: draw(leaf.shape).astype(leaf.dtype),
      abstract(mesh_of(ONE), dtype)[1],
  )
  x = (2.0 * draw((B, T, D))).astype(dtype)
  x[..., 0] = np.array(LOADS[load])[:, None]
  gate = jax.tree.leaves(state["gate"])[0]
  gate[0] = np.where(np.arange(E) < 2, 20.0, 0.0)  # of logits around 1
  gate *= not ties
  return state, x


def compiled(shape, dtype="float64"):
  """The layer with its gradients, from arrays that lie on the mesh at rest."""
  mesh = mesh_of(shape)
  graph, state = abstract(mesh, dtype)

  def value(state, x):
    out = nnx.merge(graph, state)(x)
    return jnp.sin(out.astype(jnp.float64)).sum(), out

  run = jax.jit(
      jax.value_and_grad(value, argnums=(0, 1), has_aux=True),
      in_shardings=(
          sharding.shardings(state, mesh),
          sharding.sharding(mesh, TOKENS),
      ),
  )
  x = jax.ShapeDtypeStruct((B, T, D), dtype)
  return run.lower(state, x).compile()


program = functools.cache(compiled)


@jax.jit
def oracle(state, x):
  """The same by a loop over all experts, without a sort."""
  w = jax.tree.map(jnp.asarray, nnx.to_pure_dict(state))
  earlier = np.tri(E, k=-1, dtype=bool)  # [e, f]: f < e

  def value(w, x):
    chance = jax.nn.softmax(x @ w["gate"])
    this, other = chance[..., :, None], chance[..., None, :]
    ahead = (other > this) | ((other == this) & earlier[None, None])
    chance = jnp.where(ahead.sum(-1) < 2, chance, 0.0)
    chance /= chance.sum(-1, keepdims=True)
    out = jax.nn.sigmoid(x @ w["shared_expert_gate"]["kernel"])
    shared = {k: v["kernel"] for k, v in w["shared_expert"].items()}
    act = jax.nn.silu(x @ shared["gate_proj"]) * (x @ shared["up_proj"])
    out *= act @ shared["down_proj"]
    for e in range(E):
      gate, up = jnp.split(w["experts"]["gate_up_proj"][e], 2, axis=1)
      act = jax.nn.silu(x @ gate) * (x @ up)
      out += chance[..., e, None] * (act @ w["experts"]["down_proj"][e])
    return jnp.sin(out).sum(), out

  return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(w, x)


def assert_equal(ours, expected, tolerance=FLOAT64_TOLERANCE):
  """Compares values, and gradients leaf by leaf."""
  (value, out), (d_state, dx) = ours
  ours = (value, out), (nnx.to_pure_dict(d_state), dx)

  def check(path, got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    error = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-4)
    assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error}"

  jax.tree_util.tree_map_with_path(check, ours, expected)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("shape", [ONE, *MESHES])
def test_no_token_is_dropped_on_any_mesh(x64, shape, load):
  weights_and_x = problem(load)
  assert_equal(program(shape)(*weights_and_x), oracle(*weights_and_x))


@pytest.mark.parametrize("shape", [ONE, (1, 8, 1)])
def test_ties_go_to_the_lower_expert(x64, shape):
  weights_and_x = problem(ties=True)
  ours = program(shape)(*weights_and_x)
  assert_equal(ours, oracle(*weights_and_x))
  d_down = nnx.to_pure_dict(ours[1][0])["experts"]["down_proj"]
  assert np.flatnonzero(np.abs(d_down).max((1, 2))).tolist() == [0, 1]


def test_bfloat16_is_close_to_float64(x64):
  weights, x = problem(dtype="bfloat16")
  ours = program((1, 4, 2), "bfloat16")(weights, x)
  assert ours[0][1].dtype == jnp.bfloat16
  exact = jax.tree.map(lambda leaf: leaf.astype(np.float64), (weights, x))
  assert_equal(ours, oracle(*exact), BFLOAT16_TOLERANCE)


def test_rows_after_the_last_group_are_not_used(x64, monkeypatch):
  """Even where `ragged_dot` makes NaN of them, and multiplies NaN by zero."""
  plain = jax.lax.ragged_dot

  def spoil(rows, counts):
    real = jnp.arange(len(rows)) < counts.sum()
    return jnp.where(real[:, None], rows, jnp.nan)

  @jax.custom_vjp
  def spoiled(rows, weights, counts):
    return spoil(plain(rows, weights, counts) + 0.0 * rows.sum(), counts)

  def forward(*inputs):
    return spoiled(*inputs), inputs

  def backward(inputs, d_out):
    rows, weights, counts = inputs
    multiply = lambda rows, weights: plain(rows, weights, counts)
    d_rows, d_weights = jax.vjp(multiply, rows, weights)[1](d_out)
    return spoil(d_rows, counts), d_weights + 0.0 * d_out.sum(), None

  spoiled.defvjp(forward, backward)
  monkeypatch.setattr(jax.lax, "ragged_dot", spoiled)
  weights_and_x = problem()
  assert_equal(compiled((1, 2, 1))(*weights_and_x), oracle(*weights_and_x))


@pytest.mark.parametrize("shape", [(2, 4, 1), (2, 2, 2)])
def test_rows_travel_and_experts_stay(x64, shape):
  """Weights are gathered as ZeRO-3 cuts them, and nothing else is."""
  _, context, tensor = shape
  found = programs.collectives(program(shape))
  shapes = lambda kind: {s for x in found if x.kind == kind for s in x.shapes}
  experts, inner, shared = E // context, F // tensor, 10 // tensor
  assert shapes("all-gather") == {
      (experts, D, 2 * inner), (experts, inner, D),
      (D, E), (D, 1), (D, shared), (shared, D),
  }  # fmt: skip
  rows = expert_exchange.round_capacity(2 * B * T // 2 // context, context)
  assert (1, rows, D) in shapes("all-to-all")


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ([8] * 8, 1),
        ([16] * 4 + [0] * 4, 1),  # twice the share
        ([17, 0, 7, 8, 8, 8, 8, 8], 2),
        ([0] * 7 + [64], 4),
    ],
)
def test_balanced_loads_take_one_round(sizes, rounds):
  """One shard alone has these lists; the others have balanced ones."""
  lists = np.full((8, 8), 8, np.int32)
  lists[3] = sizes
  capacity = expert_exchange.round_capacity(64, 8)
  needed = jax.shard_map(
      lambda lists: expert_exchange.rounds_needed(lists[0], capacity),
      mesh=sharding.make_mesh(context=8),
      in_specs=sharding.spec(("time", None)),
      out_specs=sharding.spec(()),
  )
  assert needed(lists) == rounds


@pytest.mark.parametrize(
    ("rows", "shards", "capacity"),
    [(64, 1, 64), (64, 2, 64), (64, 4, 32), (3, 4, 2), (1, 8, 1)],
)
def test_a_round_has_room_for_twice_the_share(rows, shards, capacity):
  assert expert_exchange.round_capacity(rows, shards) == capacity


def test_experts_that_the_mesh_does_not_divide_are_refused(x64):
  mesh = sharding.make_mesh(context=3)
  with pytest.raises(
      ValueError,
      match=r"experts.gate_up_proj\[8, 16, 12\]: its axis 'experts' of 8 does "
      r"not divide over 3 devices of context",
  ):
    sharding.check_fits(abstract(mesh)[1], mesh)

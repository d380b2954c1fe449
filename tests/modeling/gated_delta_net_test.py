"""Gated DeltaNet: the same on every mesh, whatever stands around a segment."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import presets
from modeling.gated_delta_net import GatedDeltaNet
from modeling.layer_state import empty_recurrent
from modeling.sharding import AXES, make_mesh, sharding
from tests import programs, tiny

# Largest error of a leaf, relative to its largest entry.
FLOAT64_TOLERANCE = 1e-10

SPREAD, PASSED = 8, 2  # key heads: `context` divides the first number only
ONE, CONTEXT, ALL = (1, 1, 1), (1, 8, 1), (2, 2, 2)  # data, context, tensor
TOKENS = 8  # of a frame; 1, 2 or 4 a shard, and the window is 3
RUNS = ((0, 8), (2, 5), (7, 8), (3, 3))  # real tokens of each row
HIDDEN, K, V = 24, 7, 5


def config(key_heads):
  return presets.preset("tiny").replace(
      hidden_size=HIDDEN,
      linear_num_key_heads=key_heads,
      linear_num_value_heads={SPREAD: SPREAD, PASSED: 3 * PASSED}[key_heads],
      linear_key_head_dim=K,
      linear_value_head_dim=V,
      dtype="float64",
      param_dtype="float64",
  )


def mesh_of(sizes):
  return make_mesh(**dict(zip(AXES, sizes, strict=True)))


def split_module(config, sizes):
  make = lambda: GatedDeltaNet(config, mesh=mesh_of(sizes), rngs=nnx.Rngs(0))
  return nnx.split(nnx.eval_shape(make))


def one_layer(tree):
  return jax.tree.map(lambda leaf: leaf[0, 0], tree)


@functools.cache
def problem(key_heads):
  """Random weights, x, state, valid, and cotangents of output and state.

  Heads range from slow to so fast a decay that a token is soon forgotten.
  """
  rng = np.random.default_rng(0)
  draw = lambda leaf: rng.normal(size=leaf.shape)
  weights = jax.tree.map(
      lambda leaf: draw(leaf) * leaf.shape[0] ** (-0.5 * (leaf.ndim == 2)),
      split_module(config(key_heads), ONE)[1],
  )
  decay = rng.uniform(0.01, 16.0, weights["A_log"].shape)
  weights["A_log"] = weights["A_log"].replace(np.log(decay))
  shapes = jax.eval_shape(
      lambda: empty_recurrent(config(key_heads), mesh=mesh_of(ONE), batch=4)
  )
  state = one_layer(jax.tree.map(draw, shapes))
  x = rng.normal(size=(4, TOKENS, HIDDEN))
  return weights, x, state, valid(RUNS), (draw(x), jax.tree.map(draw, state))


def valid(runs):
  t = np.arange(TOKENS)
  return np.array([(start <= t) & (t < stop) for start, stop in runs])


@functools.cache
def program(key_heads, sizes):
  """Compiles output, state and every gradient; all tests share it."""
  graphdef, _ = split_module(config(key_heads), sizes)

  def run(weights, x, state, valid, cotangents):
    def forward(weights, x, state):
      return nnx.merge(graphdef, weights)(x, valid_BT=valid, state=state)

    kept, pull_back = jax.vjp(forward, weights, x, state)
    return kept, pull_back(cotangents)

  return jax.jit(run).lower(*problem(key_heads)).compile()


def solve(key_heads, sizes, inputs=None):
  inputs = problem(key_heads) if inputs is None else inputs
  return jax.device_get(program(key_heads, sizes)(*inputs))


@pytest.mark.parametrize(
    ("key_heads", "sizes"),
    [
        (SPREAD, CONTEXT),
        (SPREAD, ALL),
        (PASSED, CONTEXT),
        (PASSED, ALL),
        (PASSED, (1, 4, 2)),
        (PASSED, (2, 4, 1)),
    ],
)
def test_every_mesh_gives_the_values_and_gradients_of_one_device(
    x64, key_heads, sizes
):
  got, wanted = solve(key_heads, sizes), solve(key_heads, ONE)
  assert tiny.largest_difference(got, wanted) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("key_heads", [SPREAD, PASSED])
def test_a_slow_state_reaches_from_the_first_shard_to_the_last(x64, key_heads):
  weights, x, state, _, (d_out, d_state) = problem(key_heads)
  weights = jax.tree.map(np.copy, weights)
  weights["A_log"] = weights["A_log"].replace(
      np.full(weights["A_log"].shape, np.log(0.05))
  )
  changed = x.copy()
  changed[:, 0] += 1.0  # beyond the reach of the convolution
  d_out = d_out * (np.arange(TOKENS) == TOKENS - 1)[None, :, None]
  d_state = jax.tree.map(np.zeros_like, d_state)
  everywhere = valid([(0, TOKENS)] * 4)
  (out, _), (_, d_x, _) = solve(
      key_heads, CONTEXT, (weights, x, state, everywhere, (d_out, d_state))
  )
  (other, _), _ = solve(
      key_heads,
      CONTEXT,
      (weights, changed, state, everywhere, (d_out, d_state)),
  )
  assert (np.abs(other - out)[:, -1].max(-1) > 1e-2).all()
  assert (np.abs(d_x)[:, 0].max(-1) > 1e-2).all()


@pytest.mark.parametrize("sizes", [ONE, CONTEXT])
@pytest.mark.parametrize("key_heads", [SPREAD, PASSED])
def test_any_split_into_frames_equals_one_pass(x64, key_heads, sizes):
  weights, x, state, _, cotangents = problem(key_heads)
  everywhere = valid([(0, TOKENS)] * 4)
  (whole, wanted), _ = solve(
      key_heads, ONE, (weights, x, state, everywhere, cotangents)
  )
  outs, done = [], 0
  for start, stop in [(5, 8), (2, 2), (1, 2), (4, 8)]:
    frame = np.full_like(x, 100.0)  # padding must not matter
    count = stop - start
    frame[:, start:stop] = x[:, done : done + count]
    part = valid([(start, stop)] * 4)
    (out, state), _ = solve(
        key_heads, sizes, (weights, frame, state, part, cotangents)
    )
    outs.append(out[:, start:stop])
    done += count
  got = (np.concatenate(outs, axis=1), state)
  assert tiny.largest_difference(got, (whole, wanted)) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("key_heads", [SPREAD, PASSED])
def test_a_row_without_tokens_keeps_its_state_bitwise(x64, key_heads):
  (_, state), _ = solve(key_heads, CONTEXT)
  row = RUNS.index((3, 3))
  before = problem(key_heads)[2]
  jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x[row], y[row]), state, before
  )


def collectives(compiled):
  """Yields the name of each collective inside `shard_map`, and its results."""
  pattern = re.compile(
      r"(.*) (all-[a-z-]+|collective-permute|reduce-scatter)\("
  )
  for line in compiled.as_text().splitlines():
    found = pattern.match(line)
    if found and "shard_map" in line:
      yield found[2], re.findall(r"\[([\d,]+)\]", found[1])


def test_heads_are_exchanged_by_all_to_all_alone(x64):
  found = list(collectives(program(SPREAD, CONTEXT)))
  # Forward and backward: q, k, v, g, beta one way, and the output the other.
  assert [name for name, _ in found].count("all-to-all") == 2 * 6
  others = [shapes for name, shapes in found if name != "all-to-all"]
  taps = re.compile(f"4,[18],({K}|{V})")  # their gradient
  assert all(taps.fullmatch(x) for shapes in others for x in shapes), others


def test_passing_states_gathers_no_maps(x64):
  compiled = program(PASSED, CONTEXT)
  names = {name for name, _ in collectives(compiled)}
  assert names == {"collective-permute", "all-reduce"}
  assert programs.buffers_with(compiled, K, K)
  assert not programs.buffers_with(compiled, CONTEXT[1], K, K)


@pytest.mark.parametrize("key_heads", [SPREAD, PASSED])
@pytest.mark.parametrize("sizes", [ONE, CONTEXT, ALL])
def test_a_state_lies_as_its_axes_say_and_keeps_its_types(key_heads, sizes):
  mesh = mesh_of(sizes)
  narrow = config(key_heads).replace(dtype="bfloat16", param_dtype="bfloat16")
  state = empty_recurrent(narrow, mesh=mesh, batch=2)
  axes = narrow.recurrent_axes(mesh)
  for field in dataclasses.fields(state):
    leaf = getattr(state, field.name)
    where = sharding(mesh, getattr(axes, field.name))
    assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    parts = sizes[2] if key_heads == PASSED else sizes[1] * sizes[2]
    part = leaf.addressable_shards[0].data
    assert part.size * parts * sizes[0] == leaf.size

  graphdef, weights = split_module(narrow, sizes)
  x = jax.ShapeDtypeStruct((2, TOKENS, HIDDEN), jnp.bfloat16)
  out, after = jax.eval_shape(
      lambda weights, x, state: nnx.merge(graphdef, weights)(
          x, valid_BT=jnp.ones((2, TOKENS), bool), state=state
      ),
      weights,
      x,
      one_layer(state),
  )
  assert (out.shape, out.dtype) == (x.shape, x.dtype)
  types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert types(after) == types(one_layer(state))
  assert state.recurrent.dtype == jnp.float32


def test_a_mesh_that_would_cut_a_head_is_refused():
  with pytest.raises(
      ValueError, match="tensor=4: want a divisor of linear_num"
  ):
    split_module(config(PASSED), (1, 2, 4))

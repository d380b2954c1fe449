"""The chunked gated delta rule equals the token recurrence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.sharding import make_mesh, spec
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule.xla import unit_lower_inverse

FLOAT64_TOLERANCE = 1e-11

run = jax.jit(gated_delta_rule, static_argnames="implementation")


def problem(tokens, *, seed=0, decay=None, near_dependent=False):
  """Random inputs; without `decay`, heads range from slow to very fast."""
  if decay is None:
    decay = np.array([0.05, 0.05, 1.0, 1.0, 30.0, 30.0])
  rng = np.random.default_rng(seed)
  k = rng.normal(size=(2, tokens, 2, 8))
  if near_dependent:
    k = 1e-3 * k + rng.normal(size=(2, 1, 2, 8))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  q = rng.normal(size=k.shape)
  arrays = dict(
      q=q / np.linalg.norm(q, axis=-1, keepdims=True),
      k=k,
      v=rng.normal(size=(2, tokens, 6, 4)),
      g=-decay * rng.random(size=(2, tokens, 6)),
      beta=rng.random(size=(2, tokens, 6)),
      initial_state=rng.normal(size=(2, 6, 8, 4)),
  )
  return jax.tree.map(jnp.asarray, arrays)


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence_in_value_and_gradient(x64, tokens):
  inputs = problem(tokens)

  def loss(inputs, implementation):
    out, state = gated_delta_rule(**inputs, implementation=implementation)
    return (jnp.sin(out)).sum() + (state**2).sum()

  implementations = ("xla", "reference")
  values = [run(**inputs, implementation=i) for i in implementations]
  chex.assert_trees_all_close(*values, atol=FLOAT64_TOLERANCE, rtol=0)
  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  gradients = [gradient(inputs, i) for i in implementations]
  chex.assert_trees_all_close(*gradients, atol=FLOAT64_TOLERANCE, rtol=1e-10)


def test_near_dependent_keys_stay_accurate_in_float32(x64):
  exact = run(
      **problem(256, decay=0.01, near_dependent=True),
      implementation="reference",
  )
  exact_out = np.asarray(exact[0])
  narrow = jax.tree.map(
      lambda x: x.astype(jnp.float32),
      problem(256, decay=0.01, near_dependent=True),
  )
  errors = {
      i: np.abs(
          np.asarray(run(**narrow, implementation=i)[0]) - exact_out
      ).max()
      for i in ("xla", "reference")
  }
  assert errors["xla"] < 10 * errors["reference"] + 1e-6, errors


@pytest.mark.parametrize("cut", [1, 2, 64, 65])
def test_any_split_through_the_state_equals_one_pass(x64, cut):
  inputs = problem(150)
  whole_out, whole_state = run(**inputs)
  state = inputs.pop("initial_state")
  outs = []
  for part in (slice(0, cut), slice(cut, None)):
    piece = {name: x[:, part] for name, x in inputs.items()}
    out, state = run(**piece, initial_state=state)
    outs.append(out)
  chex.assert_trees_all_close(
      (jnp.concatenate(outs, 1), state),
      (whole_out, whole_state),
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )


def test_padding_tokens_leave_the_state_bitwise():
  inputs = problem(70)
  inputs |= {n: jnp.zeros_like(inputs[n]) for n in ("g", "beta")}
  _, state = run(**inputs)
  chex.assert_trees_all_equal(state, inputs["initial_state"])


def test_the_blockwise_inverse_is_the_inverse_with_its_gradient(x64):
  a = jnp.asarray(
      np.tril(np.random.default_rng(0).normal(size=(3, 16, 16)), -1)
  )
  dense = lambda a: jnp.linalg.inv(jnp.eye(16)[None] + jnp.tril(a, -1))
  chex.assert_trees_all_close(
      unit_lower_inverse(a), dense(a), rtol=1e-9, atol=1e-9
  )
  ours, theirs = (
      jax.grad(lambda a, f=f: jnp.sin(f(a)).sum())(a)
      for f in (unit_lower_inverse, dense)
  )
  chex.assert_trees_all_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_it_runs_inside_shard_map(x64, implementation):
  inputs = problem(5)
  inputs["initial_state"] = jnp.zeros_like(inputs["initial_state"])

  def rule(inputs):  # the state starts the same on every shard
    zeros = jnp.zeros((1, *inputs["v"].shape[2:3], 8, 4))
    inputs = inputs | {"initial_state": zeros}
    return gated_delta_rule(**inputs, implementation=implementation)

  rows = spec(("batch",))
  got = jax.jit(
      jax.shard_map(rule, mesh=make_mesh(data=2), in_specs=rows, out_specs=rows)
  )(inputs)
  wanted = run(**inputs, implementation="reference")
  chex.assert_trees_all_close(got, wanted, atol=FLOAT64_TOLERANCE, rtol=0)


def test_states_are_float32_whatever_the_inputs():
  inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), problem(5))
  out, state = gated_delta_rule(**inputs)
  assert out.dtype == state.dtype == jnp.float32


def test_value_heads_that_key_heads_do_not_divide_are_refused():
  inputs = problem(4)
  for name in ("v", "g", "beta"):
    inputs[name] = inputs[name][:, :, :5]
  inputs["initial_state"] = inputs["initial_state"][:, :5]
  with pytest.raises(ValueError, match="want a multiple of the 2 key heads"):
    gated_delta_rule(**inputs)

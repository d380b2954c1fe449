"""The causal convolution continues from its state, however a frame is cut."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.causal_conv import causal_conv
from modeling.sharding import make_mesh, spec
from tests import tiny

FLOAT64_TOLERANCE = 1e-12

WINDOW = 3
# First and last real token of each row, in eighths of a frame.
RUNS = ((0, 8), (2, 7), (7, 8), (0, 0), (8, 8), (3, 3), (0, 1))


def problem(tokens):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=(*shape, 2, 5))
  start, stop = (np.array(RUNS, np.int32) * tokens // 8).T
  u, tail = draw(len(RUNS), tokens), draw(len(RUNS), WINDOW)
  return (u, tail, draw(WINDOW + 1)), start, stop


def convolve(u, tail, kernel, start, stop, over=()):
  return causal_conv(u, tail, kernel=kernel, start=start, stop=stop, over=over)


def sharded(shards):
  tokens, rows = spec(("batch", "time")), spec(("batch",))
  return jax.shard_map(
      partial(convolve, over=("context",)),
      mesh=make_mesh(context=shards),
      in_specs=(tokens, rows, spec(()), rows, rows),
      out_specs=(tokens, rows),
  )


def oracle(inputs, start, stop):
  """Outputs of real tokens, zeros elsewhere, and the last inputs."""
  outs, tails = np.zeros_like(inputs[0]), []
  for row, (u, tail) in enumerate(zip(*inputs[:2], strict=True)):
    run = np.concatenate([tail, u[start[row] : stop[row]]])
    for t in range(stop[row] - start[row]):
      seen = run[t : t + WINDOW + 1]
      outs[row, start[row] + t] = (seen * inputs[2]).sum(0)
    tails.append(run[len(run) - WINDOW :])
  return outs, np.stack(tails)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_rows_continue_from_their_tail_wherever_they_start(x64, steps):
  inputs, start, stop = problem(8 * steps)
  real = np.zeros(inputs[0].shape)
  for row, run in enumerate(zip(start, stop, strict=True)):
    real[row, slice(*run)] = 1.0
  wanted_out, wanted_tail = oracle(inputs, start, stop)
  rng = np.random.default_rng(1)
  d_out, d_tail = rng.normal(size=real.shape), rng.normal(size=inputs[1].shape)

  @partial(jax.jit, static_argnums=0)
  def solve(convolve, inputs, start, stop):
    (out, tail), pull_back = jax.vjp(
        lambda *inputs: convolve(*inputs, start, stop), *inputs
    )
    return out * real, tail, pull_back((d_out * real, d_tail))

  got = solve(sharded(8), inputs, start, stop)
  error = tiny.largest_difference(got[:2], (wanted_out, wanted_tail))
  assert error < FLOAT64_TOLERANCE
  whole = solve(convolve, inputs, start, stop)
  assert tiny.largest_difference(got, whole) < FLOAT64_TOLERANCE


def test_the_tail_and_the_taps_are_summed_once_each_in_a_gradient():
  inputs, start, stop = problem(40)

  def loss(*inputs):
    return sharded(8)(*inputs, start, stop)[0].sum()

  program = jax.jit(jax.grad(loss, (1, 2))).lower(*inputs).compile()
  sums = [line for line in program.as_text().splitlines() if "psum" in line]
  summed = {
      shape for line in sums for shape in re.findall(r"f32\[(.*?)\]", line)
  }
  rows, steps = len(RUNS), 40 // 8
  assert summed & {f"{rows},{WINDOW},2,5"}, summed
  assert not summed & {f"{rows},{WINDOW + steps},2,5", "1,1,2,5"}, summed


def test_half_precision_inputs_are_kept_as_they_are():
  (u, tail, kernel), start, stop = problem(8)
  u, tail, kernel = (jnp.asarray(x, jnp.bfloat16) for x in (u, tail, kernel))
  _, new_tail = jax.jit(sharded(8))(u, tail, kernel, start, stop)
  assert new_tail.dtype == jnp.bfloat16
  np.testing.assert_array_equal(new_tail[0], u[0, -WINDOW:])
  np.testing.assert_array_equal(new_tail[3:6], tail[3:6])

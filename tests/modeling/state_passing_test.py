"""The delta rule over shards of a sequence equals the rule over all of it."""

from functools import partial

import jax
import numpy as np
import pytest

from modeling.sharding import make_mesh, spec
from modeling.state_passing import sharded_delta_rule
from pallas_kernels.gated_delta_rule import gated_delta_rule
from tests import programs, tiny

FLOAT64_TOLERANCE = 1e-10


def problem(tokens):
  """Random inputs with heads from slow decay to fast."""
  rng = np.random.default_rng(0)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  decay = np.array([0.003, 0.05, 1.0, 30.0])
  return dict(
      q=unit(rng.normal(size=(2, tokens, 2, 7))),
      k=unit(rng.normal(size=(2, tokens, 2, 7))),
      v=rng.normal(size=(2, tokens, 4, 5)),
      g=-decay * rng.random(size=(2, tokens, 4)),
      beta=rng.random(size=(2, tokens, 4)),
      initial_state=rng.normal(size=(2, 4, 7, 5)),
  )


def sharded(inputs, *, shards):
  tokens, rows = spec(("batch", "time")), spec(("batch",))
  specs = dict.fromkeys(inputs, tokens) | {"initial_state": rows}
  return jax.shard_map(
      lambda inputs: sharded_delta_rule(**inputs, axis="context"),
      mesh=make_mesh(context=shards),
      in_specs=(specs,),
      out_specs=(tokens, rows),
  )(inputs)


# Numbers of shards that are no power of two; more than one chunk of 64 tokens.
@pytest.mark.parametrize("shards", [3, 5])
def test_any_number_of_shards_gives_values_and_gradients_of_one(x64, shards):
  inputs = problem(210)
  rng = np.random.default_rng(1)
  cotangents = jax.tree.map(
      lambda x: rng.normal(size=x.shape), (inputs["v"], inputs["initial_state"])
  )

  @partial(jax.jit, static_argnums=0)
  def solve(rule, inputs):
    kept, pull_back = jax.vjp(rule, inputs)
    return kept, pull_back(cotangents)

  got = solve(partial(sharded, shards=shards), inputs)
  wanted = solve(lambda inputs: gated_delta_rule(**inputs), inputs)
  assert tiny.largest_difference(got, wanted) < FLOAT64_TOLERANCE


def test_memory_does_not_grow_with_the_shards():
  compiled = {
      shards: jax.jit(partial(sharded, shards=shards))
      .lower(jax.tree.map(np.float32, problem(16 * shards)))
      .compile()
      for shards in (2, 8)
  }
  few, many = (programs.temp_bytes(compiled[shards]) for shards in (2, 8))
  assert many < 1.5 * few, (few, many)
  assert "all-gather" not in compiled[8].as_text()

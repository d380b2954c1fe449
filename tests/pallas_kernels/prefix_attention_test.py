"""Every implementation of prefix attention passes the same claims."""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import prefix_attention as op
from tests import programs

FLOAT64_TOLERANCE = 1e-12
BF16_TOLERANCE = 2e-2  # outputs are averages of values of size 1
SCALE = 0.3


attend = jax.jit(
    op.prefix_attention, static_argnames=("scale", "implementation")
)


def problem(seed=0, *, rows=1, share=2, t=37, s=700, heads=6, kv_heads=2):
  """Random inputs; keys sit in any slot order, a fifth of slots is empty."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape))
  k_positions = np.stack([rng.permutation(s) for _ in range(rows)])
  k_positions[:, rng.random(s) < 0.2] = -1
  q_positions = rng.integers(-1, s + 5, size=(rows * share, t))
  q_positions[0, 0] = -1
  return dict(
      q=array(rows * share, t, heads, 16),
      k=array(rows, s, kv_heads, 16),
      v=array(rows, s, kv_heads, 8),
      q_positions=jnp.asarray(q_positions, jnp.int32),
      k_positions=jnp.asarray(k_positions, jnp.int32),
      scale=SCALE,
  )


def loss(q, k, v, rest, implementation):
  """Weighs both outputs at random, so that each has a cotangent."""
  part = op.prefix_attention(q, k, v, **rest, implementation=implementation)
  rng = np.random.default_rng(1)
  lse = jnp.where(jnp.isfinite(part.lse), part.lse, 0.0)
  return (part.out * rng.normal(size=part.out.shape)).sum() + (
      lse * rng.normal(size=lse.shape)
  ).sum()


@pytest.mark.parametrize("rows,share,s", [(1, 2, 700), (3, 1, 512), (2, 4, 5)])
def test_blocks_equal_the_dense_softmax_in_value_and_gradient(
    x64, rows, share, s
):
  inputs = problem(rows=rows, share=share, s=s)
  parts = [
      attend(**inputs, implementation=implementation)
      for implementation in ("xla", "reference")
  ]
  chex.assert_trees_all_close(*parts, atol=FLOAT64_TOLERANCE, rtol=0)
  q, k, v = inputs.pop("q"), inputs.pop("k"), inputs.pop("v")
  gradients = [
      jax.jit(
          jax.grad(
              partial(loss, rest=inputs, implementation=implementation),
              (0, 1, 2),
          )
      )(q, k, v)
      for implementation in ("xla", "reference")
  ]
  chex.assert_trees_all_close(*gradients, atol=FLOAT64_TOLERANCE, rtol=0)
  assert all(jnp.abs(g).max() > 0 for g in gradients[0])


def test_parts_over_any_split_of_the_keys_merge_to_the_whole(x64):
  inputs = problem()
  whole = attend(**inputs)

  @partial(jax.jit, static_argnums=3)
  def merged(q, k, v, cuts):
    edges = [0, *cuts, k.shape[1]]
    rest = {n: inputs[n] for n in ("q_positions", "scale")}
    parts = []
    for start, stop in itertools.pairwise(edges):
      positions = inputs["k_positions"][:, start:stop]
      parts.append(
          op.prefix_attention(
              q,
              k[:, start:stop],
              v[:, start:stop],
              k_positions=positions,
              **rest,
          )
      )
    return op.merge(parts)

  qkv = inputs["q"], inputs["k"], inputs["v"]
  for cuts in ([1], [350], [3, 4, 600]):
    chex.assert_trees_all_close(
        merged(*qkv, tuple(cuts)), whole, atol=FLOAT64_TOLERANCE, rtol=0
    )
  of_parts = jax.grad(
      lambda *x: (merged(*x, (3, 350)).out ** 2).sum(), (0, 1, 2)
  )
  rest = {n: inputs[n] for n in ("q_positions", "k_positions", "scale")}
  of_whole = jax.grad(
      lambda *x: (op.prefix_attention(*x, **rest).out ** 2).sum(), (0, 1, 2)
  )
  chex.assert_trees_all_close(
      of_parts(*qkv), of_whole(*qkv), atol=FLOAT64_TOLERANCE, rtol=0
  )


def test_a_query_sees_exactly_the_keys_up_to_its_position():
  positions = jnp.arange(10, dtype=jnp.int32)[None]
  q = jnp.zeros((1, 1, 1, 4))
  v = jnp.eye(10)[None, :, None]
  for position in range(10):
    part = op.prefix_attention(
        q,
        jnp.zeros((1, 10, 1, 4)),
        v,
        q_positions=jnp.array([[position]], jnp.int32),
        k_positions=positions,
        scale=1.0,
    )
    assert int((part.out > 0).sum()) == position + 1
    np.testing.assert_allclose(part.lse, np.log(position + 1), rtol=1e-6)


def test_padding_queries_and_empty_slots_give_zero_and_minus_infinity():
  inputs = problem(t=3)
  inputs["q_positions"] = jnp.full_like(inputs["q_positions"], -1)
  part = op.prefix_attention(**inputs)
  assert (part.out == 0).all() and (part.lse == -jnp.inf).all()


def test_no_buffer_holds_all_scores(x64):
  inputs = problem(t=1031, s=2053, share=1)
  q, k, v = inputs.pop("q"), inputs.pop("k"), inputs.pop("v")
  gradient = jax.jit(
      jax.grad(partial(loss, rest=inputs, implementation=None), (0, 1, 2))
  )
  compiled = gradient.lower(q, k, v).compile()
  assert programs.buffers_with(compiled, 1031, 512)
  assert not programs.buffers_with(compiled, 1031, 2053)


def test_bfloat16_keys_are_accumulated_in_float32():
  inputs = problem()
  narrow = {
      name: x.astype(jnp.bfloat16) if name in "qkv" else x
      for name, x in inputs.items()
  }
  part, whole = op.prefix_attention(**narrow), op.prefix_attention(**inputs)
  assert part.out.dtype == part.lse.dtype == jnp.float32
  chex.assert_trees_all_close(part.out, whole.out, atol=BF16_TOLERANCE)


def test_rows_and_heads_that_do_not_divide_are_refused():
  inputs = problem(rows=2, share=1)
  with pytest.raises(ValueError, match="must be a multiple of the key rows"):
    op.prefix_attention(
        **{
            **inputs,
            "q": inputs["q"][:1],
            "q_positions": inputs["q_positions"][:1],
        }
    )

"""Every implementation of prefix attention passes the same claims."""

import functools
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.sharding import make_mesh, spec
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


@functools.cache
def over_shards(**sizes):
  """Attention as a layer does it: keys stay, queries come to every shard."""
  tokens = spec(("batch", "time", "heads", None))
  slots = spec(("batch", "slots", "kv_heads", None))
  at_tokens, at_slots = spec(("batch", "time")), spec(("batch", "slots"))

  @partial(
      jax.shard_map,
      mesh=make_mesh(**sizes),
      in_specs=(tokens, slots, slots, at_tokens, at_slots),
      out_specs=tokens,
  )
  def attend(q, k, v, q_positions, k_positions):
    collect = partial(
        jax.lax.all_gather, axis_name="context", axis=1, tiled=True
    )
    part = op.prefix_attention(
        collect(q),
        k,
        v,
        q_positions=collect(q_positions),
        k_positions=k_positions,
        scale=SCALE,
    )
    return op.merge_shards(part, axis_name="context")

  return attend


def with_gradients(attend):
  """Output of an attention and its gradient to q, k and v."""

  @jax.jit
  def run(q, k, v, q_positions, k_positions):
    forward = lambda *qkv: attend(*qkv, q_positions, k_positions)
    out, pull_back = jax.vjp(forward, q, k, v)
    weights = np.random.default_rng(1).normal(size=out.shape)
    return out, pull_back(jnp.asarray(weights, out.dtype))

  return run


def on_one_device(q, k, v, q_positions, k_positions):
  """The same of all keys at once, by the reference."""
  return op.prefix_attention(
      q,
      k,
      v,
      q_positions=q_positions,
      k_positions=k_positions,
      scale=SCALE,
      implementation="reference",
  ).out


@pytest.mark.parametrize(
    "sizes",
    [dict(context=8), dict(data=2, context=2, tensor=2)],
    ids=["context=8", "2 x 2 x 2"],
)
def test_shards_of_the_keys_merge_to_the_whole(x64, sizes):
  """In value and gradient, also of queries that see no key on any shard."""
  inputs = problem(rows=2, share=2, t=16, s=1040)
  k_positions = np.array(inputs["k_positions"])
  k_positions[:, 780:] = -1  # two shards of eight have no key at all
  k_positions[0, k_positions[0] < 100] = -1
  q_positions = np.array(inputs["q_positions"])
  q_positions[q_positions % 4 == 0] = 99  # no key of the first row is visible
  args = *(inputs[name] for name in "qkv"), q_positions, k_positions
  out, gradients = with_gradients(over_shards(**sizes))(*args)
  wanted, wanted_gradients = with_gradients(on_one_device)(*args)
  chex.assert_trees_all_close(
      (out, gradients),
      (wanted, wanted_gradients),
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )
  k_positions = k_positions.repeat(2, axis=0)[:, None]
  visible = (k_positions >= 0) & (k_positions <= q_positions[..., None])
  blind = ~visible.any(-1)
  assert 8 < blind.sum() < blind.size - 8
  assert (out[blind] == 0).all() and (gradients[0][blind] == 0).all()
  assert all(jnp.abs(g).max() > 0 for g in gradients)


def test_the_traffic_of_a_merge_does_not_grow_with_the_keys():
  """No key is gathered, forward or backward; the queries' rows are all."""

  def compiled(slots):
    shape = jax.ShapeDtypeStruct
    f32, i32 = jnp.float32, jnp.int32
    run = with_gradients(over_shards(context=8))
    return run.lower(
        shape((1, 16, 6, 24), f32),
        shape((1, slots, 2, 24), f32),
        shape((1, slots, 2, 40), f32),
        shape((1, 16), i32),
        shape((1, slots), i32),
    ).compile()

  few, many = map(programs.collectives, map(compiled, (8 * 512, 64 * 512)))
  assert few and few == many
  gathers = [x.shapes for x in few if x.kind == "all-gather"]
  # Queries and their positions; going back, cotangents of both sums.
  rows_of_queries = {(1, 16, 6, 24), (1, 16), (1, 16, 6, 40), (1, 16, 6)}
  assert set(itertools.chain(*gathers)) == rows_of_queries


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


@functools.partial(jax.jit, static_argnames="implementation")
def stored_gradients(q, k, v, sums, rest, *, layer, implementation=None):
  """Gradient to q, and the sums, of a loss on one of several stored layers."""

  def weighed(q, sink):
    part, sink = op.stored_attention(
        q,
        k,
        v,
        sink,
        layer=layer,
        scale=SCALE,
        **rest,
        implementation=implementation,
    )
    rng = np.random.default_rng(1)
    lse = jnp.where(jnp.isfinite(part.lse), part.lse, 0.0)
    total = (part.out * rng.normal(size=part.out.shape)).sum()
    return total + (lse * rng.normal(size=lse.shape)).sum(), sink

  none = jax.tree.map(jnp.zeros_like, sums)
  _, pull_back = jax.vjp(weighed, q, none)
  return pull_back((jnp.ones(()), sums))


def stored(inputs, *, layers=3, layer=1):
  """Puts keys and values among those of other layers."""
  rng = np.random.default_rng(7)
  put = (
      lambda x: jnp.asarray(rng.normal(size=(layers, *x.shape)))
      .at[layer]
      .set(x)
  )
  return put(inputs["k"]), put(inputs["v"])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("s", [512, 700, 5])
def test_a_stored_layer_adds_its_gradient_to_the_sums(x64, s, implementation):
  """To its own layer's alone, on top of what is there; 700 is no block's."""
  inputs = problem(rows=2, share=2, s=s)
  q, k, v = (inputs[name] for name in "qkv")
  rest = {n: inputs[n] for n in ("q_positions", "k_positions")}
  plain = inputs | {"scale": SCALE}
  del plain["q"], plain["k"], plain["v"]
  wanted = jax.jit(
      jax.grad(partial(loss, rest=plain, implementation="reference"), (0, 1, 2))
  )(q, k, v)
  stack = stored(inputs)
  rng = np.random.default_rng(8)
  sums = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), stack)
  d_q, found = stored_gradients(
      q, *stack, sums, rest, layer=jnp.int32(1), implementation=implementation
  )
  chex.assert_trees_all_close(
      (d_q, *(x[1] - y[1] for x, y in zip(found, sums, strict=True))),
      wanted,
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )
  for x, y in zip(found, sums, strict=True):
    np.testing.assert_array_equal(x[::2], y[::2])


def test_sums_have_the_dtype_of_the_sink():
  """And bfloat16 sums are rounded at each addition, not before it."""
  inputs = problem(s=700)
  narrow = lambda x: x.astype(jnp.bfloat16)
  q, rest = narrow(inputs["q"]), {
      n: inputs[n] for n in ("q_positions", "k_positions")
  }
  stack = tuple(map(narrow, stored(inputs)))
  found = {}
  for dtype in (jnp.float32, jnp.bfloat16):
    sums = jax.tree.map(lambda x, d=dtype: jnp.zeros(x.shape, d), stack)
    _, found[dtype] = stored_gradients(
        q, *stack, sums, rest, layer=jnp.int32(1)
    )
    assert all(x.dtype == dtype for x in found[dtype])
  for exact, rounded in zip(*found.values(), strict=True):
    np.testing.assert_array_equal(narrow(exact), rounded)


def test_no_second_array_of_the_keys_size_exists():
  """Not of keys, of their gradient, nor of the stand-ins; nor of one layer."""
  layers = 3
  shape = jax.ShapeDtypeStruct
  f32, i32 = jnp.float32, jnp.int32

  def compiled(slots):
    kv = (shape((layers, 1, slots, 2, 24), f32),) * 2
    positions = dict(
        q_positions=shape((1, 16), i32), k_positions=shape((1, slots), i32)
    )
    run = jax.jit(stored_gradients, donate_argnums=3)
    lowered = run.lower(
        shape((1, 16, 6, 24), f32), *kv, kv, positions, layer=shape((), i32)
    )
    return lowered.compile()

  small, large = compiled(4099), compiled(4 * 4099)
  one_layer = 4 * 4099 * 2 * 24 * 4
  growth = programs.temp_bytes(large) - programs.temp_bytes(small)
  assert growth < 0.01 * one_layer, growth
  alias = large.memory_analysis().alias_size_in_bytes
  assert alias == 2 * layers * one_layer


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

"""Every implementation of an indexer's scores passes the same claims."""

import functools
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from modeling.sharding import make_mesh
from pallas_kernels import entries, query_tiles
from pallas_kernels import index_scores as op
from tests import programs
from tests.pallas_kernels import latent_attention_test

FLOAT64_TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5  # of scores of size 3
BF16_TOLERANCE = 1e-2  # of gradients, relative to the largest entry
SCALE = 0.3
LAYER = 1
IMPLEMENTATIONS = "xla", "reference"
COUNTS = "ragged", "none", "all"
SIZES = [
    dict(rows=1, share=2),
    dict(rows=3, share=1, t=5, s=40, j=40),
    dict(rows=2, share=2, t=3, s=5, j=1),
]


def problem(seed=0, **sizes):
  """Random inputs; some products are 0, where a ReLU has a corner."""
  inputs = latent_attention_test.problem(seed, **sizes)
  rng = np.random.default_rng(seed + 1)
  weights = rng.normal(size=inputs["q"].shape[:3])
  return dict(
      q=inputs["q"].at[:, ::5, 0].set(0.0),
      weights=jnp.asarray(weights),
      keys=inputs["latents"],
      slots=inputs["slots"],
      counts=inputs["counts"],
  )


def narrow(inputs):
  """Queries and keys in bfloat16."""
  cast = {name: inputs[name].astype(jnp.bfloat16) for name in ("q", "keys")}
  return inputs | cast


@functools.partial(jax.jit, static_argnames="implementation")
def score(q, weights, keys, slots, counts, *, sink=None, implementation=None):
  return op.index_scores(
      q,
      weights,
      keys,
      sink,
      layer=jnp.int32(LAYER),
      slots=slots,
      counts=counts,
      scale=SCALE,
      implementation=implementation,
  )


def weights_of_scores(shape):
  """What a loss weighs scores by, at random; those from counts on as well."""
  return np.random.default_rng(2).normal(size=shape)


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(q, weights, keys, slots, counts, sums, *, implementation=None):
  """Gradient to q and weights, and the sums with this layer's share."""

  def run(q, weights, sink):
    return score(
        q,
        weights,
        keys,
        slots,
        counts,
        sink=sink,
        implementation=implementation,
    )

  (scores, _), pull_back = jax.vjp(run, q, weights, sums)
  d_scores = jnp.asarray(weights_of_scores(scores.shape), scores.dtype)
  return pull_back((d_scores, sums))


def naive(q, weights, keys, slots, counts, sums=None):
  """Scores, or with sums the gradients, by a loop over queries in float64."""
  d_scores = weights_of_scores(slots.shape)
  q, weights, keys = (np.asarray(x, np.float64) for x in (q, weights, keys))
  slots, counts = np.asarray(slots), np.asarray(counts)
  scores = np.full(slots.shape, -np.inf)
  d_q, d_weights = np.zeros(q.shape), np.zeros(weights.shape)
  d_keys = np.zeros(keys.shape)
  for b, t in np.ndindex(counts.shape):
    row, real = b * keys.shape[1] // len(q), slice(counts[b, t])
    chosen = keys[LAYER, row, slots[b, t, real]]
    products = SCALE * q[b, t] @ chosen.T
    liked = np.maximum(products, 0)
    scores[b, t, real] = weights[b, t] @ liked
    d_score = d_scores[b, t, real]
    d_products = SCALE * np.outer(weights[b, t], d_score) * (products > 0)
    d_q[b, t] = d_products @ chosen
    d_weights[b, t] = liked @ d_score
    d_keys[LAYER, row, slots[b, t, real]] += d_products.T @ q[b, t]
  if sums is None:
    return scores
  return d_q, d_weights, np.asarray(sums, np.float64) + d_keys


def some_sums(keys):
  rng = np.random.default_rng(8)
  return jnp.asarray(rng.normal(size=keys.shape))


def assert_close(found, wanted):
  chex.assert_trees_all_close(found, wanted, atol=FLOAT64_TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_weighted_sum_of_what_each_head_likes(
    x64, sizes, counts, implementation
):
  """And -inf from counts on."""
  inputs = problem(**sizes, counts=counts)
  scores, sink = score(**inputs, implementation=implementation)
  assert_close(scores, naive(**inputs))
  assert sink is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_are_those_of_the_scores(x64, sizes, counts, implementation):
  """To q, the weights, and the keys: on top of what the sums have."""
  inputs = problem(**sizes, counts=counts)
  sums = some_sums(inputs["keys"])
  found = gradients(**inputs, sums=sums, implementation=implementation)
  assert_close(found, naive(**inputs, sums=sums))
  d_q, d_weights, after = found
  np.testing.assert_array_equal(after[::2], sums[::2])
  for x in (d_q, d_weights, after[1] - sums[1]):
    assert (jnp.abs(x).max() > 0) == (counts != "none")


@pytest.mark.parametrize("entry_tile,query_tile", [(7, 3), (1, 11), (64, 1)])
def test_tiles_may_be_of_any_size(x64, monkeypatch, entry_tile, query_tile):
  """Of which none divides what it cuts, but for tiles of one."""
  monkeypatch.setattr(entries, "ENTRY_TILE", entry_tile)
  monkeypatch.setattr(query_tiles, "QUERY_TILE", query_tile)
  inputs = problem(rows=2, t=11, s=40, j=30)
  sums = some_sums(inputs["keys"])
  run = lambda function: jax.jit(lambda *args: function.__wrapped__(*args))
  assert_close(run(score)(*inputs.values())[0], naive(**inputs))
  found = run(gradients)(*inputs.values(), sums)
  assert_close(found, naive(**inputs, sums=sums))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_without_a_sink_are_constants(x64, implementation):
  inputs = problem(**SIZES[1])
  keys = inputs.pop("keys")

  def total(keys, sink):
    scores, _ = score(
        keys=keys, sink=sink, **inputs, implementation=implementation
    )
    return jnp.where(jnp.isfinite(scores), scores, 0.0).sum()

  assert not jax.grad(total)(keys, None).any()
  stored, through_sink = jax.grad(total, (0, 1))(keys, keys)
  assert not stored.any() and through_sink[LAYER].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_chosen_has_no_scores(x64, implementation):
  inputs = problem(**SIZES[1])
  inputs["slots"] = inputs["slots"][..., :0]
  inputs["counts"] = jnp.zeros_like(inputs["counts"])
  sums = some_sums(inputs["keys"])
  scores, sink = score(**inputs, sink=sums, implementation=implementation)
  assert scores.shape == (3, 5, 0) and scores.dtype == jnp.float64
  np.testing.assert_array_equal(sink, sums)
  *found, after = gradients(**inputs, sums=sums, implementation=implementation)
  assert not any(x.any() for x in found)
  np.testing.assert_array_equal(after, sums)


def test_what_no_query_needs_is_not_gathered():
  """Steps follow the counts: keys of the tiles after them may be infinite."""
  inputs = problem(share=1, s=400, j=400, counts="all")
  order = jnp.arange(400, dtype=jnp.int32)
  inputs["slots"] = jnp.broadcast_to(order, inputs["slots"].shape)
  first, tile = query_tiles.QUERY_TILE, entries.ENTRY_TILE
  inputs["counts"] = inputs["counts"].at[:, :first].set(tile)
  inputs["keys"] = inputs["keys"].at[..., tile:, 0].set(jnp.inf)
  sums = jnp.zeros_like(inputs["keys"])
  d_q, d_weights, _ = gradients(**inputs, sums=sums)
  scores, _ = score(**inputs)
  for x in (d_q, d_weights, scores[..., :tile]):
    assert jnp.isfinite(x[:, :first]).all()
  assert jnp.isneginf(scores[:, :first, tile:]).all()
  for x in (d_q, d_weights, scores):
    assert not jnp.isfinite(x[:, first:]).all()


def on_shards(slots, counts, *, shards, size):
  """What each shard of the slots has of a choice.

  Returns local slots [B,T,n J], counts [B,T,n], and the slots that the local
  ones are of the whole [B,T,n J], where what is none has `size`.
  """
  real = np.arange(slots.shape[2]) < counts[..., None]
  share = size // shards
  found = []
  for shard in range(shards):
    mine = real & (slots // share == shard)
    order = np.argsort(~mine, axis=-1, kind="stable")[..., :share]
    local = np.take_along_axis(slots, order, -1) % share
    mine = np.take_along_axis(mine, order, -1)
    whole = np.where(mine, shard * share + local, size)
    found.append((local, mine.sum(-1, keepdims=True), whole))
  local, numbers, whole = (
      np.concatenate(x, -1) for x in zip(*found, strict=True)
  )
  return local.astype(np.int32), numbers.astype(np.int32), whole


@pytest.mark.parametrize(
    "data,context,over",
    [(1, 8, "context"), (2, 4, "context"), (1, 2, None)],
)
def test_shards_of_the_keys_have_parts_of_the_scores(x64, data, context, over):
  """As a layer does it: keys stay, queries come to every shard.

  Or are there already, the same ones, where they lie over nothing.
  """
  size = 400
  inputs = problem(rows=2, share=1, t=16, s=size, j=size)
  keys, sums = inputs["keys"], some_sums(inputs["keys"])
  choice = {
      n: on_shards(
          *(np.asarray(inputs[name]) for name in ("slots", "counts")),
          shards=n,
          size=size,
      )
      for n in (1, context)
  }
  tokens = PartitionSpec("data", over)
  stack = PartitionSpec(None, "data", "context")
  chosen = PartitionSpec("data", None, "context")

  @partial(
      jax.shard_map,
      mesh=make_mesh(data=data, context=context),
      in_specs=(tokens, tokens, stack, stack, chosen, chosen),
      out_specs=(chosen, stack),
  )
  def on_shard(q, weights, keys, sink, slots, counts):
    if over is not None:
      of_all = partial(jax.lax.all_gather, axis_name=over, axis=1, tiled=True)
      q, weights = of_all(q), of_all(weights)
    return score(q, weights, keys, slots, counts[..., 0], sink=sink)

  def on_one(q, weights, keys, sink, slots, counts):
    return score(
        *(q, weights, keys, slots, counts[..., 0]),
        sink=sink,
        implementation="reference",
    )

  @partial(jax.jit, static_argnums=(0, 1))
  def with_gradients(run, n, q, weights):
    slots, counts, whole = choice[n]

    def by_slot(q, weights, sink):
      scores, sink = run(q, weights, keys, sink, slots, counts)
      b, t, _ = np.ogrid[:2, :16, :1]
      nothing = jnp.full((2, 16, size), -jnp.inf)
      return nothing.at[b, t, whole].set(scores, mode="drop"), sink

    (scores, _), pull_back = jax.vjp(by_slot, q, weights, sums)
    d_scores = jnp.asarray(weights_of_scores(scores.shape))
    return scores, pull_back((d_scores, sums))

  floats = inputs["q"], inputs["weights"]
  found = with_gradients(on_shard, context, *floats)
  assert_close(found, with_gradients(on_one, 1, *floats))


def test_keys_and_sums_in_host_memory_give_the_same_bits():
  inputs = problem()
  sums = jnp.ones_like(inputs["keys"])
  wanted = gradients(**inputs, sums=sums), score(**inputs)
  in_host_memory = latent_attention_test.in_host_memory
  inputs["keys"] = in_host_memory(inputs["keys"])
  run = jax.jit(
      gradients, out_shardings=(None, None, in_host_memory(sums).sharding)
  )
  found = run(**inputs, sums=in_host_memory(sums)), score(**inputs)
  assert found[0][2].sharding.memory_kind == "pinned_host"
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_sums_have_the_dtype_of_the_sink():
  """One query adds once to a slot: to float32 sums, unrounded."""
  inputs = narrow(problem(share=1, t=1, counts="all"))
  exact, rounded = (
      gradients(**inputs, sums=jnp.zeros(inputs["keys"].shape, dtype))[2]
      for dtype in (jnp.float32, jnp.bfloat16)
  )
  assert exact.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
  np.testing.assert_array_equal(exact.astype(jnp.bfloat16), rounded)
  assert (rounded.astype(jnp.float32) != exact).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_products_are_accumulated_in_float32(implementation):
  """Of what was rounded, the scores are those of float64."""
  inputs = narrow(problem())
  scores, _ = score(**inputs, implementation=implementation)
  assert scores.dtype == jnp.float32
  chex.assert_trees_all_close(
      scores, naive(**inputs).astype(np.float32), atol=FLOAT32_TOLERANCE, rtol=0
  )
  sums = jnp.zeros(inputs["keys"].shape, jnp.float32)
  found = gradients(**inputs, sums=sums, implementation=implementation)
  assert [x.dtype.name for x in found] == ["bfloat16", "float32", "float32"]
  for x, wanted in zip(found, naive(**inputs, sums=sums), strict=True):
    error = np.abs(np.asarray(x, np.float64) - wanted).max()
    assert error < BF16_TOLERANCE * np.abs(wanted).max()


def test_memory_does_not_grow_with_the_slots():
  """No layer is copied, and no tile is as large as the keys.

  In float32: before it gathers bfloat16, the CPU's compiler widens the whole.
  """
  t, j, size, f32 = 600, 200, 16, jnp.float32

  def compiled(slots):
    shape = jax.ShapeDtypeStruct
    stack = shape((2, 1, slots, size), f32)
    inputs = dict(
        q=shape((1, t, 4, size), f32),
        weights=shape((1, t, 4), f32),
        keys=stack,
        slots=shape((1, t, j), jnp.int32),
        counts=shape((1, t), jnp.int32),
    )
    run = jax.jit(gradients, donate_argnames="sums")
    return (
        score.lower(**inputs).compile(),
        run.lower(**inputs, sums=stack).compile(),
    )

  for few, many in zip(compiled(4099), compiled(4 * 4099), strict=True):
    growth = programs.temp_bytes(many) - programs.temp_bytes(few)
    assert growth < 4 * 4099, growth  # a hundredth of a layer's growth
    sizes = list(map(math.prod, programs.buffer_shapes(many)))
    assert max(sizes) == 2 * 4 * 4099 * size  # the keys
  assert many.memory_analysis().alias_size_in_bytes == 2 * 4 * 4099 * size * 4


def test_rows_that_do_not_fit_are_refused():
  inputs = problem(rows=2, share=1, t=3)
  queries = "q", "weights", "slots", "counts"
  with pytest.raises(ValueError, match="want a multiple of the 2 key rows"):
    score(**inputs | {name: inputs[name][:1] for name in queries})

"""The search, the choice over sources and shards, and the way back to slots."""

import functools
import math
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from modeling.sharding import make_mesh
from pallas_kernels import index_topk as op
from pallas_kernels import query_tiles
from pallas_kernels.index_topk import choice, xla
from tests import programs

FLOAT64_TOLERANCE = 1e-12
BF16_TOLERANCE = 0.15  # scores are sums of 3 heads, of size 4
SCALE = 0.3
LAYER = 1
IMPLEMENTATIONS = "xla", "reference"


@pytest.fixture
def small_tiles(monkeypatch):
  """Several tiles, of which none divides the sizes of `problem`."""
  monkeypatch.setattr(xla, "KEY_TILE", 64)
  monkeypatch.setattr(query_tiles, "QUERY_TILE", 16)


def problem(seed=0, *, rows=1, share=2, t=37, s=300, ties=False, heads=3):
  """Inputs; keys sit in any slot order, a fifth of the slots is empty.

  With `ties` they are small integers: most scores are equal, and exact.
  """
  rng = np.random.default_rng(seed)
  draw = (
      (lambda *shape: rng.integers(-1, 2, shape))
      if ties
      else (lambda *shape: rng.normal(size=shape))
  )
  array = lambda *shape: jnp.asarray(draw(*shape), float)
  k_positions = np.stack([rng.permutation(s) for _ in range(rows)])
  k_positions[:, rng.random(s) < 0.2] = -1
  q_positions = rng.integers(-1, s + 5, size=(rows * share, t))
  q_positions[0, 0] = -1
  return dict(
      q=array(rows * share, t, heads, 8),
      weights=array(rows * share, t, heads),
      keys=array(3, rows, s, 8),
      q_positions=jnp.asarray(q_positions, jnp.int32),
      k_positions=jnp.asarray(k_positions, jnp.int32),
      scale=1.0 if ties else SCALE,
  )


def search(inputs, *, k, implementation=None):
  layer = jnp.int32(LAYER)
  return op.index_topk(
      **inputs, layer=layer, k=k, implementation=implementation
  )


def naive(inputs, *, k):
  """Candidates of each query, by a loop over queries in float64."""
  x = {name: np.asarray(value) for name, value in inputs.items()}
  batch, length = x["q_positions"].shape
  rows, slots = x["k_positions"].shape
  count = min(k, slots)
  scores = np.full((batch, length, count), -np.inf)
  positions = np.full((batch, length, count), op.NO_POSITION)
  chosen = np.zeros((batch, length, count), int)
  for b, t in np.ndindex(batch, length):
    row = b * rows // batch
    products = x["scale"] * x["keys"][LAYER, row] @ x["q"][b, t].T
    score = (x["weights"][b, t] * np.maximum(products, 0)).sum(-1)
    at = x["k_positions"][row]
    seen = np.flatnonzero((at >= 0) & (at <= x["q_positions"][b, t]))
    best = seen[np.lexsort((at[seen], -score[seen]))][:count]
    scores[b, t, : len(best)] = score[best]
    positions[b, t, : len(best)] = at[best]
    chosen[b, t, : len(best)] = best
  return op.Candidates(scores, positions, chosen)


def assert_same(found, wanted):
  np.testing.assert_array_equal(found.positions, wanted.positions)
  np.testing.assert_array_equal(found.slots, wanted.slots)
  np.testing.assert_allclose(
      found.scores, wanted.scores, atol=FLOAT64_TOLERANCE, rtol=0
  )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "rows,share,s,k", [(1, 2, 300, 50), (3, 1, 64, 200), (2, 2, 5, 1)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_visible_keys_are_found_in_order(
    x64, small_tiles, rows, share, s, k, ties, implementation
):
  """Also where k exceeds the slots, and where most scores are equal."""
  inputs = problem(rows=rows, share=share, s=s, ties=ties)
  found = search(inputs, k=k, implementation=implementation)
  assert_same(found, naive(inputs, k=k))
  assert found.scores.dtype == jnp.float64
  assert found.positions.dtype == found.slots.dtype == jnp.int32


@pytest.mark.parametrize("key_tile", [1, 7, 150, 2048])
@pytest.mark.parametrize("query_tile", [5, 64])
def test_equal_scores_are_ordered_alike_by_any_tiles(
    x64, monkeypatch, key_tile, query_tile
):
  monkeypatch.setattr(xla, "KEY_TILE", key_tile)
  monkeypatch.setattr(query_tiles, "QUERY_TILE", query_tile)
  inputs = problem(seed=3, ties=True)
  wanted = naive(inputs, k=50)
  boundary = wanted.scores[..., -2:]
  assert (boundary[..., 0] == boundary[..., 1]).mean() > 0.5
  assert_same(search(inputs, k=50), wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_zero_score_has_no_sign(implementation):
  """One head: a sum over several would begin with 0.0 and lose the sign."""
  inputs = problem(heads=1, ties=True)
  inputs["weights"] = -jnp.ones_like(inputs["weights"])
  scores = np.asarray(
      search(inputs, k=300, implementation=implementation).scores
  )
  assert (scores == 0).sum() > 100
  assert not np.signbit(scores[scores == 0]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_queries_and_empty_slots_give_no_candidate(implementation):
  inputs = problem()
  for name in ("q_positions", "k_positions"):
    blind = inputs | {name: jnp.full_like(inputs[name], -1)}
    found = search(blind, k=9, implementation=implementation)
    assert (found.scores == -jnp.inf).all()
    assert (found.positions == op.NO_POSITION).all()
    assert (found.slots == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_are_constants_for_gradients(implementation):
  inputs = problem(t=3, s=20)
  names = "q", "weights", "keys"

  def total(floats):
    found = search(inputs | floats, k=1, implementation=implementation)
    return jnp.where(jnp.isfinite(found.scores), found.scores, 0.0).sum()

  floats = {name: inputs[name] for name in names}
  value, gradients = jax.value_and_grad(total)(floats)
  assert value != 0
  assert all((x == 0).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_products_are_accumulated_in_float32(implementation):
  inputs = problem()
  floats = "q", "weights", "keys"
  narrow = inputs | {x: inputs[x].astype(jnp.bfloat16) for x in floats}
  found = search(narrow, k=9, implementation=implementation)
  assert found.scores.dtype == jnp.float32
  wanted = search(inputs, k=9)
  np.testing.assert_allclose(found.scores, wanted.scores, atol=BF16_TOLERANCE)
  rounded = found.scores.astype(jnp.bfloat16).astype(jnp.float32)
  assert (found.scores != rounded).any()


def test_keys_in_host_memory_give_the_same_bits():
  inputs = problem(s=4099)
  device = jax.devices()[0]
  host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
  stored = jax.device_put(inputs["keys"], host)
  run = jax.jit(lambda keys: search(inputs | {"keys": keys}, k=9))
  assert stored.sharding.memory_kind == "pinned_host"
  found, wanted = run(stored), run(inputs["keys"])
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_memory_does_not_grow_with_the_keys():
  """No layer is copied, and nothing holds a number a query and key."""
  t = 600

  def compiled(slots):
    shape = jax.ShapeDtypeStruct
    f32, i32 = jnp.float32, jnp.int32
    return (
        jax.jit(partial(op.index_topk, k=64, scale=SCALE))
        .lower(
            shape((1, t, 4, 16), f32),
            shape((1, t, 4), f32),
            shape((2, 1, slots, 16), f32),
            layer=shape((), i32),
            q_positions=shape((1, t), i32),
            k_positions=shape((1, slots), i32),
        )
        .compile()
    )

  few, many = compiled(4099), compiled(4 * 4099)
  growth = programs.temp_bytes(many) - programs.temp_bytes(few)
  assert growth < 4 * 4099, growth  # a hundredth of a layer's growth
  sizes = list(map(math.prod, programs.buffer_shapes(many)))
  assert 64 * 4 * op.KEY_TILE in sizes
  assert max(sizes) < t * 4 * 4099


@functools.cache
def over_shards(n, k):
  """Search, choice and look-up over two sources, each over n shards."""
  context = PartitionSpec(None, "context")
  source = PartitionSpec(None, None, "context"), context

  @jax.jit
  @partial(
      jax.shard_map,
      mesh=make_mesh(context=n),
      in_specs=(context, context, context, (source, source)),
      out_specs=(PartitionSpec("context"), context),
  )
  def run(q, weights, q_positions, sources):
    collect = partial(
        jax.lax.all_gather, axis_name="context", axis=1, tiled=True
    )
    q, weights, q_positions = map(collect, (q, weights, q_positions))
    candidates = [
        op.index_topk(
            q,
            weights,
            keys,
            layer=jnp.int32(LAYER),
            q_positions=q_positions,
            k_positions=k_positions,
            k=k,
            scale=1.0,
        )
        for keys, k_positions in sources
    ]
    counts, chosen = op.choose(candidates, k=k, axis_name="context")
    recorded = collect(chosen)
    looked_up = [
        op.look_up(recorded, q_positions=q_positions, k_positions=positions)
        for _, positions in sources
    ]
    found = [(x.slots, n) for x, n in zip(candidates, counts, strict=True)]
    return jax.tree.map(lambda x: x[None], (found, looked_up)), chosen

  return run


def spread(inputs, rng, *, shards):
  """Puts each key into any slot of one of two sources on one of the shards."""
  keys, at = (np.asarray(inputs[name]) for name in ("keys", "k_positions"))
  slots = at.shape[1]
  places = rng.permutation(2 * shards * slots)[:slots]
  k_positions = np.full((1, 2 * shards * slots), -1, np.int32)
  k_positions[:, places] = at
  stored = np.zeros((len(keys), 1, 2 * shards * slots, keys.shape[-1]))
  stored[:, :, places] = keys
  halves = np.split(stored, 2, axis=2), np.split(k_positions, 2, axis=1)
  return tuple(zip(*halves, strict=True))


@pytest.mark.parametrize("k", [10, 64], ids=["k=10", "more than there are"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_choice_is_the_same_over_any_sources_and_shards(x64, n, k):
  """And what is recorded of it is found again, in the slots it came from."""

  @hypothesis.settings(max_examples=3)
  @hypothesis.given(seed=st.integers(0, 1 << 20))
  def check(seed):
    inputs = problem(seed, share=1, t=16, s=40, ties=True)
    wanted = naive(inputs, k=k).positions
    sources = spread(inputs, np.random.default_rng(seed), shards=n)
    queries = (inputs[name] for name in ("q", "weights", "q_positions"))
    (chosen, looked_up), positions = over_shards(n, k)(*queries, sources)

    none = np.full((1, 16, positions.shape[-1] - wanted.shape[-1]), -1)
    recorded = np.where(wanted < op.NO_POSITION, wanted, -1)
    np.testing.assert_array_equal(
        positions, np.concatenate([recorded, none], -1)
    )
    sets = [[] for _ in range(16)]
    for (_, at), (slots, counts), again in zip(
        sources, chosen, looked_up, strict=True
    ):
      np.testing.assert_array_equal(counts, again[1])
      shards_at = at.reshape(n, -1)
      for shard, t in np.ndindex(n, 16):
        mine = np.asarray(slots[shard, 0, t, : counts[shard, 0, t]])
        np.testing.assert_array_equal(
            mine, again[0][shard, 0, t, : counts[shard, 0, t]]
        )
        sets[t] += list(shards_at[shard, mine])
    for t in range(16):
      assert sorted(sets[t]) == sorted(recorded[0, t][recorded[0, t] >= 0])

  check()


def test_one_shard_needs_no_mesh(x64, monkeypatch):
  """And sorts as many rows at a time as it has room for."""
  inputs = problem(rows=2, ties=True)
  wanted = naive(inputs, k=50).positions
  halves = []
  for parity in (0, 1):
    own = inputs["k_positions"] % 2 == parity
    mine = jnp.where(own, inputs["k_positions"], -1)
    halves.append(search(inputs | {"k_positions": mine}, k=50))
  for room in (1, 7 * 100, 1 << 20):
    monkeypatch.setattr(choice, "SORT_ELEMENTS", room)
    counts, positions = op.choose(halves, k=50, axis_name=None)
    np.testing.assert_array_equal(
        positions, np.where(wanted < op.NO_POSITION, wanted, -1)
    )
    np.testing.assert_array_equal(sum(counts), (positions >= 0).sum(-1))
    for parity, count in enumerate(counts):
      of_half = (positions >= 0) & (positions % 2 == parity)
      np.testing.assert_array_equal(count, of_half.sum(-1))


def test_the_choice_sorts_a_bounded_number_of_candidates(monkeypatch):
  monkeypatch.setattr(choice, "SORT_ELEMENTS", 1 << 12)
  shape = jax.ShapeDtypeStruct((1, 1000, 64), jnp.int32)
  scores = jax.ShapeDtypeStruct(shape.shape, jnp.float32)
  candidates = [op.Candidates(scores, shape, shape)] * 2
  compiled = (
      jax.jit(partial(op.choose, k=64, axis_name=None))
      .lower(candidates)
      .compile()
  )
  sorts = [line for line in compiled.as_text().splitlines() if " sort(" in line]
  assert sorts and all("[32,128]" in x or "[8,128]" in x for x in sorts)


@pytest.mark.parametrize("s", [5, 60])
def test_recorded_positions_are_found_where_they_are_visible(s):
  """In their order; a position that is not stored here is passed over."""
  rng = np.random.default_rng(2)
  rows, share, t, k = 2, 2, 9, 24
  k_positions = np.stack([rng.permutation(80)[:s] for _ in range(rows)])
  k_positions[:, ::4] = -1
  recorded = np.stack([rng.permutation(80)[:k] for _ in range(4 * t)])
  recorded = recorded.reshape(rows * share, t, k)
  recorded[rng.random(recorded.shape) < 0.2] = -1
  q_positions = rng.integers(-1, 90, size=(rows * share, t))
  slots, counts = op.look_up(
      jnp.asarray(recorded, jnp.int32),
      q_positions=jnp.asarray(q_positions, jnp.int32),
      k_positions=jnp.asarray(k_positions, jnp.int32),
  )
  assert slots.shape == (rows * share, t, min(k, s))
  assert slots.dtype == counts.dtype == jnp.int32
  for b, i in np.ndindex(*q_positions.shape):
    stored = list(k_positions[b // share])
    wanted = [
        stored.index(x)
        for x in recorded[b, i]
        if x >= 0 and x in stored and x <= q_positions[b, i]
    ]
    assert counts[b, i] == len(wanted)
    assert slots[b, i, : len(wanted)].tolist() == wanted
  assert 0 < counts.sum() < (recorded >= 0).sum()


def test_no_buffer_compares_all_recorded_with_all_stored():
  shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  compiled = (
      jax.jit(op.look_up)
      .lower(
          shape((1, 30, 64)),
          q_positions=shape((1, 30)),
          k_positions=shape((1, 4099)),
      )
      .compile()
  )
  sizes = map(math.prod, programs.buffer_shapes(compiled))
  assert max(sizes) <= 4 * 4099


def test_shapes_that_do_not_fit_are_refused():
  inputs = problem(rows=2, share=1, t=3, s=8)
  queries = "q", "weights", "q_positions"
  with pytest.raises(ValueError, match="want a multiple of the 2 key rows"):
    search(inputs | {name: inputs[name][:1] for name in queries}, k=2)
  with pytest.raises(ValueError, match="k=0: want at least 1"):
    search(inputs, k=0)

  @partial(
      jax.shard_map,
      mesh=make_mesh(context=2),
      in_specs=PartitionSpec(),
      out_specs=PartitionSpec("context"),
  )
  def choose(candidates):
    return op.choose([candidates], k=2, axis_name="context")[1]

  with pytest.raises(ValueError, match="3 queries: want a multiple of the 2"):
    choose(jax.device_get(search(inputs, k=2)))

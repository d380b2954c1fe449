"""Every implementation of latent attention passes the same claims."""

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
from pallas_kernels import latent_attention as op
from pallas_kernels import prefix_attention
from pallas_kernels.entries import ENTRY_TILE
from pallas_kernels.query_tiles import QUERY_TILE
from tests import programs

FLOAT64_TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5  # of weights, of which the largest are 1
BF16_TOLERANCE = 4e-2  # outputs are averages of values of size 1
SCALE = 0.3
VALUE_DIM = 10
LAYER = 1
IMPLEMENTATIONS = "xla", "reference"
COUNTS = "ragged", "none", "all"


def problem(seed=0, *, rows=1, share=2, t=70, s=400, j=300, counts="ragged"):
  """Random inputs; entries that do not count are far out of bounds."""
  rng = np.random.default_rng(seed)
  batch = rows * share
  array = lambda *shape: jnp.asarray(rng.normal(size=shape))
  slots = np.stack([rng.permutation(s)[:j] for _ in range(batch * t)])
  slots = slots.reshape(batch, t, j)
  numbers = rng.integers(0, j + 1, size=(batch, t))
  numbers[:, :1], numbers[:, 1:2] = 0, j
  if counts != "ragged":
    numbers[:] = {"none": 0, "all": j}[counts]
  unused = np.arange(j) >= numbers[..., None]
  garbage = rng.choice([-7, -1, s, 1 << 30], size=slots.shape)
  return dict(
      q=array(batch, t, 4, 16),
      latents=array(3, rows, s, 16),
      slots=jnp.asarray(np.where(unused, garbage, slots), jnp.int32),
      counts=jnp.asarray(numbers, jnp.int32),
  )


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q, latents, slots, counts, *, sink=None, implementation=None):
  return op.latent_attention(
      q,
      latents,
      sink,
      layer=jnp.int32(LAYER),
      slots=slots,
      counts=counts,
      scale=SCALE,
      value_dim=VALUE_DIM,
      implementation=implementation,
  )


@functools.partial(jax.jit, static_argnames="implementation")
def weights_of(q, latents, slots, counts, lse, *, implementation=None):
  return op.latent_attention_weights(
      q,
      latents,
      lse,
      layer=jnp.int32(LAYER),
      slots=slots,
      counts=counts,
      scale=SCALE,
      implementation=implementation,
  )


def naive(q, latents, slots, counts):
  """Output and log-sum-exp, by a loop over queries in float64."""
  q, latents, slots, counts = map(np.asarray, (q, latents, slots, counts))
  batch, length, heads, _ = q.shape
  out = np.zeros((batch, length, heads, VALUE_DIM))
  lse = np.full((batch, length, heads), -np.inf)
  for b, t in np.ndindex(batch, length):
    row = b * latents.shape[1] // batch
    chosen = latents[LAYER, row, slots[b, t, : counts[b, t]]]
    if len(chosen):
      weights = np.exp(SCALE * q[b, t] @ chosen.T)
      total = weights.sum(-1)
      out[b, t] = weights @ chosen[:, :VALUE_DIM] / total[:, None]
      lse[b, t] = np.log(total)
  return prefix_attention.Partial(out, lse)


def weigh(part):
  """A loss that weighs both outputs at random: each has a cotangent."""
  rng = np.random.default_rng(1)
  lse = jnp.where(jnp.isfinite(part.lse), part.lse, 0.0)
  random = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  return (part.out * random(part.out)).sum() + (lse * random(lse)).sum()


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(q, latents, slots, counts, sums, *, implementation=None):
  """Gradient to q, and the sums with this layer's share."""

  def loss(q, sink):
    part, sink = attend(
        q, latents, slots, counts, sink=sink, implementation=implementation
    )
    return weigh(part), sink

  (total, _), pull_back = jax.vjp(loss, q, sums)
  return pull_back((jnp.ones_like(total), sums))


SIZES = [
    dict(rows=1, share=2),
    dict(rows=3, share=1, t=5, s=40, j=40),
    dict(rows=2, share=2, t=3, s=5, j=1),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_softmax_over_the_chosen_latents(
    x64, sizes, counts, implementation
):
  inputs = problem(**sizes, counts=counts)
  part, sink = attend(**inputs, implementation=implementation)
  chex.assert_trees_all_close(
      part, naive(**inputs), atol=FLOAT64_TOLERANCE, rtol=0
  )
  assert sink is None


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_equal_those_of_the_dense_softmax(x64, sizes, counts):
  """To q, and to the latents: on top of what the sums have, this layer's."""
  inputs = problem(**sizes, counts=counts)
  rng = np.random.default_rng(8)
  sums = jnp.asarray(rng.normal(size=inputs["latents"].shape))
  found, wanted = (
      gradients(**inputs, sums=sums, implementation=implementation)
      for implementation in IMPLEMENTATIONS
  )
  chex.assert_trees_all_close(found, wanted, atol=FLOAT64_TOLERANCE, rtol=0)
  d_q, after = found
  np.testing.assert_array_equal(after[::2], sums[::2])
  assert (jnp.abs(d_q).max() > 0) == (counts != "none")
  assert (after[1] != sums[1]).any() == (counts != "none")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_sink_makes_an_ordinary_gradient(x64, implementation):
  """Against the slope of the loss, which no implementation had a part in."""
  inputs = problem(t=3, s=20, j=20)
  latents = inputs.pop("latents")
  rng = np.random.default_rng(2)
  direction = jnp.asarray(rng.normal(size=latents.shape))

  def loss(latents):
    part, _ = attend(
        latents=latents,
        sink=latents,
        **inputs,
        implementation=implementation,
    )
    return weigh(part)

  step = 1e-5
  ahead, behind = (loss(latents + x * direction) for x in (step, -step))
  slope = (jax.grad(loss)(latents) * direction).sum()
  np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-7)


def test_what_no_query_needs_is_not_gathered():
  """Steps follow the counts: a latent of the tiles after them may be NaN."""
  inputs = problem(share=1, s=400, j=400, counts="all")
  order = jnp.arange(400, dtype=jnp.int32)
  inputs["slots"] = jnp.broadcast_to(order, inputs["slots"].shape)
  first = QUERY_TILE
  inputs["counts"] = inputs["counts"].at[:, :first].set(ENTRY_TILE)
  broken = inputs["latents"].at[:, :, ENTRY_TILE:].set(jnp.nan)
  sums = jnp.zeros_like(broken)
  d_q, _ = gradients(**inputs | {"latents": broken}, sums=sums)
  part, _ = attend(**inputs | {"latents": broken})
  for x in (d_q, part.out):
    assert jnp.isfinite(x[:, :first]).all() and jnp.isnan(x[:, first:]).all()


def in_two(q, latents, slots, counts):
  """Two sources of the latents, and what is chosen of each."""
  del q
  border = 150
  slots, counts = np.asarray(slots), np.asarray(counts)
  real = np.arange(slots.shape[2]) < counts[..., None]
  parts = []
  for low, high in ((0, border), (border, latents.shape[2])):
    mine = real & (slots >= low) & (slots < high)
    order = np.argsort(~mine, axis=-1, kind="stable")
    own = np.take_along_axis(slots, order, -1) - low
    parts.append(dict(slots=own, counts=mine.sum(-1, dtype=np.int32)))
  return (latents[:, :, :border], latents[:, :, border:]), parts


def test_parts_over_any_split_of_the_choice_merge_to_the_whole(x64):
  """Over two sources, in value and gradient."""
  inputs = problem(share=1)
  stacks, parts = in_two(**inputs)

  def merged(q, stacks):
    found = [
        attend(q, stack, sink=stack, **part)[0]
        for stack, part in zip(stacks, parts, strict=True)
    ]
    return prefix_attention.merge(found)

  def whole(q, stacks):
    stack = jnp.concatenate(stacks, 2)
    rest = {name: inputs[name] for name in ("slots", "counts")}
    return attend(q, stack, sink=stack, **rest)[0]

  results = []
  for form in (merged, whole):
    part, pull_back = jax.vjp(form, inputs["q"], stacks)
    results.append((part, pull_back(jax.grad(weigh)(part))))
  chex.assert_trees_all_close(*results, atol=FLOAT64_TOLERANCE, rtol=0)


@functools.cache
def over_shards(**sizes):
  """As a layer does it: latents stay, queries come to every shard."""
  tokens = PartitionSpec("data", "context", "tensor")
  slots = PartitionSpec(None, "data", "context")
  choice = PartitionSpec("data", None, "context")

  @partial(
      jax.shard_map,
      mesh=make_mesh(**sizes),
      in_specs=(tokens, slots, choice, choice),
      out_specs=tokens,
  )
  def run(q, latents, slots, counts):
    q = jax.lax.all_gather(q, "context", axis=1, tiled=True)
    part, _ = attend(q, latents, slots, counts[..., 0], sink=latents)
    return prefix_attention.merge_shards(part, axis_name="context")

  return run


@pytest.mark.parametrize(
    "sizes",
    [dict(context=8), dict(data=2, context=2, tensor=2)],
    ids=["context=8", "2 x 2 x 2"],
)
def test_shards_of_the_latents_merge_to_the_whole(x64, sizes):
  """In value and gradient; heads over `tensor` share what lies on none."""
  n, share = sizes["context"], 400 // sizes["context"]
  inputs = problem(rows=2, share=1, t=16, j=400)
  slots, counts = np.asarray(inputs["slots"]), np.asarray(inputs["counts"])
  real = np.arange(400) < counts[..., None]
  local, numbers = [], []
  for shard in range(n):
    mine = real & (slots // share == shard)
    order = np.argsort(~mine, axis=-1, kind="stable")
    local.append(np.take_along_axis(slots, order, -1)[..., :share] % share)
    numbers.append(mine.sum(-1, dtype=np.int32))
  local = np.concatenate(local, -1).astype(np.int32)
  numbers = np.stack(numbers, -1)
  whole = lambda q, latents, slots, counts: attend(
      q, latents, slots, counts, sink=latents, implementation="reference"
  )[0].out

  @partial(jax.jit, static_argnums=0)
  def with_gradients(run, q, latents, slots, counts):
    out, pull_back = jax.vjp(
        lambda q, latents: run(q, latents, slots, counts), q, latents
    )
    weights = np.random.default_rng(1).normal(size=out.shape)
    return out, pull_back(jnp.asarray(weights))

  floats = inputs["q"], inputs["latents"]
  found = with_gradients(over_shards(**sizes), *floats, local, numbers)
  wanted = with_gradients(whole, *floats, slots, counts)
  chex.assert_trees_all_close(found, wanted, atol=FLOAT64_TOLERANCE, rtol=0)


def in_host_memory(x):
  device = jax.devices()[0]
  return jax.device_put(
      x, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
  )


def test_latents_and_sums_in_host_memory_give_the_same_bits():
  inputs = problem()
  sums = jnp.ones_like(inputs["latents"])
  wanted = gradients(**inputs, sums=sums), attend(**inputs)
  inputs["latents"] = in_host_memory(inputs["latents"])
  run = jax.jit(
      gradients,
      out_shardings=(None, in_host_memory(sums).sharding),
  )
  found = run(**inputs, sums=in_host_memory(sums)), attend(**inputs)
  assert found[0][1].sharding.memory_kind == "pinned_host"
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_sums_have_the_dtype_of_the_sink():
  """One query adds once to a slot: to float32 sums, unrounded."""
  inputs = problem(share=1, t=1, counts="all")
  narrow = {
      name: x.astype(jnp.bfloat16) if name in ("q", "latents") else x
      for name, x in inputs.items()
  }
  exact, rounded = (
      gradients(**narrow, sums=jnp.zeros(inputs["latents"].shape, dtype))[1]
      for dtype in (jnp.float32, jnp.bfloat16)
  )
  assert exact.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
  np.testing.assert_array_equal(exact.astype(jnp.bfloat16), rounded)
  assert (rounded.astype(jnp.float32) != exact).any()


def test_bfloat16_scores_are_accumulated_in_float32():
  inputs = problem()
  narrow = {
      name: x.astype(jnp.bfloat16) if name in ("q", "latents") else x
      for name, x in inputs.items()
  }
  part, whole = attend(**narrow)[0], attend(**inputs)[0]
  assert part.out.dtype == part.lse.dtype == jnp.float32
  chex.assert_trees_all_close(part, whole, atol=BF16_TOLERANCE)


def test_memory_does_not_grow_with_the_slots():
  """No layer is copied, of the latents or of their gradient's sums.

  In float32: before it gathers bfloat16, the CPU's compiler widens the whole.
  """
  t, f32, i32 = 600, jnp.float32, jnp.int32

  def compiled(slots):
    shape = jax.ShapeDtypeStruct
    stack = 2, 1, slots, 16
    inputs = dict(
        q=shape((1, t, 4, 16), f32),
        latents=shape(stack, f32),
        slots=shape((1, t, 200), i32),
        counts=shape((1, t), i32),
    )
    run = jax.jit(gradients, donate_argnames="sums")
    return (
        attend.lower(**inputs).compile(),
        weights_of.lower(**inputs, lse=shape((1, t, 4), f32)).compile(),
        run.lower(**inputs, sums=shape(stack, f32)).compile(),
    )

  for few, many in zip(compiled(4099), compiled(4 * 4099), strict=True):
    growth = programs.temp_bytes(many) - programs.temp_bytes(few)
    assert growth < 4 * 4099, growth  # a hundredth of a layer's growth
    sizes = list(map(math.prod, programs.buffer_shapes(many)))
    assert max(sizes) < t * 4 * 4099
  assert many.memory_analysis().alias_size_in_bytes == 2 * 4 * 4099 * 16 * 4


def test_arguments_that_do_not_fit_are_refused():
  inputs = problem(rows=2, share=1, t=3)
  queries = "q", "slots", "counts"
  with pytest.raises(ValueError, match="want a multiple of the 2 latent rows"):
    attend(**inputs | {name: inputs[name][:1] for name in queries})
  with pytest.raises(ValueError, match="want a multiple of the 2 latent rows"):
    weights_of(
        **inputs | {name: inputs[name][:1] for name in queries},
        lse=jnp.zeros((1, 3, 4)),
    )
  for value_dim in (0, 17):
    with pytest.raises(ValueError, match=f"value_dim={value_dim}: want one in"):
      op.latent_attention(
          **inputs,
          sink=None,
          layer=jnp.int32(0),
          scale=SCALE,
          value_dim=value_dim,
      )


def naive_weights(q, latents, slots, counts, lse):
  """Averaged over heads, by a loop over queries in float64."""
  q, latents, lse = (np.asarray(x, np.float64) for x in (q, latents, lse))
  weights = np.zeros(slots.shape)
  for b, t in np.ndindex(counts.shape):
    row, real = b * latents.shape[1] // len(q), slice(int(counts[b, t]))
    chosen = latents[LAYER, row, np.asarray(slots)[b, t, real]]
    scores = SCALE * q[b, t] @ chosen.T
    weights[b, t, real] = np.exp(scores - lse[b, t][:, None]).mean(0)
  return weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_weights_are_those_of_attention_averaged_over_heads(
    x64, sizes, counts, implementation
):
  """They are a share of all, and 0 from counts on."""
  inputs = problem(**sizes, counts=counts)
  inputs["lse"] = naive(**inputs).lse
  found = weights_of(**inputs, implementation=implementation)
  chex.assert_trees_all_close(
      found, naive_weights(**inputs), atol=FLOAT64_TOLERANCE, rtol=0
  )
  counts = np.asarray(inputs["counts"])
  unused = np.arange(found.shape[2]) >= counts[..., None]
  assert not np.asarray(found)[unused].any()
  wanted = np.where(counts > 0, 1.0, 0.0)
  np.testing.assert_allclose(found.sum(-1), wanted, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_shared_among_all_sources(x64, implementation):
  """By the log-sum-exp of them all: one source has a part of the whole."""
  inputs = problem(share=1)
  stacks, parts = in_two(**inputs)
  lse = naive(**inputs).lse
  found = [
      weights_of(
          inputs["q"], stack, lse=lse, **part, implementation=implementation
      )
      for stack, part in zip(stacks, parts, strict=True)
  ]
  wanted = np.where(inputs["counts"] > 0, 1.0, 0.0)
  first, second = (np.asarray(x.sum(-1)) for x in found)
  assert (first[wanted > 0] < 1).any() and (second[wanted > 0] < 1).any()
  np.testing.assert_allclose(first + second, wanted, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_constants(x64, implementation):
  inputs = problem(**SIZES[1])
  choice = {name: inputs.pop(name) for name in ("slots", "counts")}
  lse = naive(**inputs, **choice).lse
  floats = dict(lse=jnp.where(jnp.isfinite(lse), lse, 0.0), **inputs)

  def total(floats):
    weights = weights_of(**floats, **choice, implementation=implementation)
    return (weights**2).sum()

  value, gradient = jax.value_and_grad(total)(floats)
  assert value > 0
  assert not any(x.any() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_bfloat16_latents_have_the_dtype_of_the_sums(implementation):
  """Of what was rounded, they are those of float64."""
  inputs = problem()
  for name in ("q", "latents"):
    inputs[name] = inputs[name].astype(jnp.bfloat16)
  rounded = {
      name: np.asarray(x, np.float64) if name in ("q", "latents") else x
      for name, x in inputs.items()
  }
  inputs["lse"] = jnp.asarray(naive(**rounded).lse, jnp.float32)
  found = weights_of(**inputs, implementation=implementation)
  assert found.dtype == jnp.float32
  wanted = naive_weights(**inputs).astype(np.float32)
  np.testing.assert_allclose(found, wanted, atol=FLOAT32_TOLERANCE)


def test_nothing_chosen_has_no_weights(x64):
  inputs = problem(**SIZES[1])
  inputs["slots"] = inputs["slots"][..., :0]
  inputs["counts"] = jnp.zeros_like(inputs["counts"])
  found = weights_of(**inputs, lse=jnp.zeros(inputs["q"].shape[:3]))
  assert found.shape == (3, 5, 0) and found.dtype == jnp.float64

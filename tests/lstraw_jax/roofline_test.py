"""Counts in closed form against what XLA makes of the same programs.

XLA counts what it is given: both branches of a condition, so that every block
of keys is scored, and the body of a loop once, unless the loop is read off the
text. Where a program runs one chunk, so do the segments it is compared with.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from lstraw_jax.capacity.kept_bytes import kept_bytes
from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.targets import TARGETS, Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.capture import TapeConfig
from lstraw_jax.hlo.collectives import collectives
from lstraw_jax.hlo.flops import matmul_flops
from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import array_sizes, read_program
from lstraw_jax.hlo.times import times
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.roofline import StageCost, estimate
from lstraw_jax.roofline.attention import (
    attention_cost,
    keys_read,
    keys_scored,
)
from lstraw_jax.roofline.cost import total
from lstraw_jax.roofline.families import layers_of
from lstraw_jax.roofline.kept import trained_elements
from lstraw_jax.roofline.products import gradient_received
from lstraw_jax.roofline.segments import Segments, segments_of
from lstraw_jax.roofline.stages import segments_cost
from lstraw_jax.roofline.vocabulary import head_matrices, table_elements
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import LoraConfig
from modeling.models import parameter_count
from modeling.presets import preset
from modeling.qwen3_5_config import MoeConfig, Qwen3_5Config
from modeling.sharding import make_mesh

pytestmark = pytest.mark.first_class

ROOT = pathlib.Path(__file__).parents[2]
CPU, H20 = TARGETS["cpu"], TARGETS["h20-3e"]
LORA = LoraConfig(rank=8, alpha=8.0, targets=Qwen3_5Config.LINEAR_NAMES)

# Of the program as jax hands it to XLA, whose count has elementwise operations
# too: measured 1.003 to 1.006 times the products.
ELEMENTWISE = 1.01
# A product with one column, the gate of the shared expert, is compiled to none:
# measured 6e-5. With `tensor` above 1 a device computes dx of two gates for all
# heads and not for its own alone: measured 1e-3.
COLUMN, GATES = 2e-4, 2e-3
# Positions, norms, convolutions: measured 1e-3, with `tensor` above 1 5e-3.
LINKS, LINKS_OF_TENSOR = 3e-3, 1e-2


def workload(
    name="tiny",
    *,
    mesh=(1, 1, 1),
    exact=True,
    blocks=2,
    chunk=256,
    prompt=4000,
    response=768,
    block=256,
    head=256,
    group=3,
    kl=0.0,
    update=None,
    **changes,
):
  """Returns an update of a model of a few layers that are not too narrow."""
  wide: dict[str, Any] = dict(
      hidden_size=512,
      vocab_size=1024,
      num_hidden_layers=3 * blocks,
      full_attention_interval=3,
      head_dim=64,
      linear_num_key_heads=8,
      linear_num_value_heads=16,
      linear_key_head_dim=32,
      linear_value_head_dim=32,
  )
  if name == "tiny":
    wide["intermediate_size"] = 1024
  data, context, tensor = mesh
  return Workload(
      model=preset(name).replace(**(wide | changes)),
      data=data,
      context=context,
      tensor=tensor,
      prompt_tokens=prompt,
      response_tokens=response,
      group_size=group,
      update=UpdateConfig(
          prompt_gradient="exact" if exact else "dropped",
          capture_chunk_tokens=chunk,
          response_multiple=64,
          replay=ReplayConfig(
              block_tokens=block,
              head_chunk_tokens=head,
              objective=ObjectiveConfig(kl_coef=kl),
          ),
          **(update or {}),
      ),
  )


def real(**changes):
  """Returns Qwen3.6-27B with adapters on 2,097,152 tokens and 8 devices."""
  sizes: dict[str, Any] = dict(
      model=preset("qwen3.6-27b").replace(lora=LoraConfig(rank=16, alpha=16.0)),
      context=8,
      prompt_tokens=2_097_152,
      response_tokens=8192,
      group_size=8,
      update=UpdateConfig(prompt_gradient="exact", capture_chunk_tokens=8192),
  )
  return Workload(**(sizes | changes))


@functools.cache
def programs(workload):
  mesh = make_mesh(
      data=workload.data, context=workload.context, tensor=workload.tensor
  )
  return StagePrograms(workload, mesh)


@functools.cache
def compiled(stage, workload):
  """Returns the optimised program of a stage."""
  text = programs(workload).lower(stage).compile().as_text()
  assert text is not None, "every backend has one"
  return read_program(text)


def xla_flops(stage, workload) -> float:
  """Returns XLA's own count, of the program before it is optimised."""
  found = programs(workload).lower(stage).cost_analysis()
  assert found is not None, "a CPU has one"
  return found["flops"]


def as_compiled(stage, workload) -> list[Segments]:
  """Returns what one program of a stage runs, with every block of keys seen."""
  found = segments_of(stage, workload)
  one_chunk = stage in ("capture", "prompt_gradient")
  if one_chunk:
    found = found[-1:]  # those before it run another program
  return [
      segments._replace(
          count=count,
          keys=tuple(
              keys._replace(seen=(keys.room * keys.shards,) * count)
              for keys in segments.keys
          ),
      )
      for segments in found
      for count in [1 if one_chunk else segments.count]
  ]


def counted(stage, workload) -> StageCost:
  return total(
      segments_cost(x, workload, CPU) for x in as_compiled(stage, workload)
  )


def check_flops(stage, workload, tolerance=0.0, *, besides=0):
  """Compares products; a program has some `besides` those that are counted."""
  found = matmul_flops(compiled(stage, workload))
  found = found.known + found.a_round
  wanted = counted(stage, workload).flops + besides
  print(f"{stage}: {wanted:,} counted, {found:,} compiled")
  assert abs(wanted / found - 1) <= tolerance, (wanted, found)


def received(program, workload) -> float:
  """Returns the bytes that a device receives in one call of a program."""
  sizes = {x: getattr(workload, x) for x in ("data", "context", "tensor")}
  found = 0.0
  for x in collectives(
      program, mesh_sizes=sizes, source=SourceLines(program, ROOT)
  ):
    devices = math.prod(sizes[axis] for axis in x.axes.split(", "))
    share = 1 if x.kind == "collective-permute" else (devices - 1) / devices
    found += x.bytes * x.times.known * share * (1 + (x.kind == "all-reduce"))
  return found


def gradients_received_twice(stage, workload) -> float:
  """Returns what a CPU receives beside what is counted.

  XLA makes no reduce-scatter for it of an all-reduce whose result is cut.
  """
  layers = layers_of(workload, CPU)
  in_parts = lambda matrices: sum(
      gradient_received(x) for x in matrices if x.parts == x.replicas
  )
  found = 0.0
  for segments in as_compiled(stage, workload):
    if not segments.pulled_back:
      continue
    found += segments.count * sum(
        kind.times * in_parts(kind.matrices) for kind in layers
    )
    found += segments.head_chunks * in_parts(head_matrices(workload))
    if workload.model.lora is None:
      cut = (workload.data - 1) / workload.data
      found += segments.count * cut * 4 * table_elements(workload)
  return found


def check_links(stage, workload, tolerance):
  found = received(compiled(stage, workload), workload)
  wanted = counted(stage, workload).collective_bytes
  wanted += gradients_received_twice(stage, workload)
  print(f"{stage}: {wanted:,.0f} bytes counted, {found:,.0f} compiled")
  assert abs(wanted / found - 1) <= tolerance, (wanted, found)


PULLED = ("replay", "prompt_gradient")
ALL = ("capture", "score", *PULLED)


# One device: product by product.


@pytest.mark.parametrize("stage", ALL)
def test_products_are_those_of_the_compiled_program(stage):
  check_flops(stage, workload())


def test_a_loss_on_the_prompt_takes_the_head():
  one_chunk = workload(group=0, prompt=257)
  check_flops("prompt_gradient", one_chunk)
  many = dataclasses.replace(one_chunk, prompt_tokens=10 * 256 + 7)
  (swept,) = segments_of("prompt_gradient", many)[1:]
  assert (swept.count, swept.head_chunks) == (11, 11)


def test_a_dropped_gradient_costs_two_products_less():
  check_flops("replay", workload(exact=False))


@pytest.mark.parametrize("stage", ("capture", *PULLED))
def test_adapters_are_counted_as_they_are(stage):
  check_flops(stage, workload(lora=LORA))


@pytest.mark.parametrize("stage", ("capture", "replay"))
def test_experts_are_counted(stage):
  check_flops(stage, workload("tiny-moe"), COLUMN)


def test_frozen_experts_have_no_gradient():
  check_flops("replay", workload("tiny-moe", lora=LORA), COLUMN)


def test_a_table_may_be_the_head():
  check_flops("replay", workload(tie_word_embeddings=True))


LOOP_FREE: dict[str, Any] = dict(
    hidden_size=1024,
    intermediate_size=2048,
    full_attention_interval=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    vocab_size=4096,
    chunk=64,
    prompt=513,
    response=64,
    block=64,
    head=64,
    group=1,
)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("stage", ALL)
def test_xla_agrees_where_no_loop_runs_twice(stage, lora):
  one = workload(num_hidden_layers=2, lora=lora, **LOOP_FREE)
  found = xla_flops(stage, one)
  wanted = counted(stage, one).flops
  print(f"{stage}: XLA counts {found / wanted:.4f} times the products")
  assert wanted <= found <= ELEMENTWISE * wanted


def test_xla_counts_a_loop_once():
  one, two = (
      workload(num_hidden_layers=layers, **LOOP_FREE) for layers in (2, 4)
  )
  found = xla_flops("score", two) / xla_flops("score", one)
  assert found == pytest.approx(1, rel=1e-3)
  assert counted("score", two).flops > 1.5 * counted("score", one).flops


# Meshes: of each device.


@pytest.mark.parametrize("stage", ALL)
def test_shards_have_equal_parts_and_receive_what_is_counted(stage):
  cut = workload(mesh=(1, 8, 1))
  check_flops(stage, cut)
  check_links(stage, cut, LINKS)


@pytest.mark.parametrize("stage", ALL)
def test_so_they_do_on_three_axes(stage):
  cut = workload(mesh=(2, 2, 2))
  check_flops(stage, cut, GATES)
  check_links(stage, cut, LINKS_OF_TENSOR)


def test_so_they_do_with_adapters():
  cut = workload(mesh=(2, 2, 2), lora=LORA)
  check_flops("prompt_gradient", cut, GATES)
  check_links("prompt_gradient", cut, LINKS_OF_TENSOR)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize("stage", ("capture", "prompt_gradient"))
def test_so_they_do_with_experts(stage, mesh):
  cut = workload("tiny-moe", mesh=mesh)
  tensor = mesh[2] > 1
  check_flops(stage, cut, GATES if tensor else COLUMN)
  check_links(stage, cut, LINKS_OF_TENSOR if tensor else LINKS)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 4, 2)])
@pytest.mark.parametrize("stage", ("capture", "prompt_gradient"))
def test_so_they_do_where_heads_do_not_divide(stage, mesh):
  few: dict[str, Any] = dict(linear_num_key_heads=2, linear_num_value_heads=6)
  cut = workload(mesh=mesh, chunk=1024, **few)
  tensor = mesh[2] > 1
  check_flops(stage, cut, GATES if tensor else 0)
  check_links(stage, cut, LINKS_OF_TENSOR if tensor else LINKS)


@pytest.mark.parametrize("stage", ("capture", "prompt_gradient"))
def test_products_are_those_of_27b_at_two_million_tokens(stage):
  check_flops(stage, real())


def test_the_work_of_27b_is_the_published_one():
  """5.4e16 FLOP a layer, 14 minutes at 125 TFLOP/s on 8 devices of H20."""
  (chunks,) = segments_of("capture", real())
  a_layer = 8 * attention_cost(real().model, chunks, real()).flops
  assert a_layer == pytest.approx(5.4e16, rel=0.01)
  costs = estimate(real(), H20)
  assert costs["capture"].flops / 125e12 / 60 == pytest.approx(14, rel=0.2)
  assert {cost.bound(H20) for cost in costs.values()} == {"compute", "memory"}
  assert costs["optimizer"].bound(H20) == "memory"


# What is read and written.


@pytest.mark.parametrize("stage", ALL)
def test_slots_are_read_and_written_as_often_as_counted(stage):
  """Keys, values and their sums, all of one width here, by their shape."""
  some = workload()
  model = some.model
  slot_shape = [model.num_key_value_heads, model.head_dim]
  slots = model.num_blocks * some.capacity  # of all layers, flat or not
  program = compiled(stage, some)
  found = 0
  for name, runs in times(program).items():
    for x in program.computations[name]:
      if not x.opcode.startswith("dynamic-"):
        continue
      whole, other = (program.instructions[y] for y in x.operands[:2])
      sizes = array_sizes(whole.shape)
      if sizes[-2:] == slot_shape and math.prod(sizes[:-2]) == slots:
        part = x if x.opcode == "dynamic-slice" else other
        often = sum(run.known for run in runs)
        found += 4 * often * math.prod(array_sizes(part.shape))
  frames = {"capture": 2, "prompt_gradient": 1}.get(stage, 0)
  wanted = sum(
      keys_read(keys) * (4 + pulled * (2 * 4 + 2 * keys.sum_bytes))
      for segments in as_compiled(stage, some)
      for keys, pulled in [(segments.keys[1], segments.pulled_back)]
  )
  slot = 2 * model.num_blocks * model.num_key_value_heads * model.head_dim
  assert found == slot * (wanted + 4 * frames * some.chunk_tokens)


def test_host_memory_moves_what_the_device_would():
  """All slots in each pass over keys: 3 in a sweep, and sums back and forth."""
  host = dict(memory_kind="pinned_host")
  on_device, on_host = workload(), workload(update=host)
  before, after = estimate(on_device, H20), estimate(on_host, H20)
  assert all(cost.host_bytes == 0 for cost in before.values())
  slots = kept_bytes(on_host).slots
  frames = 2 * slots * 16 * 256 // on_host.capacity
  assert after["capture"].host_bytes == 16 * slots + frames
  assert after["score"].host_bytes == 3 * 3 * slots
  assert after["replay"].host_bytes == 3 * (2 + 3 * (3 + 2)) * slots
  assert (
      after["prompt_gradient"].host_bytes == 16 * (3 + 2) * slots + frames // 2
  )
  for stage, cost in after.items():
    assert cost._replace(host_bytes=0, memory_bytes=0) == before[
        stage
    ]._replace(memory_bytes=0)


def test_boundaries_move_through_host_memory_once_each_way():
  tape = TapeConfig(boundary_every=3, memory_kind="pinned_host")
  costs = estimate(workload(update=dict(tape=tape)), H20)
  size = 6 * kept_bytes(workload()).recurrent
  assert costs["capture"].host_bytes == size
  assert costs["prompt_gradient"].host_bytes == size


def test_moments_in_host_memory_come_and_go_once_a_step():
  there = OptimizerConfig(learning_rate=1e-5, memory_kind="pinned_host")
  before = estimate(workload(), H20)
  after = estimate(dataclasses.replace(workload(), optimizer=there), H20)
  moved = 2 * kept_bytes(workload()).optimizer
  assert 0.98 * moved <= after["optimizer"].host_bytes <= moved
  after["optimizer"] = after["optimizer"]._replace(host_bytes=0)
  assert after == before


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-moe", "qwen3.6-27b", "qwen3.6-35b-a3b"]
)
def test_every_weight_is_counted(name):
  """But norms, convolutions, decay rates and biases."""
  model = preset(name)
  one = real(model=model, context=1)
  full = model.num_blocks
  linear = model.num_hidden_layers - full
  size = lambda matrices: sum(x.size for x in matrices)
  attention, delta, layer = (
      size(kind.matrices) for kind in layers_of(one, H20)
  )
  layer += 2 * model.hidden_size
  attention += 2 * model.head_dim
  delta += model.linear_conv_kernel_dim * model.conv_channels
  delta += 2 * model.linear_num_value_heads + model.linear_value_head_dim
  ends = size(head_matrices(one)) + table_elements(one) + model.hidden_size
  found = full * (layer + attention) + linear * (layer + delta) + ends
  assert found == parameter_count(model)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1), (2, 2, 2)])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_sizes_are_those_of_the_arrays(mesh, lora):
  """Norms and such are left out, which every device has: measured 1.6 %."""
  some = workload(mesh=mesh, lora=lora)
  kept = kept_bytes(some)
  count = trained_elements(some, H20)
  assert 0.98 * kept.gradients <= 4 * count <= kept.gradients
  moved = estimate(some, H20)["optimizer"].memory_bytes
  wanted = 2 * kept.gradients + 2 * kept.trainable + 2 * kept.optimizer
  assert 0.98 * wanted <= moved <= wanted


# Which blocks of keys are seen.


def scored_keys(queries, stored) -> int:
  """Returns the keys of the blocks that a query sees: the kernel's own rule."""
  size = max(1, min(512, len(stored)))
  found = 0
  for index in range(-(-len(stored) // size)):
    start = min(index * size, len(stored) - size)
    slot = start + np.arange(size)
    keys = np.where(slot >= index * size, stored[start : start + size], -1)
    found += size * bool(((keys >= 0) & (keys <= queries.max())).any())
  return found


def busiest(shards, segments) -> list[int]:
  """Returns keys scored on the busiest shard, for each set of keys.

  Args:
    shards: of `context`.
    segments: of each the queries' positions, and sets of stored positions, as
      lists of frames; each frame lies over the shards.
  """
  found = np.zeros((shards, 3), int)
  for queries, sets in segments:
    for shard in range(shards):
      for i, frames in enumerate(sets):
        part = [np.split(frame, shards)[shard] for frame in frames]
        found[shard, i] += scored_keys(queries, np.concatenate(part))
  return found[found.sum(1).argmax()].tolist()


def frames_of(positions, size, count):
  padded = np.full(size * count, -1)
  padded[: len(positions)] = positions
  return np.split(padded, count)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("prompt", [2, 1025, 4000, 9001])
def test_chunks_see_the_blocks_before_them(shards, prompt):
  some = workload(mesh=(1, shards, 1), prompt=prompt, chunk=1024)
  frames = frames_of(np.arange(prompt - 1), 1024, some.capacity // 1024)
  hidden = np.full(1024, -1)
  segments = [
      (frame, [[frame], frames[:i] + [hidden] * (len(frames) - i)])
      for i, frame in enumerate(frames[: some.chunks])
  ]
  (found,) = segments_of("capture", some)
  wanted = busiest(shards, segments)
  assert [keys_scored(keys) for keys in found.keys] == wanted[:2]
  assert found.count == some.chunks
  swept = segments_of("prompt_gradient", some)[-1]
  assert [keys_scored(keys) for keys in swept.keys] == wanted[:2]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("response", [5, 600, 2048, 2100, 16_400])
def test_blocks_see_the_prompt_and_the_blocks_before_them(shards, response):
  some = workload(
      mesh=(1, shards, 1), chunk=1024, block=2048, response=response, group=1
  )
  prompt = frames_of(np.arange(3999), 1024, some.capacity // 1024)
  size = min(2048, some.response_slots)
  count = -(-some.response_slots // size)
  own = frames_of(np.arange(3999, 3999 + response), size, count)
  hidden = np.full(size, -1)
  segments = [
      (block, [[block], prompt, own[:j] + [hidden] * (count - j)])
      for j, block in enumerate(own)
  ]
  walked, pulled = segments_of("replay", some)
  assert [keys_scored(x) for x in pulled.keys] == busiest(shards, segments)
  if walked.count:
    wanted = busiest(shards, segments[:-1])
    assert [keys_scored(x) for x in walked.keys] == wanted
  # Tokens with loss go first: the head never runs on padding alone.
  real = [int((block >= 0).sum()) for block in own]
  assert pulled.head_tokens == min(256, size)
  assert pulled.head_chunks == sum(-(-n // pulled.head_tokens) for n in real)
  (scored,) = segments_of("score", some)
  assert scored == pulled._replace(pulled_back=False)


# What an update runs.


def test_a_reference_captures_too():
  without, with_kl = (estimate(workload(kl=kl), H20) for kl in (0.0, 0.1))
  dropped = estimate(workload(exact=False), H20)  # no tape
  assert with_kl["score"] == total([without["score"], dropped["capture"]])
  assert with_kl["capture"] == without["capture"]


def test_what_the_tape_leaves_out_is_run_again():
  """16 chunks of which 6 begin at a boundary: 10 more forwards."""
  tapes = [TapeConfig(boundary_every=n) for n in (1, 3)]
  kept, again = (workload(update=dict(tape=tape)) for tape in tapes)
  more, swept = segments_of("prompt_gradient", again)
  assert [swept] == segments_of("prompt_gradient", kept)[1:]
  (captured,) = segments_of("capture", kept)
  skipped = segments_of("prompt_gradient", kept)[0]
  assert (more.count, skipped.count, captured.count) == (10, 0, 16)
  one = keys_read(captured.keys[1]) // 16
  assert keys_read(more.keys[1]) == 10 * one


def test_a_group_costs_its_responses():
  one, five = (estimate(workload(group=n), H20) for n in (1, 5))
  for stage in ("score", "replay"):
    assert five[stage] == pytest.approx(one[stage].repeated(5))
  for stage in ("capture", "prompt_gradient", "optimizer"):
    assert five[stage] == one[stage]


MORE = ("prompt_tokens", "response_tokens", "group_size")


@hypothesis.given(
    sizes=st.fixed_dictionaries(
        {name: st.integers(1, 40_000) for name in MORE[:2]}
    ),
    name=st.sampled_from(MORE),
    more=st.integers(1, 3000),
    mesh=st.sampled_from([(1, 1, 1), (1, 8, 1), (2, 2, 2)]),
    kind=st.sampled_from(["tiny", "tiny-moe"]),
)
def test_more_tokens_never_cost_less(sizes, name, more, mesh, kind):
  small = dataclasses.replace(
      workload(kind, mesh=mesh, chunk=1024, kl=0.1), **sizes
  )
  large = dataclasses.replace(small, **{name: getattr(small, name) + more})
  before, after = (estimate(x, H20) for x in (small, large))
  for stage, cost in before.items():
    pairs = zip(cost, after[stage], strict=True)
    assert all(x <= y * (1 + 1e-12) for x, y in pairs), stage


# Seconds.


def test_the_slowest_of_four_bounds_a_stage():
  target = Target(
      platform="cuda",
      memory_bytes=None,
      flops=2.0,
      memory_rate=3.0,
      link_rate=5.0,
      host_rate=7.0,
  )
  assert StageCost(2, 3, 5, 7).seconds(target) == 1.0
  for i, bound in enumerate(("compute", "memory", "links", "host")):
    longer = [2, 3, 5, 7]
    longer[i] *= 3
    assert StageCost(*longer).bound(target) == bound
    assert StageCost(*longer).seconds(target) == 3.0


def test_unknown_rates_give_no_seconds():
  cost = estimate(workload(), CPU)["capture"]
  assert cost.seconds(CPU) is None and cost.bound(CPU) is None


def test_only_a_cpu_multiplies_with_every_expert():
  moe = MoeConfig(
      num_experts=8,
      num_experts_per_tok=2,
      moe_intermediate_size=512,
      shared_expert_intermediate_size=32,
  )
  some = workload("tiny-moe", moe=moe)
  (segments,) = segments_of("capture", some)
  chosen, every = (
      segments_cost(segments, some, target).flops for target in (H20, CPU)
  )
  tokens = segments.count * segments.tokens
  one = 2 * tokens * 3 * 512 * 512 * some.model.num_hidden_layers
  assert every - chosen == (8 - 1) * 2 * one


def test_an_estimate_traces_nothing():
  def refuse(*args, **kwargs):
    raise AssertionError("traced")

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "eval_shape", refuse)
    patch.setattr(jax, "jit", refuse)
    costs = estimate(real(prompt_tokens=16_777_216), H20)
  assert list(costs) == [
      "capture",
      "score",
      "replay",
      "prompt_gradient",
      "optimizer",
  ]

"""What programs of a mesh of 2 x 4 devices send, by their text."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from lstraw_jax.hlo.collectives import collectives, sent
from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import read_program
from lstraw_jax.hlo.times import Times
from modeling.sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[3]
SIZES = {"data": 2, "context": 4, "tensor": 1}
ROWS, COLUMNS = 8, 16  # of what a device has
BYTES = 4 * ROWS * COLUMNS


def found(function, mesh_sizes=SIZES):
  """Returns what a function of a device's array sends."""
  mesh = make_mesh(**SIZES)
  everywhere = PartitionSpec(("data", "context"))
  program = jax.jit(
      jax.shard_map(
          function,
          mesh=mesh,
          in_specs=everywhere,
          out_specs=everywhere,
          check_vma=False,
      )
  )
  x = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32)
  return of_text(program.lower(x).compile().as_text(), mesh_sizes)


def of_text(text, mesh_sizes=SIZES):
  program = read_program(text)
  source = SourceLines(program, ROOT)
  return collectives(program, mesh_sizes=mesh_sizes, source=source)


def loop(body, count):
  return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, count)[0]


def test_a_sum_in_a_loop_runs_as_often_as_the_loop():
  (one,) = found(loop(lambda x: jax.lax.psum(jnp.sin(x), "context"), 5))
  assert (one.kind, one.axes, one.bytes) == ("all-reduce", "context", BYTES)
  assert one.times == Times(known=5) and one.total_bytes == 5 * BYTES
  assert one.source.startswith("tests/lstraw_jax/hlo/collectives_test.py:")
  assert one.scope.endswith("psum")


def test_a_gather_counts_what_it_makes():
  (one,) = found(
      lambda x: jax.lax.all_gather(x, ("data", "context"), tiled=True)[:ROWS]
      + x
  )
  assert (one.kind, one.axes) == ("all-gather", "data, context")
  assert one.total_bytes == one.bytes == 8 * BYTES


@pytest.mark.parametrize(
    ("function", "kind", "axes"),
    [
        (
            lambda x: jnp.tile(
                jax.lax.psum_scatter(x, "context", tiled=True), (4, 1)
            ),
            "reduce-scatter",
            "context",
        ),
        (
            lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
            "all-to-all",
            "data",
        ),
        (
            lambda x: jax.lax.ppermute(x, "context", [(0, 1), (1, 2), (2, 3)]),
            "collective-permute",
            "context",
        ),
    ],
)
def test_other_operations_count_what_they_take(function, kind, axes):
  (one,) = found(function)
  assert (one.kind, one.axes, one.bytes) == (kind, axes, BYTES)


def test_operations_add_up_by_kind_and_axes():
  def function(x):
    x = loop(lambda x: jnp.sin(jax.lax.psum(x, "data")), 3)(x)
    x = jnp.sin(jax.lax.psum(x, "data"))
    return jnp.sin(jax.lax.psum(x, "context"))

  operations = found(function)
  assert [x.total_bytes for x in operations] == [3 * BYTES, BYTES, BYTES]
  data, context = sent(operations)
  assert (data.axes, data.operations, data.bytes) == ("data", 2, 4 * BYTES)
  assert (context.axes, context.operations) == ("context", 1)


def test_bytes_in_a_loop_of_unknown_length_are_in_no_sum():
  def function(x):
    def step(x):
      return jnp.sin(jax.lax.psum(x, "context")) + 1

    return jax.lax.while_loop(lambda x: x[0, 0] < 1e9, step, jnp.cos(x))

  (one,) = found(function)
  assert one.total_bytes is None and str(one.times) == "1 x ?"
  assert one.as_json()["times"] == "1 x ?"
  (total,) = sent([one])
  assert (total.bytes, total.unknown) == (0, 1)


def test_what_sends_nothing_is_left_out():
  assert found(lambda x: jax.lax.psum(x, "tensor") + 1) == []


# As GPUs send, at the same time as they compute.
ASYNC = """HloModule jit_f

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y)
}

%wrapped (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %scatter = f32[2,4]{1,0} reduce-scatter(%p), SCATTER, to_apply=%add
}

ENTRY %main (a: f32[8,4], b: bf16[2,4]) -> f32[2,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = bf16[2,4]{1,0} parameter(1)
  %gather = ((IN), (OUT)) all-gather-start(%a, %b), GATHER, dimensions={0}
  %gathered = (OUT) all-gather-done(%gather)
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%a), calls=%wrapped
  ROOT %done = f32[2,4]{1,0} async-done(%start)
}
"""
for short, written in {
    "IN": "f32[8,4]{1,0}, bf16[2,4]{1,0}",
    "OUT": "f32[16,4]{1,0}, bf16[4,4]{1,0}",
    "GATHER": "channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "SCATTER": "channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}",
}.items():
  ASYNC = ASYNC.replace(short, written)


def test_a_start_and_its_end_are_one_operation():
  gather, scatter = of_text(ASYNC)
  assert (gather.kind, gather.axes) == ("all-gather", "data")
  assert gather.bytes == 2 * (4 * 8 * 4 + 2 * 2 * 4)  # of both arrays
  assert (scatter.kind, scatter.axes) == ("reduce-scatter", "context")
  assert scatter.bytes == 4 * 8 * 4

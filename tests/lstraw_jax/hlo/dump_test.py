"""The files of a program with known buffers, sums and work."""

import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lstraw_jax.hlo.buffers import largest_buffers
from lstraw_jax.hlo.dump import dump_stage
from lstraw_jax.hlo.page import page
from lstraw_jax.hlo.report import StageReport
from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import read_program
from modeling.sharding import constrain, make_mesh

ROOT = pathlib.Path(__file__).parents[3]
HERE = str(pathlib.Path(__file__).relative_to(ROOT))
SIZES = {"data": 2, "context": 4, "tensor": 1}
ROWS, COLUMNS, LARGE = 64, 8, 4096


def stage(x, w, kept):
  """Makes an array of [ROWS / 4, LARGE] on each device of `context`."""
  w = constrain(w, make_mesh(**SIZES), (None, None))
  with jax.named_scope("widen"):
    wide = jnp.tanh(x @ w)  # the largest
  return wide @ w.T, kept + 1


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
  mesh = make_mesh(**SIZES)
  on = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
  shapes = [
      jax.ShapeDtypeStruct(
          (ROWS, COLUMNS), jnp.float32, sharding=on("context")
      ),
      jax.ShapeDtypeStruct((COLUMNS, LARGE), jnp.float32, sharding=on("data")),
      jax.ShapeDtypeStruct((128,), jnp.int32, sharding=on()),
  ]
  lowered = jax.jit(stage, donate_argnums=2).lower(*shapes)
  folder = tmp_path_factory.mktemp("dump") / "stage"
  compiled = dump_stage(lowered, folder, mesh_sizes=SIZES, root=ROOT)
  return folder, compiled


def read(folder, name):
  return json.loads((folder / f"{name}.json").read_text())


def line_of(mark):
  lines = pathlib.Path(__file__).read_text().splitlines()
  (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(mark)]
  return f"{HERE}:{found}"


def test_all_files_are_there(dumped):
  folder, _ = dumped
  assert sorted(path.name for path in folder.iterdir()) == [
      "buffers.json",
      "collectives.json",
      "compiled.json",
      "cost.json",
      "hlo.txt",
      "memory.json",
      "ops.json",
      "sent.json",
      "stablehlo.txt",
  ]
  assert (folder / "hlo.txt").read_text().startswith("HloModule jit_stage")
  stablehlo = (folder / "stablehlo.txt").read_text()
  assert "module @jit_stage" in stablehlo
  assert f"{pathlib.Path(__file__).name}" in stablehlo
  assert read(folder, "compiled")["jax"] == jax.__version__


def test_memory_is_that_of_the_compiler(dumped):
  folder, compiled = dumped
  memory, stats = read(folder, "memory"), compiled.memory_analysis()
  assert memory["temp_bytes"] == stats.temp_size_in_bytes > 0
  x, w, kept = ROWS * COLUMNS // 4, COLUMNS * LARGE // 2, 128
  assert memory["argument_bytes"] == 4 * (x + w + kept)
  assert memory["alias_bytes"] == 4 * kept
  assert memory["total_bytes"] == (
      memory["argument_bytes"]
      + memory["output_bytes"]
      - memory["alias_bytes"]
      + memory["temp_bytes"]
  )
  assert memory["host_temp_bytes"] == 0


def test_the_largest_buffers_have_sizes_shapes_and_lines(dumped):
  folder, _ = dumped
  buffers = read(folder, "buffers")
  sizes = [buffer["bytes"] for buffer in buffers]
  assert sizes == sorted(sizes, reverse=True)
  wide, *_ = [x for x in buffers if x["kind"] == "temporary"]
  assert wide["bytes"] == 4 * ROWS * LARGE // 4
  assert wide["shape"].startswith(f"f32[{ROWS // 4},{LARGE}]")
  assert wide["source"] == line_of("# the largest")
  assert any(x["at_peak"] for x in buffers if x["kind"] == "temporary")
  arguments = {x["scope"]: x for x in buffers if x["kind"] == "argument"}
  assert arguments.keys() == {"x", "w", "kept"}
  assert arguments["w"]["bytes"] == 4 * COLUMNS * LARGE // 2
  assert arguments["w"]["opcode"] == "parameter"
  # What is donated is written over, by a line.
  assert arguments["kept"]["values"] == 2 and arguments["kept"]["source"]


def test_as_many_buffers_are_listed_as_asked(dumped):
  folder, _ = dumped
  program = read_program((folder / "hlo.txt").read_text())
  assignment = """
allocation 0: size 96, parameter 0, shape |f32[24]| at ShapeIndex {}:
 value: <1 x @0> (size=96,offset=0): f32[24]{0}
allocation 1: size 64, page 0, preallocated-temp:
 value: <2 first @0> (size=32,offset=0): f32[8]{0}
 value: <3 second{1,2} @0> (size=32,offset=32): f32[8]{0}
 value: <4 third @0> (size=32,offset=0): f32[8]{0}
allocation 2: size 8, constant:
 value: <5 c @0> (size=8,offset=0): f32[2]{0}
allocation 3: size 4, maybe-live-out:
 value: <6 out{} @0> (size=4,offset=0): f32[]
"""
  peak = """  Live ranges at 7 (peak):
    third{}: 32 bytes (cumulative: 32 bytes)
  Something else:
    second{1,2}: 32 bytes (cumulative: 32 bytes)
"""
  source = SourceLines(program, ROOT)
  all_of = lambda count: largest_buffers(
      program, assignment, peak, source=source, count=count
  )
  assert [x.instruction for x in all_of(2)] == ["x", "third"]
  kinds = [(x.kind, x.bytes, x.values, x.at_peak) for x in all_of(9)]
  assert kinds == [
      ("argument", 96, 1, False),
      ("temporary", 32, 2, True),
      ("temporary", 32, 1, False),
      ("constant", 8, 1, False),
      ("output", 4, 1, False),
  ]
  assert all_of(3)[2].instruction == "second{1,2}"


def test_the_weight_is_gathered_over_its_axis(dumped):
  folder, _ = dumped
  (gather,) = [
      x for x in read(folder, "collectives") if x["kind"] == "all-gather"
  ]
  assert gather["axes"] == "data" and gather["times"] == "1"
  assert gather["total_bytes"] == gather["bytes"] == 4 * COLUMNS * LARGE
  (total,) = [x for x in read(folder, "sent") if x["kind"] == "all-gather"]
  assert (total["axes"], total["operations"]) == ("data", 1)


def test_work_is_counted_twice(dumped):
  folder, _ = dumped
  cost = read(folder, "cost")
  products = 2 * 2 * (ROWS // 4) * COLUMNS * LARGE
  assert cost["matmul_flops"] == products
  assert products <= cost["xla"]["flops"] < 1.2 * products
  assert "bytes accessed" in cost["xla"]
  assert not [name for name in cost["xla"] if "{" in name]


def test_the_analysis_of_xla_counts_a_loop_once(tmp_path):
  """What the page says of it. If this fails, it has learnt to count."""

  def loop(x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, 50)[0]

  lowered = jax.jit(loop).lower(jax.ShapeDtypeStruct((32, 32), jnp.float32))
  dump_stage(lowered, tmp_path, mesh_sizes={"data": 1}, root=ROOT)
  cost = read(tmp_path, "cost")
  once = 2 * 32**3
  assert cost["matmul_flops"] == 50 * once
  assert once <= cost["xla"]["flops"] < 1.2 * once


def test_a_compiler_that_refuses_is_quoted_in_a_line(tmp_path):
  lowered = mock.Mock(spec=jax.stages.Lowered)
  lowered.as_text.return_value = ""
  lowered.compile.side_effect = jax.errors.JaxRuntimeError(
      "UNIMPLEMENTED: cannot.\nAnd this is where:\n..."
  )
  message = r"^replay: the compiler refuses it: UNIMPLEMENTED: cannot\.$"
  with pytest.raises(ValueError, match=message):
    dump_stage(lowered, tmp_path / "replay", mesh_sizes=SIZES, root=ROOT)


def test_the_page_needs_nothing_else_and_escapes(dumped):
  folder, _ = dumped
  report = StageReport.read(folder)
  report.buffers[0]["scope"] = "<script>alert(1)</script>"
  text = page("a & b", {"target": "cpu:8"}, {"stage": report})
  assert "<title>a &amp; b</title>" in text
  assert "<script" not in text and "&lt;script&gt;" in text
  assert "src=" not in text and "http" not in text and "@import" not in text
  assert 'href="stage/hlo.txt"' in text and 'href="#stage"' in text
  assert line_of("# the largest") in text
  assert f"{report.memory['temp_bytes']:,}" in text


def test_the_page_says_what_is_not_known(dumped):
  folder, _ = dumped
  report = StageReport.read(folder)
  report.cost.update(xla=None, matmul_flops_a_round=5_000_000)
  report.collectives[0].update(times="3 x ?", total_bytes=None)
  report.sent[0].update(unknown=1)
  text = page("title", {}, {"stage": report})
  assert "gives no cost analysis" in text and "counts the body" not in text
  assert "5 MFLOP" in text and "3 x ?" in text
  report.sent.clear()
  assert "Nothing is sent" in page("title", {}, {"stage": report})

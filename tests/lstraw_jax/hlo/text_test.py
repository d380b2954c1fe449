"""Programs read back from the text of real ones."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from lstraw_jax.hlo.sources import SourceLines
from lstraw_jax.hlo.text import array_bytes, array_sizes, read_program

ROOT = pathlib.Path(__file__).parents[3]
HERE = str(pathlib.Path(__file__).relative_to(ROOT))


def line_of(mark):
  """Returns the place in this file where a comment stands."""
  lines = pathlib.Path(__file__).read_text().splitlines()
  (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(mark)]
  return f"{HERE}:{found}"


def double(x):
  return x + x  # the inner line


@jax.jit
def small(x, y):
  with jax.named_scope("outer"):
    product = x @ y  # the product
  return double(product), y.sum()


def text_of(program, *shapes):
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return program.lower(*arrays).compile().as_text()


@pytest.fixture(scope="module")
def text():
  return text_of(small, (8, 16), (16, 4))


def find(program, opcode):
  (found,) = [x for x in program.instructions.values() if x.opcode == opcode]
  return found


def test_instructions_are_read_with_all_their_parts(text):
  program = read_program(text)
  assert program.name == "jit_small"
  entry = program.computations[program.entry]
  arguments = [x for x in entry if x.opcode == "parameter"]
  assert sorted(x.arguments for x in arguments) == ["0", "1"]
  assert sorted(x.scope for x in arguments) == ["x", "y"]
  (root,) = [x for x in entry if x.is_root]
  assert root.opcode == "tuple"
  assert set(root.operands) <= {x.name for x in entry}
  assert array_bytes(root.shape) == 4 * (8 * 4 + 1)
  product = find(program, "dot")
  assert array_sizes(product.shape) == [8, 4]
  assert "outer/" in product.scope


def test_no_line_of_a_computation_is_missed(text):
  """Each line of the text with an assignment is an instruction."""
  lines = [line for line in text.splitlines() if line.startswith("  ")]
  assert len(read_program(text).instructions) == len(lines)


def test_a_line_is_the_innermost_one_of_ours(text):
  program = read_program(text)
  source = SourceLines(program, ROOT)
  assert source(find(program, "dot").name) == line_of("# the product")
  doubled = [x for x in program.instructions.values() if x.opcode == "add"]
  lines = {source(x.name) for x in doubled if x.frame is not None}
  assert line_of("# the inner line") in lines


def test_lines_of_others_are_passed_over(text):
  program = read_program(text)
  name = find(program, "dot").name
  assert SourceLines(program, ROOT / "lstraw_jax")(name) == ""


PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/repo/a.py"
2 "/home/me/repo/.venv/lib/site-packages/flax/x.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p0: f32[4], p1: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %p1 = f32[4]{0:T(256)S(1)} parameter(1)
  ROOT %neg = f32[4]{0} negate(%p1)
}, execution_thread="main"

ENTRY %main.3 (a: f32[4]) -> (f32[4], bf16[2,3]) {
  %a = f32[4]{0} parameter(0), metadata={op_name="policy[\\'a\\']"}
  %made = f32[4]{0} sine(%a), metadata={op_name="f/sin" stack_frame_id=2}
  %c = (f32[2]{0}, /*index=1*/s32[]) constant(({1, 2}, 3))
  %moved = f32[4]{0} copy(%made)
  %fusion = f32[4]{0} fusion(%c, %moved), kind=kLoop, calls=%fused
  ROOT %t = (f32[4]{0}, bf16[2,3]{1,0}) tuple(%fusion, %made)
}
"""


def test_values_that_xla_moved_come_from_where_they_were_made():
  program = read_program(PROGRAM)
  source = SourceLines(program, pathlib.Path("/home/me/repo"))
  # Frame 2 is in an environment, its caller is ours.
  assert source("made") == "a.py:7"
  assert source("moved") == "a.py:7"
  # By the fusion's result, its second operand, and the copy.
  assert source("fusion") == "a.py:7"
  assert source("neg") == "a.py:7"
  assert source("a") == source("c") == source("p0") == ""
  assert source("not there") == ""


def test_parents_are_found_whatever_they_are_numbered_from():
  right = PROGRAM.replace("id=1 parent_frame_id=1", "id=1 parent_frame_id=0")
  right = right.replace("id=2 parent_frame_id=2", "id=2 parent_frame_id=1")
  frames = read_program(right).frames
  assert frames == read_program(PROGRAM).frames
  assert frames[1].parent is None and frames[2].parent == 1


def test_tuples_layouts_and_constants_are_understood():
  program = read_program(PROGRAM)
  assert program.entry == "main.3"
  assert program.instructions["a"].scope == "policy['a']"
  constant = program.instructions["c"]
  assert constant.opcode == "constant" and constant.operands == []
  assert array_bytes(constant.shape) == 12
  root = program.instructions["t"]
  assert root.operands == ["fusion", "made"] and root.is_root
  assert program.instructions["fusion"].called("calls") == ["fused"]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("bf16[2,8]{1,0:T(8,128)(2,1)S(1)}", 32),
        ("f8e4m3fn[10]{0}", 10),
        ("s4[3]{0}", 2),
        ("c64[2]", 16),
        ("f32[0,5]", 0),
        ("token[]", 0),
        ("()", 0),
        ("((f32[2]{0}, /*index=1*/u8[3]{0}), s64[1])", 19),
    ],
)
def test_bytes_are_those_of_all_arrays(shape, wanted):
  assert array_bytes(shape) == wanted


def test_other_texts_are_refused():
  with pytest.raises(ValueError, match=r"got 'hello'.*want"):
    read_program("hello")
  with pytest.raises(ValueError, match="never closed"):
    read_program(PROGRAM.replace("parameter(0)", "parameter(0"))

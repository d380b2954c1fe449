"""How often parts of a program run, and what its products cost."""

import jax
import jax.numpy as jnp
import pytest

from lstraw_jax.hlo.flops import matmul_flops
from lstraw_jax.hlo.ops import count_ops
from lstraw_jax.hlo.text import read_program
from lstraw_jax.hlo.times import Times, times

N = 8
PRODUCT = 2 * N**3


def read(function, *shapes, dtypes=()):
  dtypes = dtypes or [jnp.float32] * len(shapes)
  arrays = [
      jax.ShapeDtypeStruct(shape, dtype)
      for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  return read_program(jax.jit(function).lower(*arrays).compile().as_text())


def of_products(program):
  """Returns how often each matrix product runs."""
  found = times(program)
  return [
      often
      for computation, runs in found.items()
      for instruction in program.computations[computation]
      if instruction.opcode == "dot"
      for often in runs
  ]


def again(x):
  return jnp.tanh(x @ x)


def loop(body, count):
  return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, count)[0]


def until_large(x):
  return jax.lax.while_loop(lambda x: x.sum() < 10, again, x)


def test_loops_in_loops_multiply():
  program = read(loop(loop(again, 5), 3), (N, N))
  assert of_products(program) == [Times(known=15)]
  assert matmul_flops(program) == (15 * PRODUCT, 0)


def test_a_loop_of_unknown_length_is_said_to_be_one():
  program = read(loop(until_large, 3), (N, N))
  (often,) = of_products(program)
  assert often == Times(known=3, unknown_loops=1)
  assert often.exact is None and str(often) == "3 x ?"
  assert matmul_flops(program) == (0, 3 * PRODUCT)


def test_a_branch_may_not_be_taken():
  def maybe(x, take):
    return jax.lax.cond(take, loop(again, 4), lambda x: x, x)

  program = read(maybe, (N, N), (), dtypes=(jnp.float32, jnp.bool))
  (often,) = of_products(program)
  assert often == Times(known=4, at_most=True)
  assert often.exact == 4 and str(often) == "at most 4"


@pytest.mark.parametrize(
    ("equation", "shapes", "products"),
    [
        ("ij,jk->ik", ((3, 5), (5, 7)), 3 * 5 * 7),
        ("bij,bkj->bik", ((4, 3, 5), (4, 7, 5)), 4 * 3 * 5 * 7),
        ("kli,lkj->ij", ((5, 2, 3), (2, 5, 7)), 5 * 2 * 3 * 7),
    ],
)
def test_flops_are_those_of_the_equation(equation, shapes, products):
  program = read(lambda x, y: jnp.einsum(equation, x, y), *shapes)
  assert matmul_flops(program) == (2 * products, 0)


# As other compilers write the same products.
OTHERS = """HloModule jit_f

ENTRY %main (a: f32[6,64,32], b: f32[6,32,16]) -> f32[6,64,16] {{
  %a = f32[6,64,32]{{2,1,0}} parameter(0)
  %b = f32[6,32,16]{{2,1,0}} parameter(1)
  ROOT %product = {product}
}}
"""
CUBLAS = (
    "(f32[6,64,16]{2,1,0}, s8[4096]{0}) custom-call(%a, %b),"
    ' custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config'
    '":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
    '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}'
)
TPU = (
    "f32[6,64,16]{2,1,0} convolution(%a, %b), window={size=6 stride=5"
    " lhs_dilate=6}, dim_labels=0bf_0io->0bf"
)
TPU_PLAIN = "f32[64,16]{1,0} convolution(%c, %d), dim_labels=bf_io->bf"


@pytest.mark.parametrize("product", [CUBLAS, TPU])
def test_products_of_other_compilers_count_the_same(product):
  program = read_program(OTHERS.format(product=product))
  assert matmul_flops(program) == (2 * 6 * 64 * 32 * 16, 0)


def test_a_convolution_without_a_window_is_a_product():
  text = OTHERS.format(product=TPU_PLAIN)
  text = text.replace("%a = f32[6,64,32]{2,1,0}", "%c = f32[64,32]{1,0}")
  text = text.replace("%b = f32[6,32,16]{2,1,0}", "%d = f32[32,16]{1,0}")
  assert matmul_flops(read_program(text)) == (2 * 64 * 32 * 16, 0)


def test_another_custom_call_is_no_product():
  product = 'f32[6,64,16]{2,1,0} custom-call(%a, %b), custom_call_target="x"'
  assert matmul_flops(read_program(OTHERS.format(product=product))) == (0, 0)


FUSED = """HloModule jit_f

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y)
}

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %s = f32[4]{0} sine(%p)
  ROOT %c = f32[4]{0} cosine(%s)
}

%outer (q: f32[4]) -> f32[] {
  %q = f32[4]{0} parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[] reduce(%q, %z), dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[4]) -> f32[] {
  %a = f32[4]{0} parameter(0)
  %f = f32[4]{0} fusion(%a), kind=kLoop, calls=%inner
  ROOT %g = f32[] fusion(%f), kind=kCustom, calls=%outer, BACKEND
}
""".replace(
    "BACKEND",
    'backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}',
)


def test_operations_count_where_they_stand():
  counts = count_ops(read_program(FUSED))
  assert counts.operations == {"fusion": 2, "parameter": 1}
  assert counts.fusions == {"kLoop": 1, "kCustom __triton_gemm": 1}
  # Not the addition, which is applied to elements.
  assert counts.fused == {
      "parameter": 2,
      "sine": 1,
      "cosine": 1,
      "constant": 1,
      "reduce": 1,
  }


def test_operations_of_a_real_program_are_counted():
  program = read(loop(lambda x: jnp.sort(x @ x) @ x, 3), (N, N))
  counts = count_ops(program)
  all_of = lambda name: counts.operations.get(name, 0) + counts.fused.get(
      name, 0
  )
  assert (all_of("while"), all_of("sort"), all_of("dot")) == (1, 1, 2)

"""The rows of a report against numpy on gradients computed apart."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax import gradient_report as module
from lstraw_jax.capture import TapeConfig, capture, capture_with_tape
from lstraw_jax.gradient_report import gradient_report
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.replay import ReplayConfig, replay
from lstraw_jax.state_cotangent import zero_cotangent
from modeling.sharding import make_mesh
from tests import tiny

pytestmark = pytest.mark.first_class

TOLERANCE = 1e-10  # float64, of ratios
CONFIG = tiny.config()
GLM = tiny.config("tiny-glm")
PROMPT = tiny.tokens(30)
GROUP = tiny.group(PROMPT, (5, 8, 3), masked=0.2)
REPLAY = ReplayConfig(block_tokens=8, head_chunk_tokens=8)

# Of which names each family is, said otherwise than by the table under test.
SHARED = {
    "norms": lambda name: "norm" in name,
    "embedding": lambda name: name == "embed_tokens",
    "head": lambda name: name.startswith("lm_head"),
    "all": lambda name: True,
}
NAMED = SHARED | {
    "q": lambda name: "q_proj" in name,
    "k": lambda name: "k_proj" in name,
    "GDN b, a": lambda name: "in_proj_b" in name or "in_proj_a" in name,
    "decay": lambda name: name.endswith(("A_log", "dt_bias")),
    "MLP": lambda name: ".mlp." in name,
}
NAMED_GLM = SHARED | {
    "q up": lambda name: "q_b_proj" in name,
    "kv down": lambda name: "kv_a_proj" in name,
    "router": lambda name: name.endswith("mlp.gate.kernel"),
    "experts": lambda name: ".experts." in name,
    "shared expert": lambda name: "shared_experts" in name,
}


def captured(policy):
  return capture_with_tape(
      policy,
      [PROMPT] * policy.mesh.shape["data"],
      tape=TapeConfig(boundary_every=2),
      chunk_tokens=8,
  )


def report(policy, *, group=GROUP):
  prompt, tape = captured(policy)
  branches = tiny.branches(
      *[group] * policy.mesh.shape["data"], multiple=8, mesh=policy.mesh
  )
  rows = gradient_report(policy, prompt, tape, branches, config=REPLAY)
  return {row.family: row for row in rows}


@functools.cache
def reported(config=CONFIG):
  """Returns the rows of one device."""
  return report(tiny.policy(config))


def apart(config, *, dtype="float32"):
  """Returns the dropped gradient, and the exact one added on top of it."""
  policy = tiny.policy(config)
  prompt = capture(policy, [PROMPT], chunk_tokens=8)
  branches = tiny.branches(GROUP, multiple=8)
  run = functools.partial(replay, policy, prompt, branches, config=REPLAY)
  dropped = tiny.copied(run(zero_gradients(policy), None).gradients)
  prompt, tape = captured(policy)
  both = run(
      zero_gradients(policy), zero_cotangent(policy, prompt, dtype=dtype)
  )
  exact, _ = add_prompt_gradient(
      policy, prompt, tape, both.gradients, both.cotangent, policy_step=0
  )
  return named_leaves(dropped), named_leaves(tiny.copied(exact))


def flat(leaves, belongs):
  return np.concatenate([x.ravel() for k, x in leaves.items() if belongs(k)])


@pytest.mark.parametrize(
    "config,named",
    [
        pytest.param(CONFIG, NAMED, id="dense"),
        pytest.param(GLM, NAMED_GLM, id="glm", marks=pytest.mark.first_class),
    ],
)
def test_rows_are_what_numpy_says(x64, config, named):
  rows = reported(config)
  dropped, exact = apart(config)
  _, rounded = apart(config, dtype="bfloat16")
  for family, belongs in named.items():
    d, e, r = (flat(leaves, belongs) for leaves in (dropped, exact, rounded))
    norm = np.linalg.norm
    row = rows[family]
    wanted = (
        d @ e / norm(d) / norm(e),
        norm(d - e) / norm(e),
        norm(d) / norm(e),
        norm(e) / 3,  # three responses
    )
    got = row.cosine, row.relative_l2, row.norm_ratio, row.exact_norm
    np.testing.assert_allclose(
        got, wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=family
    )
    assert row.parameters == d.size
    error = norm(r - e) / norm(e)
    assert abs(row.bfloat16_relative_l2 - error) < TOLERANCE
  assert sum(r.parameters for r in rows.values()) == 2 * rows["all"].parameters


def test_the_gradient_through_the_prompt_and_bfloat16_sums_both_tell(x64):
  rows = reported()
  print(rows["all"])
  for family in ("all", "k", "v", "GDN qkv"):
    assert rows[family].cosine < 0.99 and rows[family].relative_l2 > 0.1
    assert rows[family].bfloat16_relative_l2 > 1e-4
  # Nothing of the head reaches the loss through the state.
  assert rows["head"].relative_l2 == rows["head"].bfloat16_relative_l2 == 0
  assert abs(rows["head"].cosine - 1) < TOLERANCE


def test_sums_in_the_same_dtype_have_no_error(x64, monkeypatch):
  monkeypatch.setattr(module, "_COMPARED", "float32")
  rows = report(tiny.policy(CONFIG))
  assert {row.bfloat16_relative_l2 for row in rows.values()} == {0.0}
  assert rows["all"].relative_l2 == reported()["all"].relative_l2


def test_a_gradient_of_zero_has_no_ratios(x64):
  rollouts = [dataclasses.replace(r, reward=0.0) for r in GROUP.rollouts]
  rows = report(
      tiny.policy(CONFIG),
      group=dataclasses.replace(GROUP, rollouts=tuple(rollouts)),
  )
  for row in rows.values():
    assert row[2:] == (None, None, None, 0.0, None)


def test_one_of_the_two_gradients_may_be_zero():
  one = module._Squares(*map(np.float32, (0.0, 4.0, 0.0, 4.0)))
  row = module._row("q", 3, [one, one], [np.float32(2.0)] * 2, 2)
  half = 0.5**0.5
  assert row == ("q", 3, None, 1.0, 0.0, 2**0.5, pytest.approx(half))


def test_a_gradient_that_is_not_finite_is_refused_by_family():
  bad = module._Squares(*map(np.float32, (np.nan, 1.0, 1.0, 1.0)))
  with pytest.raises(FloatingPointError, match="gradient of 'conv' is not"):
    module._row("conv", 3, [bad], [np.float32(0.0)], 2)


def test_a_mesh_gives_the_same_rows(x64):
  mesh = make_mesh(data=2, context=2, tensor=2)
  found = report(tiny.policy(CONFIG, mesh=mesh))
  for family, wanted in reported().items():
    got = found[family]
    assert got.parameters == wanted.parameters
    # Both replicas have the same prompt: the mean is that of one.
    np.testing.assert_allclose(
        got[2:6], wanted[2:6], rtol=TOLERANCE, atol=TOLERANCE, err_msg=family
    )
    # Other sums are rounded to bfloat16, to an error of the same size.
    assert (
        wanted.bfloat16_relative_l2 / 2
        <= got.bfloat16_relative_l2
        <= wanted.bfloat16_relative_l2 * 2
    )


def test_a_weight_of_no_family_is_refused_before_anything_is_computed():
  policy = tiny.policy(tiny.config(dtype="float32"))
  policy = policy.replace(trainable={"indexer": jnp.zeros(2)})
  with pytest.raises(ValueError, match="weight='indexer' is of families"):
    gradient_report(policy, None, None, None, config=REPLAY)

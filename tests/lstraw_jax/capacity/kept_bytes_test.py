"""The bytes that a plan counts are those of real arrays."""

import dataclasses
import itertools

import jax
import pytest

from lstraw_jax.capacity.kept_bytes import kept_bytes
from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.prompt_state import empty_prompt_state
from lstraw_jax.state_cotangent import zero_cotangent
from lstraw_jax.train_state import make_train_state
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import LoraConfig
from modeling.presets import preset
from modeling.sharding import make_mesh
from tests import tiny

MESHES = [dict(), dict(context=8), dict(data=2, context=2, tensor=2)]
GLM_MESHES = [dict(), dict(context=8), dict(data=2, context=4)]
CASES = [
    *itertools.product(["tiny", "tiny-moe"], MESHES),
    *itertools.product(["tiny-glm"], GLM_MESHES),
]
# Those of GLM by default: experts have some.
ADAPTERS = {"tiny-glm": LoraConfig(rank=2, alpha=4.0)}


def workload(model="tiny", *, lora=None, cotangent_dtype="float32", **mesh):
  config = tiny.config(model, dtype="bfloat16", lora=lora)
  if lora is None:
    config = config.replace(param_dtype="float32")
  return Workload(
      model=config,
      **mesh,
      prompt_tokens=100,
      response_tokens=8,
      group_size=2,
      update=UpdateConfig(
          prompt_gradient="exact",
          capture_chunk_tokens=16,
          cotangent_dtype=cotangent_dtype,
      ),
  )


def on_one_device(tree) -> int:
  """Returns the bytes that the first device really holds."""
  first = jax.devices()[0]
  return sum(
      shard.data.nbytes
      for leaf in jax.tree.leaves(tree)
      for shard in leaf.addressable_shards
      if shard.device == first
  )


@pytest.mark.parametrize("model, mesh", CASES, ids=str)
@pytest.mark.parametrize(
    "trained, cotangent_dtype", [("full", "float32"), ("lora", "bfloat16")]
)
def test_they_are_those_of_real_arrays_to_the_byte(
    model, mesh, trained, cotangent_dtype
):
  lora = ADAPTERS.get(model, tiny.ALL_ADAPTERS)
  plan = workload(
      model,
      lora=lora if trained == "lora" else None,
      cotangent_dtype=cotangent_dtype,
      **mesh,
  )
  kept = kept_bytes(plan)
  policy = tiny.policy(plan.model, mesh=make_mesh(**mesh))
  prompt = empty_prompt_state(
      plan.model,
      mesh=policy.mesh,
      capacity=plan.capacity,
      chunk_tokens=plan.chunk_tokens,
      batch=plan.data,
  )
  cotangent = zero_cotangent(policy, prompt, dtype=cotangent_dtype)
  state = make_train_state(
      policy,
      make_optimizer(plan.optimizer),
      seed=0,
      with_reference=False,
  )
  scalars = (prompt.length, prompt.next_token, prompt.policy_step)
  held = dict(
      trainable=policy.trainable,
      frozen=policy.frozen,
      gradients=zero_gradients(policy),
      optimizer=state.opt_state,
      slots=prompt.slots,
      positions=(prompt.positions, scalars),
      recurrent=prompt.recurrent,
      cotangent_slots=cotangent.slots,
      cotangent_recurrent=cotangent.recurrent,
  )
  assert {k: on_one_device(v) for k, v in held.items()} == kept._asdict()


def test_bfloat16_sums_are_half_as_large():
  wide, narrow = (
      kept_bytes(workload(cotangent_dtype=dtype))
      for dtype in ("float32", "bfloat16")
  )
  assert narrow.cotangent_slots * 2 == wide.cotangent_slots == 2 * wide.slots


@pytest.mark.parametrize(
    "model, size",
    [("qwen3.6-27b", 65_536), ("glm-5.2", 95_232), ("glm-5", 109_824)],
)
def test_a_token_of_a_real_model_takes_so_many_bytes(model, size):
  plan = dataclasses.replace(
      workload(),
      model=preset(model),
      prompt_tokens=1025,
      update=UpdateConfig(prompt_gradient="dropped", capture_chunk_tokens=1024),
  )
  assert kept_bytes(plan).slots == size * 1024


def test_index_keys_have_no_cotangent():
  plan = workload("tiny-glm", lora=ADAPTERS["tiny-glm"])
  kept, model = kept_bytes(plan), plan.model
  index_keys = 2 * model.num_indexers * model.index_head_dim * plan.capacity
  assert index_keys > 0
  assert kept.cotangent_slots == 2 * (kept.slots - index_keys)


def test_a_mesh_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r"mesh\.tensor=4.*no head is cut"):
    kept_bytes(workload(tensor=4))
  with pytest.raises(ValueError, match=r"mesh\.tensor=2: want 1.*one latent"):
    kept_bytes(workload("tiny-glm", context=4, tensor=2))


@pytest.mark.parametrize(
    "model, mesh", [case for case in CASES if case[0] != "tiny-moe"], ids=str
)
def test_shapes_are_laid_out_as_the_arrays_that_training_makes(model, mesh):
  plan = workload(model, **mesh)
  programs = StagePrograms(plan, make_mesh(**mesh))
  policy = tiny.policy(plan.model, mesh=programs.mesh)
  prompt = empty_prompt_state(
      plan.model,
      mesh=policy.mesh,
      capacity=plan.capacity,
      chunk_tokens=plan.chunk_tokens,
      batch=plan.data,
  )
  made = (
      policy,
      prompt,
      zero_gradients(policy),
      zero_cotangent(policy, prompt),
  )
  shapes = (
      programs.policy,
      programs.prompt,
      programs.gradients,
      programs.cotangent,
  )
  # Not their structures: each model has partial functions of its own.
  leaves = map(jax.tree_util.tree_leaves_with_path, (made, shapes))
  for (path, array), (same, shape) in zip(*leaves, strict=True):
    assert path == same
    assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
    assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)

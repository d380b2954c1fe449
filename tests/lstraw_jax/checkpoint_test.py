"""Saving a run, killing it, and going on to the same bits."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lstraw_jax.checkpoint import TrainCheckpoints
from lstraw_jax.fingerprint import fingerprint
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.optimizer import OptimizerConfig, make_optimizer
from lstraw_jax.train_state import (
    TrainState,
    apply_gradients,
    make_train_state,
)
from modeling.decoder_config import LoraConfig
from modeling.presets import preset
from modeling.sharding import make_mesh
from tests import tiny

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "in_proj_qkv"))
TINY = preset("tiny").replace(hidden_size=32, intermediate_size=64, lora=LORA)
GLM = tiny.config("tiny-glm", dtype="float32")
GLM_ADAPTED = GLM.replace(lora=LoraConfig(rank=2, alpha=4.0))
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=3))
CONFIG = {
    "train": {"learning_rate": 0.1, "steps": 10, "kinds": ["a", "b"]},
    "log": {"every": 1, "path": None},
}
CHILD = """
import sys
from tests.lstraw_jax import checkpoint_test as t
t.train_until_killed(sys.argv[1])
"""


def make_state(
    *,
    seed=0,
    config=TINY,
    optimizer=OPTIMIZER,
    reference=True,
    memory_kind="device",
    **mesh,
):
  policy = tiny.policy(config, seed=seed, mesh=make_mesh(**mesh))
  return make_train_state(
      policy,
      optimizer,
      seed=7,
      with_reference=reference,
      memory_kind=memory_kind,
  )


@pytest.fixture(scope="module")
def first() -> TrainState:
  """A state to save or to restore into; tests do not consume it."""
  return make_state()


def train(state: TrainState, *, steps: int) -> TrainState:
  """Takes optimizer steps along gradients drawn from the state's own key."""
  for _ in range(steps):
    key = jax.random.fold_in(state.key, state.step)
    gradients = jax.tree.map(
        lambda w, key=key: jax.random.normal(key, w.shape),
        state.policy.trainable,
    )
    applied = apply(*jax.tree.map(jnp.copy, learned(state)), gradients)
    state = dataclasses.replace(
        state,
        policy=state.policy.replace(trainable=applied.trainable),
        opt_state=applied.opt_state,
        step=state.step + 1,
    )
  return state


def apply(trainable, opt_state, gradients):
  return apply_gradients(
      trainable, opt_state, gradients, jnp.asarray(1.0), optimizer=OPTIMIZER
  )


def learned(state: TrainState):
  return state.policy.trainable, state.opt_state


def advance(state: TrainState, *, steps: int = 1) -> TrainState:
  """Moves the state on, at no cost."""
  for _ in range(steps):
    trainable = jax.tree.map(lambda w: w * 1.5, state.policy.trainable)
    policy = state.policy.replace(trainable=trainable)
    state = dataclasses.replace(state, policy=policy, step=state.step + 1)
  return state


def bits(state: TrainState) -> list[tuple[np.dtype, bytes]]:
  state = dataclasses.replace(state, key=jax.random.key_data(state.key))
  return [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(state)]


def write(directory, state) -> None:
  """Saves `state` as the checkpoint of step 1."""
  state = dataclasses.replace(state, step=jnp.asarray(1, jnp.int32))
  with TrainCheckpoints(directory, config=CONFIG) as checkpoints:
    checkpoints.save(state, position=5)


def read(directory, template, *, config=CONFIG, **settings):
  with TrainCheckpoints(directory, config=config, **settings) as checkpoints:
    return checkpoints.restore(template)


def train_until_killed(directory: str) -> None:
  """Saves as fast as it can."""
  state = make_state()
  with TrainCheckpoints(directory, config=CONFIG) as checkpoints:
    while True:
      state = advance(state)
      checkpoints.save(state, position=2 * int(state.step))


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        TINY.replace(lora=None, param_dtype="bfloat16"),
        GLM.replace(param_dtype="bfloat16"),
        GLM_ADAPTED.replace(param_dtype="bfloat16"),
    ],
    ids=["adapters", "all", "glm", "glm-adapters"],
)
def test_a_restored_state_is_the_saved_one_bit_for_bit(tmp_path, config):
  saved = advance(make_state(config=config))
  write(tmp_path, saved)  # as step 1, which it is
  restored, position = read(tmp_path, make_state(config=config))
  assert position == 5
  assert bits(restored) == bits(saved)
  assert jax.tree.structure(restored) == jax.tree.structure(saved)
  assert restored.key.dtype == saved.key.dtype


@pytest.mark.first_class
@pytest.mark.parametrize("config", [GLM, GLM_ADAPTED], ids=["all", "adapters"])
def test_routers_stay_wide_and_their_biases_as_they_were(tmp_path, config):
  """Where all other weights are bfloat16, and whatever is trained."""
  config = config.replace(param_dtype="bfloat16")
  saved = advance(make_state(config=config))
  write(tmp_path, saved)
  restored, _ = read(tmp_path, make_state(config=config))
  routers = [
      [x for x in named_leaves(state.policy).items() if ".mlp.gate." in x[0]]
      for state in (restored, saved)
  ]
  (kernel, ours), (bias, loaded) = sorted(routers[0], reverse=True)
  assert kernel.endswith("gate.kernel") and ours.dtype == jnp.float32
  assert bias.startswith("frozen.")
  assert bias.endswith("e_score_correction_bias")
  assert loaded.dtype == jnp.float32
  assert (loaded != loaded.astype(jnp.bfloat16).astype(jnp.float32)).any()
  for (_, x), (_, y) in zip(*routers, strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_resumed_run_goes_on_to_the_bits_of_an_unbroken_one(tmp_path, first):
  unbroken = train(first, steps=4)
  with TrainCheckpoints(tmp_path, config=CONFIG) as checkpoints:
    checkpoints.save(train(first, steps=2), position=0)
  resumed, _ = read(tmp_path, first)
  assert bits(train(resumed, steps=2)) == bits(unbroken)


def test_what_is_restored_can_be_donated(tmp_path, first):
  write(tmp_path, first)
  state, _ = read(tmp_path, first)
  consumed = learned(state)
  before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(consumed)}
  applied = apply(*consumed, jax.tree.map(jnp.ones_like, consumed[0]))
  assert all(x.is_deleted() for x in jax.tree.leaves(consumed))
  made = jax.tree.leaves((applied.trainable, applied.opt_state))
  reused = sum(x.nbytes for x in made if x.unsafe_buffer_pointer() in before)
  assert reused >= 0.95 * sum(x.nbytes for x in made)


def test_frozen_weights_are_not_written(tmp_path, first):
  write(tmp_path, first)
  frozen = sum(x.nbytes for x in jax.tree.leaves(first.policy.frozen))
  files = [p for p in tmp_path.rglob("*") if p.is_file()]
  assert sum(p.stat().st_size for p in files) < frozen


def test_shapes_and_shardings_are_enough_of_a_template(tmp_path, first):
  write(tmp_path, first)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  spread = NamedSharding(mesh, PartitionSpec())
  abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), first
  )
  template = dataclasses.replace(
      abstract,
      policy=dataclasses.replace(abstract.policy, frozen=first.policy.frozen),
  )
  restored, _ = read(tmp_path, template)
  arrays = (learned(restored), restored.step, restored.key, restored.reference)
  assert all(x.sharding == spread for x in jax.tree.leaves(arrays))
  one = dataclasses.replace(first, step=jnp.asarray(1, jnp.int32))
  assert bits(restored) == bits(one)

  nowhere = dataclasses.replace(
      template, step=jax.ShapeDtypeStruct((), jnp.int32)
  )
  with pytest.raises(ValueError, match="template step has no sharding"):
    read(tmp_path, nowhere)
  with pytest.raises(ValueError, match=r"policy\.frozen\..*loaded weight"):
    read(tmp_path, abstract)


def test_a_state_moves_from_mesh_to_mesh_bit_for_bit(tmp_path, first):
  spread = advance(make_state(data=2, context=2, tensor=2))
  write(tmp_path, spread)
  for mesh in ({}, dict(context=4, tensor=2)):
    template = make_state(**mesh)
    restored, _ = read(tmp_path, template)
    assert bits(restored) == bits(advance(first))
    layout = lambda state: [x.sharding for x in jax.tree.leaves(learned(state))]
    assert layout(restored) == layout(template)


def test_a_negative_zero_has_the_same_fingerprint_on_every_mesh():
  def zeros(**mesh):
    policy = tiny.policy(TINY, mesh=make_mesh(**mesh))
    fill = lambda x: jax.device_put(np.full(x.shape, -0.0, x.dtype), x.sharding)
    return dataclasses.replace(policy, frozen=jax.tree.map(fill, policy.frozen))

  assert fingerprint(zeros()) == fingerprint(zeros(context=4, tensor=2))


def test_only_the_newest_are_kept(tmp_path, first):
  with TrainCheckpoints(tmp_path, config=CONFIG, keep=2) as checkpoints:
    state = first
    for _ in range(4):
      state = advance(state)
      checkpoints.save(state, position=0)
  assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {"3", "4"}


def test_a_half_written_checkpoint_is_ignored_and_removed(tmp_path, first):
  write(tmp_path, first)
  half = tmp_path / "3.orbax-checkpoint-tmp"
  shutil.copytree(tmp_path / "1", half)
  with TrainCheckpoints(tmp_path, config=CONFIG) as checkpoints:
    assert checkpoints.latest_step() == 1
    state, _ = checkpoints.restore(first)
    checkpoints.save(advance(state), position=0)
    assert checkpoints.latest_step() == 2
  assert not half.exists()


def test_a_half_deleted_checkpoint_does_no_harm(tmp_path, first):
  with TrainCheckpoints(tmp_path, config=CONFIG, keep=2) as checkpoints:
    for steps in (1, 2):
      checkpoints.save(advance(first, steps=steps), position=0)
  shutil.rmtree(tmp_path / "1/arrays")
  with TrainCheckpoints(tmp_path, config=CONFIG, keep=2) as checkpoints:
    state, _ = checkpoints.restore(first)
    checkpoints.save(advance(state), position=0)
  assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {"2", "3"}


def test_a_step_is_written_once_and_never_behind_the_newest(tmp_path, first):
  with TrainCheckpoints(tmp_path, config=CONFIG) as checkpoints:
    second = advance(first, steps=2)
    checkpoints.save(second, position=1)
    checkpoints.save(second, position=1)
    with pytest.raises(ValueError, match=r"step=1: .* already holds step 2"):
      checkpoints.save(advance(first), position=1)
  with TrainCheckpoints(tmp_path, config=CONFIG) as checkpoints:
    with pytest.raises(ValueError, match=r"step=2: .* already holds step 2"):
      checkpoints.save(second, position=1)
    checkpoints.restore(first)
    checkpoints.save(second, position=1)


def test_an_empty_directory_has_no_checkpoint(tmp_path, first):
  with TrainCheckpoints(tmp_path / "new", config=CONFIG) as checkpoints:
    assert checkpoints.latest_step() is None
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*new"):
      checkpoints.restore(first)


def test_each_other_setting_is_named(tmp_path, first):
  write(tmp_path, first)
  train = {"learning_rate": 0.2, "kinds": ["a", "c"], "seed": None}
  with pytest.raises(ValueError) as error:
    read(tmp_path, first, config=CONFIG | {"train": train})
  assert str(error.value).splitlines()[1:] == [
      "  train.kinds.1: checkpoint 'b', now 'c'",
      "  train.learning_rate: checkpoint 0.1, now 0.2",
      "  train.seed: checkpoint absent, now None",
      "  train.steps: checkpoint 10, now absent",
  ]


def test_settings_that_may_change_do(tmp_path, first):
  write(tmp_path, first)
  train = CONFIG["train"] | {"steps": 20}
  changed = {"train": train, "log": {"every": 2}, "logs": 1}
  read(
      tmp_path,
      first,
      config=changed,
      may_change={"train.steps", "log", "logs"},
  )
  with pytest.raises(ValueError) as error:
    read(tmp_path, first, config=changed, may_change={"train.step", "log"})
  assert "train.steps: checkpoint 10, now 20" in str(error.value)
  assert "logs: checkpoint absent, now 1" in str(error.value)
  assert "log.every" not in str(error.value)


def test_a_config_is_what_json_holds(tmp_path):
  with pytest.raises(ValueError, match=r"config holds .*dtype.*JSON"):
    TrainCheckpoints(tmp_path, config={"a": {"b": np.dtype("int8")}})
  with pytest.raises(ValueError, match="keep=0"):
    TrainCheckpoints(tmp_path, config={}, keep=0)


@pytest.mark.parametrize(
    ("other", "what", "line"),
    [
        (
            {"config": TINY.replace(head_dim=16)},
            "model config",
            "head_dim: checkpoint 32, now 16",
        ),
        (
            {"config": TINY.replace(lora=dataclasses.replace(LORA, alpha=8.0))},
            "model config",
            "lora.alpha: checkpoint 4.0, now 8.0",
        ),
        (
            {"optimizer": optax.sgd(0.1, momentum=0.9)},
            "arrays",
            "opt_state.1.0.count: checkpoint 'int32[]', now absent",
        ),
        (
            {"reference": False},
            "arrays",
            "q_proj.lora_a: checkpoint 'float32[1, 32, 2]', now absent",
        ),
        (
            {"seed": 1},
            "frozen weights",
            "q_proj.kernel: checkpoint 'float32[1, 32, 256] sha256:",
        ),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, first, other, what, line):
  write(tmp_path, first)
  with pytest.raises(ValueError) as error:
    read(tmp_path, make_state(**other))
  assert f"1: other {what}:\n" in str(error.value)
  assert line in str(error.value)


def test_one_column_of_the_base_model_is_enough_to_refuse(tmp_path, first):
  write(tmp_path, first)
  weights = jax.tree.map(jnp.copy, first.policy.frozen)
  embedding = weights["embed_tokens"]
  embedding[...] = embedding[...].at[:, 5].add(1.0)
  policy = dataclasses.replace(first.policy, frozen=weights)
  with pytest.raises(ValueError, match=r"\n  embed_tokens: checkpoint [^\n]*$"):
    read(tmp_path, dataclasses.replace(first, policy=policy))


def test_another_kind_of_key_is_refused(tmp_path, first):
  write(tmp_path, first)
  template = dataclasses.replace(first, key=jax.random.key(0, impl="rbg"))
  with pytest.raises(ValueError, match=r"key: .*'key<fry>\[\]', now 'key<rbg>"):
    read(tmp_path, template)


def test_parts_that_nothing_reads_are_reported(tmp_path, first):
  write(tmp_path, first)
  record = tmp_path / "1/record/metadata"
  known = record.read_text()
  record.write_text(json.dumps(json.loads(known) | {"sampler": 1}))
  with pytest.raises(ValueError, match=r"record: .* unknown \['sampler'\]"):
    read(tmp_path, first)
  record.write_text(known)
  (tmp_path / "1/loader").mkdir()
  with pytest.raises(ValueError, match=r"items: .* unknown \['loader'\]"):
    read(tmp_path, first)
  (tmp_path / "1/loader").rmdir()
  read(tmp_path, first)


def test_a_run_killed_at_any_moment_goes_on(tmp_path, first):
  root = pathlib.Path(__file__).parents[2]
  child = subprocess.Popen(
      [sys.executable, "-c", CHILD, str(tmp_path)],
      cwd=root,
      env=os.environ | {"PYTHONPATH": str(root)},
  )
  deadline = time.monotonic() + 120
  while not (tmp_path / "2").exists():
    assert child.poll() is None and time.monotonic() < deadline
    time.sleep(0.01)
  time.sleep(float(np.random.default_rng().uniform(0, 0.5)))
  child.send_signal(signal.SIGKILL)
  child.wait()
  with TrainCheckpoints(tmp_path, config=CONFIG) as checkpoints:
    state, position = checkpoints.restore(first)
    step = int(state.step)
    assert step >= 2 and position == 2 * step
    assert bits(state) == bits(advance(first, steps=step))
    checkpoints.save(advance(state), position=0)
    assert checkpoints.latest_step() == step + 1


@pytest.mark.parametrize(
    "before, after", [("device", "pinned_host"), ("pinned_host", "device")]
)
def test_moments_come_back_to_the_memory_of_the_new_run(
    tmp_path, before, after
):
  saved = train(make_state(memory_kind=before), steps=1)
  write(tmp_path, saved)
  restored, _ = read(tmp_path, make_state(memory_kind=after))
  assert bits(restored) == bits(saved)
  kinds = {
      x.sharding.memory_kind
      for x in jax.tree.leaves(restored.opt_state)
      if x.ndim
  }
  assert kinds == {after}

"""The binary as a user runs it: in a process of its own."""

import json
import signal
import subprocess
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments.configs import tiny_glm
from experiments.run_settings import load_policy
from experiments.settings import read_settings
from lstraw_jax.named_leaves import named_leaves
from tests import binaries

SMALL = {
    "data.prompt_tokens": 512,
    "model.initializer_range": 0.1,
    "sampling.max_tokens": 8,
    "train.steps": 4,
    "train.group_size": 2,
    "train.prompts_per_step": 2,
    "train.capture_chunk_tokens": 32,
    "train.response_multiple": 8,
    "train.head_chunk_tokens": 8,
    "objective.kl_coef": 0.1,
    "checkpoint.every_steps": 1,
}


def command(workdir, *flags, config="tiny", **settings):
  changes = {k.replace("__", "."): v for k, v in settings.items()}
  return binaries.command(
      "train_grpo",
      *flags,
      workdir=workdir,
      settings=SMALL | changes,
      config=config,
  )


def run(workdir, **settings):
  return binaries.run(command(workdir, **settings))


def rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def arrays(workdir, step):
  """Returns the arrays of a checkpoint, read by orbax alone."""
  path = workdir / "checkpoints" / str(step) / "arrays"
  return ocp.StandardCheckpointer().restore(path)


def kill_during_update(workdir, step):
  """Starts a run and kills it -9 while it works on the update after `step`."""
  process = subprocess.Popen(
      command(workdir),
      cwd=binaries.ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
  )
  complete = workdir / "checkpoints" / str(step)
  deadline = time.monotonic() + 250
  while not complete.exists():
    assert process.poll() is None, process.stderr.read().decode()
    assert time.monotonic() < deadline, f"no checkpoint {step} in time"
    time.sleep(0.001)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not (workdir / "receipt.json").exists(), "it was over before the kill"


@pytest.mark.timeout(900)
@pytest.mark.first_class
def test_a_killed_run_goes_on_to_the_bits_of_an_unbroken_one(tmp_path):
  unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
  first = run(unbroken)
  assert first.returncode == 0, first.stderr
  kill_during_update(killed, step=2)
  again = run(killed)
  assert again.returncode == 0, again.stderr
  assert "resumed after update 2" in again.stdout

  wanted, got = arrays(unbroken, 4), arrays(killed, 4)
  assert wanted.keys() == got.keys() and len(wanted) > 30
  for name, value in wanted.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
  timed = ("seconds", "tokens_per_s", "peak_bytes")
  for before, after in zip(rows(unbroken), rows(killed), strict=True):
    for name in before.keys() - set(timed):
      assert before[name] == after[name], name

  check_run_folder(unbroken)
  check_that_another_config_is_refused(unbroken)


def check_run_folder(workdir):
  receipt = json.loads((workdir / "receipt.json").read_text())
  assert receipt["gradient"]["prompt_gradient"] == "dropped"
  assert receipt["steps"] == 4 and receipt["staleness_steps"] == 0
  phases = receipt["seconds"]["phases"]
  assert phases.keys() == {
      "capture", "respond", "score", "replay", "optimizer",
  }  # fmt: skip
  resolved = json.loads((workdir / "config.json").read_text())
  assert resolved["train"]["group_size"] == 2
  assert (workdir / "reward.png").read_bytes().startswith(b"\x89PNG")
  table = rows(workdir)
  assert [row["step"] for row in table] == [1, 2, 3, 4]
  for row in table:
    assert row["ratio_mean"] == row["ratio_max"] == 1.0
    assert row["prompt_tokens"] == 2 * 512
    assert row["response_tokens"] == 2 * 2 * 8
    assert row["sampler_gap_nats"] < 1e-5
  # At first the policy is the reference, but for the rounding of two programs.
  assert 0 <= table[0]["kl_nats"] < 1e-9 < 1e-6 < table[-1]["kl_nats"]


def check_that_another_config_is_refused(workdir):
  refused = run(workdir, optimizer__learning_rate=0.5, seed=3)
  assert refused.returncode == 1
  assert "optimizer.learning_rate: checkpoint 0.01, now 0.5" in refused.stderr
  assert "seed: checkpoint 0, now 3" in refused.stderr
  assert "Traceback" not in refused.stderr


@pytest.mark.timeout(900)
@pytest.mark.first_class
def test_a_run_that_keeps_states_goes_on_to_the_same_bits(tmp_path):
  """Its states are in no checkpoint: each one ends their service."""
  rng = np.random.default_rng(0)
  responses = [
      {"tokens": rng.integers(0, 256, 6).tolist(), "reward": reward}
      for reward in (0.0, 1.0)
  ]
  prompt = rng.integers(0, 256, 50).tolist()
  line = {"group_id": "a", "prompt_tokens": prompt, "responses": responses}
  path = tmp_path / "groups.jsonl"
  path.write_text(json.dumps(line) + "\n")
  settings = {
      "data__rollouts": path,
      "train__prompts_per_step": 1,
      "objective__kl_coef": 0.0,
      "checkpoint__every_steps": 2,
      "refresh__rule": "adaptive",
      "refresh__limit_nats": 1e9,
  }
  unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
  for workdir, steps in ((unbroken, 4), (broken, 2), (broken, 4)):
    process = run(workdir, train__steps=steps, **settings)
    assert process.returncode == 0, process.stderr
  wanted, got = arrays(unbroken, 4), arrays(broken, 4)
  for name, value in wanted.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
  for workdir in (unbroken, broken):
    assert [row["staleness_steps"] for row in rows(workdir)] == [0, 1, 0, 1]
    assert rows(workdir)[1]["drift_nats"] > 0
    receipt = json.loads((workdir / "receipt.json").read_text())
    assert receipt["staleness_steps"] == 1


@pytest.mark.parametrize(
    "setting,message",
    [
        ("--config.train.stepz=1", "error: 'stepz'\nDid you mean \"steps\""),
        ("--config.train.prompt_gradient=exakt", "want 'dropped'"),
        ("--config.data.rollouts=nope.jsonl", "nope.jsonl"),
        ("stray", "unknown arguments: stray"),
    ],
)
def test_a_mistake_is_answered_in_a_line(tmp_path, setting, message):
  workdir = tmp_path / "run"
  binaries.expect_mistake(command(workdir, setting), message, workdir=workdir)


@pytest.mark.timeout(900)
@pytest.mark.first_class
def test_a_sparse_model_is_exported_and_trained_again(tmp_path):
  """On a mesh of experts, exactly; then as a checkpoint, by its adapters."""
  small = {"data__prompt_tokens": 64, "train__prompts_per_step": 1}
  start = lambda workdir, **changes: run(
      workdir, config="tiny_glm", **small, **changes
  )
  first, second = tmp_path / "first", tmp_path / "second"
  made = start(
      first,
      train__steps=2,
      train__prompt_gradient="exact",
      mesh__context=8,
      checkpoint__export=True,
  )
  assert made.returncode == 0, made.stderr
  assert "prompt gradient: exact" in made.stdout
  trained = {
      name.removeprefix("trainable."): value
      for name, value in arrays(first, 2).items()
      if name.startswith("trainable.")
  }
  config = tiny_glm.get_config()
  config.model.checkpoint = str(first / "model")
  config.model.dtype = config.model.param_dtype = "float32"
  loaded = load_policy(config, read_settings(config))
  leaves = named_leaves(loaded.trainable)
  assert leaves.keys() == trained.keys() and len(leaves) > 30
  for name, value in leaves.items():
    np.testing.assert_array_equal(value, trained[name], err_msg=name)

  again = start(
      second,
      train__steps=1,
      model__checkpoint=first / "model",
      lora__rank=2,
      state__memory_kind="pinned_host",
  )
  assert again.returncode == 0, again.stderr
  assert "loaded " in again.stdout and "adapter weights" in again.stdout
  assert "prompt gradient: dropped" in again.stdout
  assert all("lora" in x for x in arrays(second, 1) if "trainable" in x)

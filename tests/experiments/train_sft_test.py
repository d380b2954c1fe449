"""Supervised training from its command line to the files of its run."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import train_sft
from experiments.configs import sft
from experiments.sequences import make_sequences
from experiments.sft_settings import read_sft_settings
from tests import binaries

SMALL = {
    "data.prompt_tokens": 100,
    "data.max_prompt_tokens": 100,
    "train.steps": 4,
    "train.prompts_per_step": 2,
    "train.capture_chunk_tokens": 32,
    "train.head_chunk_tokens": 32,
    "checkpoint.every_steps": 2,
}


def train(workdir, **changes):
  """Trains in this process; returns a row per update."""
  config = sft.get_config()
  config.update_from_flattened_dict(SMALL | changes)
  settings = read_sft_settings(config)
  sequences = make_sequences(config, settings)
  return train_sft.train(config, settings, sequences, workdir=workdir)


def write_sequences(path):
  """Eight sequences that count up, each from another number."""
  mask = [0] * 20 + [1] * 40
  with path.open("w") as file:
    for first in range(0, 80, 10):
      record = {"tokens": [*range(first, first + 60)], "loss_mask": mask}
      file.write(json.dumps(record) + "\n")
  return str(path)


def arrays(workdir, step):
  """Returns the arrays of a checkpoint, read by orbax alone."""
  path = workdir / "checkpoints" / str(step) / "arrays"
  return ocp.StandardCheckpointer().restore(path)


def rows_of(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.timeout(900)
@pytest.mark.first_class
def test_training_learns_and_a_resumed_run_has_the_same_bits(tmp_path):
  source = {"data.sequences": write_sequences(tmp_path / "sequences.jsonl")}
  unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
  rows = train(unbroken, **source)
  assert rows[-1]["loss"] < rows[0]["loss"] - 0.5

  train(resumed, **source, **{"train.steps": 2})
  process = binaries.run(
      command(resumed, f"--config.data.sequences={tmp_path}/sequences.jsonl")
  )
  assert process.returncode == 0, process.stderr
  assert "prompt gradient: exact" in process.stdout
  assert "resumed after update 2" in process.stdout
  losses = [row["loss"] for row in rows]
  assert process.stdout.splitlines()[-1] == (
      f"loss of the first five updates {np.mean(losses):.3f}, of the last five"
      f" {np.mean(losses):.3f}; seed 0"
  )
  timed = ("seconds", "tokens_per_s", "peak_bytes")
  for before, after in zip(rows, rows_of(resumed), strict=True):
    for name in before.keys() - set(timed):
      assert before[name] == after[name], name
  wanted, got = arrays(unbroken, 4), arrays(resumed, 4)
  assert wanted.keys() == got.keys() and len(wanted) > 30
  for name, value in wanted.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
  check_run_folder(unbroken)

  with pytest.raises(ValueError, match=r"learning_rate: checkpoint 0\.01"):
    train(unbroken, **source, **{"optimizer.learning_rate": 0.5})


def check_run_folder(workdir):
  receipt = json.loads((workdir / "receipt.json").read_text())
  assert receipt["gradient"]["prompt_gradient"] == "exact"
  assert receipt["steps"] == 4 and receipt["staleness_steps"] == 0
  assert receipt["curve"]["field"] == "loss"
  phases = receipt["seconds"]["phases"]
  assert phases.keys() == {"capture", "prompt", "optimizer"}
  assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
  for step, row in enumerate(rows_of(workdir), 1):
    assert row["step"] == step
    assert (row["tokens"], row["loss_tokens"]) == (2 * 60, 2 * 40)


def command(workdir, *flags):
  return binaries.command(
      "train_sft", *flags, workdir=workdir, settings=SMALL, config="sft"
  )


@pytest.mark.parametrize(
    "setting,message",
    [
        ("--config.data.sequence=x", 'Did you mean "sequences"'),
        ("--config.train.group_size=4", "group_size"),
        ("--config.sampling.top_p=0.5", "sampling"),
        ("--config.data.sequences=nope.jsonl", "nope.jsonl"),
    ],
)
def test_a_mistake_is_answered_in_a_line(tmp_path, setting, message):
  workdir = tmp_path / "run"
  binaries.expect_mistake(command(workdir, setting), message, workdir=workdir)

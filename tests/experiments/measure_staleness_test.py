"""The binary as a user runs it: in a process of its own."""

import json

import numpy as np
import pytest

from tests import binaries

pytestmark = pytest.mark.first_class

SMALL = {
    "data.prompt_tokens": 128,
    "model.initializer_range": 0.1,
    "optimizer.learning_rate": 0.003,
    "sampling.max_tokens": 8,
    "train.group_size": 4,
    "train.capture_chunk_tokens": 32,
    "train.response_multiple": 8,
    "train.head_chunk_tokens": 8,
    "refresh.witness_tokens": 32,
}


def command(workdir, *arguments):
  return binaries.command(
      "measure_staleness", *arguments, workdir=workdir, settings=SMALL
  )


@pytest.mark.timeout(300)
def test_it_prints_and_writes_what_it_measured(tmp_path):
  process = binaries.run(command(tmp_path / "run", "--steps=3,1"))
  assert process.returncode == 0, process.stderr
  lines = process.stdout.splitlines()
  assert lines[2].split()[:3] == ["rate", "step", "loss"]
  table = [[float(x) for x in line.split()] for line in lines[3:6]]
  assert [row[:2] for row in table] == [[0.003, 0], [0.003, 1], [0.003, 3]]
  assert "rank correlation to the drift is " in lines[-1]

  written = json.loads((tmp_path / "run" / "staleness.json").read_text())
  assert {"versions", "git", "config", "seed", "rows"} <= written.keys()
  rows = written["rows"]
  for printed, row in zip(table, rows, strict=True):
    np.testing.assert_allclose(
        printed[2:5], list(row.values())[2:5], atol=1e-4, rtol=0.01
    )
  at_first, *later = rows
  assert at_first["drift_nats"] == at_first["estimate_nats"] == 0.0
  assert at_first["loss_percent"] == 0.0
  for row in later:
    assert row["drift_nats"] > 1e-4 and row["loss_percent"] > 0
    assert 0.3 < row["estimate_nats"] / row["drift_nats"] < 3
    assert min(row["estimate_s"], row["capture_s"]) > 0
  picture = (tmp_path / "run" / "staleness.png").read_bytes()
  assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argument,message",
    [
        ("--steps=1,x", "--steps=1,x: want numbers above 0, separated by comm"),
        ("--steps=0", "--steps=0: want numbers above 0"),
        ("--learning_rates=nan", "--learning_rates=nan: want numbers above 0"),
        ("--config.refresh.witness_tokens=0", "refresh.witness_tokens=0: want"),
        ("--config.objective.kl_coef=0.1", "objective.kl_coef=0.1: want 0"),
    ],
)
def test_a_mistake_is_answered_in_a_line(tmp_path, argument, message):
  workdir = tmp_path / "run"
  binaries.expect_mistake(command(workdir, argument), message, workdir=workdir)

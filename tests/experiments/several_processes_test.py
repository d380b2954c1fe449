"""Training in two processes, and how that differs from one: it does not."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from experiments import settings, train_grpo
from experiments.configs import tiny
from experiments.requests import make_requests
from tests import processes

RTOL = 1e-10  # float64; other meshes add up in another order
SMALL = {
    "model.dtype": "float64",
    "model.param_dtype": "float64",
    "model.initializer_range": 0.1,
    "data.prompt_tokens": 60,
    "sampling.max_tokens": 8,
    "train.steps": 3,
    "train.group_size": 4,
    "train.prompt_gradient": "exact",
    "capture.boundary_every": 2,
    "train.prompts_per_step": 2,
    "train.capture_chunk_tokens": 32,
    "train.replay_block_tokens": 8,
    "train.response_multiple": 8,
    "train.head_chunk_tokens": 4,
    # Adam divides rounding by it where a gradient is zero.
    "optimizer.eps": 1e-3,
    "checkpoint.every_steps": 1,
    "checkpoint.export": True,
}
MESH = {"mesh.data": 2, "mesh.context": 2, "mesh.tensor": "auto"}


def train(workdir):
  """Trains in this process, on one device."""
  config = tiny.get_config()
  config.update_from_flattened_dict(SMALL)
  read = settings.read_settings(config)
  requests = make_requests(config, read)
  return train_grpo.train(config, read, requests, workdir=workdir)


def train_in_two_processes(folder):
  """Trains on a mesh of eight devices, four of each process."""
  folder.mkdir()
  (folder / "changes.json").write_text(json.dumps(SMALL | MESH))
  port = str(processes.free_port())
  command = ["tests/distributed_child.py", "train", port]
  commands = [[*command, str(i), str(folder)] for i in (0, 1)]
  with processes.started(commands, output=folder) as children:
    ended = [child.wait(600) for child in children]
  assert ended == [0, 0], processes.printed(folder, ended.index(max(ended)))


def arrays(workdir, step=3):
  """Returns the arrays of a checkpoint, read by orbax alone."""
  path = workdir / "checkpoints" / str(step) / "arrays"
  reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  names = reader.metadata(path).item_metadata.tree
  return reader.restore(
      path, ocp.args.PyTreeRestore(restore_args=dict.fromkeys(names, as_numpy))
  )


def rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def expect_same_arrays(got, wanted):
  assert got.keys() == wanted.keys() and len(wanted) > 50
  for name, value in wanted.items():
    value = np.asarray(value)
    largest = max(np.abs(value).max(), 1e-4)
    np.testing.assert_allclose(
        got[name], value, rtol=0, atol=RTOL * largest, err_msg=name
    )


@pytest.mark.first_class
@pytest.mark.timeout(900)
def test_two_processes_train_as_one_device_does(tmp_path, x64):
  one, two = tmp_path / "one", tmp_path / "two" / "run"
  train_in_two_processes(two.parent)
  train(one)

  expect_same_arrays(arrays(two), arrays(one))
  for got, wanted in zip(rows(two), rows(one), strict=True):
    assert got["step"] == wanted["step"] and wanted["grad_norm"] > 1
    for name in ("loss", "reward_mean", "grad_norm", "entropy_nats"):
      assert got[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-12)
  model = "model/model.safetensors"
  expect_same_arrays(load_file(two / model), load_file(one / model))

  check_that_both_hold_the_same_bits(two.parent)
  check_that_one_process_wrote(two)
  check_that_it_goes_on_on_one_device(two, one)


def check_that_both_hold_the_same_bits(folder):
  held = [
      json.loads((folder / f"held-{index}.json").read_text())
      for index in (0, 1)
  ]
  shared = held[0].keys() & held[1].keys()
  assert len(shared) > 20  # norms are whole everywhere
  for name in shared:
    assert len({*held[0][name], *held[1][name]}) == 1, name
  assert held[0].keys() - shared  # matrices are cut over the processes


def check_that_one_process_wrote(workdir):
  assert [row["step"] for row in rows(workdir)] == [1, 2, 3]
  receipt = json.loads((workdir / "receipt.json").read_text())
  assert receipt["processes"] == 2
  assert sum(receipt["devices"].values()) == 8
  assert receipt["config"]["mesh"]["tensor"] == "auto"
  assert (workdir / "reward.png").exists()
  assert "run folder" in processes.printed(workdir.parent, 0)
  assert "run folder" not in processes.printed(workdir.parent, 1)


def check_that_it_goes_on_on_one_device(workdir, unbroken):
  shutil.rmtree(workdir / "checkpoints" / "3")
  shutil.rmtree(workdir / "model")
  found = train(workdir)
  assert [row["step"] for row in found] == [1, 2, 3]
  expect_same_arrays(arrays(workdir), arrays(unbroken))

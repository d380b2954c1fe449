"""Receipts: true, complete, written whole, and never in the way of a run."""

import json
import math
import os
import pathlib
import re
import subprocess

import jax
import pytest

from lstraw_jax import receipt

FIELDS = {
    "versions",
    "platform",
    "devices",
    "processes",
    "git",
    "config",
    "seed",
    "steps",
    "gradient",
    "staleness_steps",
    "seconds",
    "peak_bytes",
    "peak_source",
    "curve",
}


def write(path, **changes):
  values = dict(
      config={"train": {"steps": 6, "kinds": ("a", "b")}},
      seed=11,
      steps=6,
      prompt_gradient="dropped",
      staleness_steps=0,
      seconds={"capture": 1.0, "replay": 3.0},
      peak_bytes=2**30,
      peak_source="process",
      curve_field="reward_mean",
      curve=[0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
  )
  return receipt.write_receipt(path, **(values | changes))


def git(folder, *arguments):
  subprocess.run(
      ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
      cwd=folder,
      check=True,
      capture_output=True,
  )


def test_the_file_holds_the_documented_fields(tmp_path):
  path = tmp_path / "receipt.json"
  returned = write(path)
  assert json.loads(path.read_text()) == returned
  assert set(returned) == FIELDS
  assert (returned["seed"], returned["steps"]) == (11, 6)
  documented = re.findall(r"^    (\w+) {2,}\S", receipt.__doc__, re.MULTILINE)
  assert set(documented) == FIELDS
  assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


def test_numbers_are_summed_up(tmp_path):
  made = write(tmp_path / "receipt.json")
  assert made["seconds"] == {
      "total": 4.0,
      "phases": {
          "capture": {"seconds": 1.0, "share": 0.25},
          "replay": {"seconds": 3.0, "share": 0.75},
      },
  }
  assert made["curve"] == {
      "field": "reward_mean",
      "updates": 6,
      "first_five": pytest.approx(0.2),
      "last_five": pytest.approx(0.4),
  }
  assert "constant" in made["gradient"]["meaning"]
  exact = write(tmp_path / "receipt.json", prompt_gradient="exact")
  assert "included" in exact["gradient"]["meaning"]


def test_a_run_without_an_update_has_a_receipt(tmp_path):
  made = write(tmp_path / "receipt.json", seconds={}, curve=[], steps=0)
  assert made["curve"]["first_five"] is None
  assert made["seconds"] == {"total": 0, "phases": {}}
  made = write(tmp_path / "receipt.json", seconds={"capture": 0.0})
  assert made["seconds"]["phases"]["capture"]["share"] == 0.0


def test_what_is_not_finite_is_text(tmp_path):
  path = tmp_path / "receipt.json"
  write(path, config={"clip": math.inf, "x": [math.nan]}, curve=[math.nan])
  strict = json.loads(path.read_text(), parse_constant=pytest.fail)
  assert strict["config"] == {"clip": "inf", "x": ["nan"]}
  assert strict["curve"]["last_five"] == "nan"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_gradient": "none"}, "prompt_gradient='none': want one of"),
        ({"steps": -1}, "steps=-1: want a finite number >= 0"),
        ({"staleness_steps": -1}, "staleness_steps=-1"),
        ({"seconds": {"replay": math.nan}}, r"seconds\['replay'\]=nan"),
        ({"seconds": {"replay": math.inf}}, r"seconds\['replay'\]=inf"),
        ({"peak_bytes": -5}, "peak_bytes=-5"),
    ],
)
def test_an_impossible_value_is_refused(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    write(tmp_path / "receipt.json", **changes)
  assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_receipt(tmp_path, monkeypatch):
  path = tmp_path / "receipt.json"
  write(path, seed=1)

  def fail(descriptor):
    raise OSError("disk full")

  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(OSError, match="disk full"):
    write(path, seed=2)
  assert json.loads(path.read_text())["seed"] == 1


def test_the_environment_is_what_it_is(tmp_path):
  made = write(tmp_path / "receipt.json")
  assert made["versions"]["jax"] == jax.__version__
  assert set(made["versions"]) == {"python", *receipt._PACKAGES}
  assert made["platform"] == jax.default_backend()
  assert sum(made["devices"].values()) == jax.device_count()


def test_the_commit_is_that_of_the_sources(tmp_path, monkeypatch):
  source = tmp_path / "package" / "module.py"
  source.parent.mkdir()
  source.write_text("x = 1\n")
  assert receipt._git_state(source) is None
  git(tmp_path, "init")
  git(tmp_path, "commit", "--allow-empty", "-m", "nothing")
  assert receipt._git_state(source) is None  # not a file of the checkout
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-m", "a")
  monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
  state = receipt._git_state(source)
  assert re.fullmatch("[0-9a-f]{40}", state["commit"])
  assert state["dirty"] is False
  (tmp_path / "notes.txt").write_text("not a source")
  assert receipt._git_state(source)["dirty"] is False
  (tmp_path / "new.py").write_text("x = 2\n")
  assert receipt._git_state(source)["dirty"] is True


def test_a_machine_without_git_is_no_error(monkeypatch):
  monkeypatch.setenv("PATH", "")
  assert receipt._git_state(pathlib.Path(receipt.__file__)) is None

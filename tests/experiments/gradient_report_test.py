"""The binary as a user runs it: in a process of its own."""

import json
import re
from unittest import mock

import numpy as np
import pytest

from experiments import gradient_report
from experiments.configs import tiny
from experiments.settings import read_settings
from tests import binaries

pytestmark = pytest.mark.first_class

SMALL = {
    "sampling.max_tokens": 16,
    "train.group_size": 6,  # of two, all rewards may well be 0
    "train.capture_chunk_tokens": 64,
    "train.response_multiple": 16,
    "train.head_chunk_tokens": 8,
    "capture.boundary_every": 2,
}
FIELDS = {
    "family",
    "parameters",
    "cosine",
    "relative_l2",
    "norm_ratio",
    "exact_norm",
    "bfloat16_relative_l2",
}


def command(workdir, *flags, **settings):
  changes = {k.replace("__", "."): v for k, v in settings.items()}
  return binaries.command(
      "gradient_report", *flags, workdir=workdir, settings=SMALL | changes
  )


def run(workdir, *flags, **settings):
  return binaries.run(command(workdir, *flags, **settings))


def write_groups(path, rewards=(0.0, 1.0)):
  group = {
      "group_id": "mine",
      "prompt_tokens": list(range(20)),
      "responses": [
          {"tokens": [4, 5 + i, 6], "reward": reward}
          for i, reward in enumerate(rewards)
      ],
  }
  path.write_text(json.dumps(group) + "\n")
  return path


def read(workdir):
  text = (workdir / "gradient_report.json").read_text()
  return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.timeout(600)
def test_each_length_has_a_report(tmp_path):
  ended = run(
      tmp_path,
      "--prompt_tokens=150,200",
      lora__rank=2,
      objective__kl_coef=0.1,
  )
  assert ended.returncode == 0, ended.stderr
  assert "150 tokens, text-0" in ended.stdout
  assert "does not use: optimizer, checkpoint" in ended.stdout
  assert "\x1b" not in ended.stdout, "control characters in a file"
  assert (tmp_path / "gradient_report.png").read_bytes().startswith(b"\x89PNG")

  found = read(tmp_path)
  assert found["seed"] == 0 and found["config"]["train"]["group_size"] == 6
  assert found["versions"]["jax"] and "git" in found
  assert [r["prompt_tokens"] for r in found["reports"]] == [[150], [200]]
  for report in found["reports"]:
    assert report["seconds"].keys() == {
        "capture",
        "respond",
        "score",
        "compare",
    }
    assert len(report["rewards"][0]) == 6
    check_rows(report["families"], ended.stdout)


def check_rows(families, table):
  assert all(row.keys() == FIELDS for row in families)
  rows = {row["family"]: row for row in families}
  # Of the last layer, keys reach the loss through the state, queries do not.
  assert rows["q B"]["relative_l2"] == 0 < rows["k B"]["relative_l2"]
  # B is zero at first, and so is the gradient of A.
  assert rows["q A"]["cosine"] is None and rows["q A"]["exact_norm"] == 0
  assert 1e-5 < rows["all"]["bfloat16_relative_l2"] < 1e-2
  for value in (
      f"{rows['k B']['cosine']:.4f}",
      f"{rows['all']['exact_norm']:.2e}",
  ):
    assert value in table


@pytest.mark.timeout(600)
def test_equal_rewards_are_refused(tmp_path):
  ended = run(
      tmp_path / "run",
      data__rollouts=write_groups(tmp_path / "groups.jsonl", (0.5, 0.5)),
  )
  assert ended.returncode == 1
  assert ended.stderr.startswith("error: groups ['mine'] of [20] prompt tokens")
  assert "Take another seed" in ended.stderr
  assert not (tmp_path / "run").exists()


@pytest.fixture
def lengths(monkeypatch):
  """Returns what gives the lengths of the turns, from the text of the flag."""

  def parse(text, **data):
    config = tiny.get_config()
    config.data.update(data)
    given = None if text is None else text.split(",") if text else []
    monkeypatch.setattr(
        gradient_report, "_PROMPT_TOKENS", mock.Mock(value=given)
    )
    turns = gradient_report._turns(config, read_settings(config))
    return [request.prompts[0].size for request, _ in turns]

  return parse


def test_lengths_are_those_of_the_flag_or_of_the_config(lengths):
  assert lengths("24,8,4096") == [24, 8, 4096]
  assert lengths(None) == [4096]
  assert lengths(None, prompt_tokens=50) == [50]


@pytest.mark.parametrize("text", ["abc", "8,1.5", "0", "1", "-8", "", "8,9,8"])
def test_other_lengths_are_refused(lengths, text):
  message = f"--prompt_tokens={text}: want different integers >= 2"
  with pytest.raises(ValueError, match=re.escape(message)):
    lengths(text)


def test_a_file_and_lengths_are_refused(lengths):
  with pytest.raises(ValueError, match=r"--prompt_tokens=8: .*'x.jsonl' have"):
    lengths("8", rollouts="x.jsonl")
  with pytest.raises(ValueError, match="prompt_tokens=99999999: want 1"):
    lengths("8,99999999")


@pytest.mark.parametrize("data", [1, 2])
def test_prompts_of_an_update_are_numbered_as_in_training(monkeypatch, data):
  monkeypatch.setattr(gradient_report, "_PROMPT_TOKENS", mock.Mock(value=None))
  config = tiny.get_config()
  config.mesh.data = data
  config.train.prompts_per_step = 4
  turns = gradient_report._turns(config, read_settings(config))
  assert [len(request.prompts) for request, _ in turns] == [data] * (4 // data)
  np.testing.assert_array_equal(
      np.concatenate([indices for _, indices in turns]), np.arange(4)
  )


@pytest.mark.parametrize("flag", ["--prompt_tokens=abc", "--prompt_tokens="])
def test_a_mistake_is_answered_in_a_line(tmp_path, flag):
  workdir, message = tmp_path / "run", f"{flag}: want different integers"
  binaries.expect_mistake(command(workdir, flag), message, workdir=workdir)

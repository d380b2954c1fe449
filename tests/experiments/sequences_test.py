"""The sequences of each step, by position in the data."""

import json

import numpy as np
import pytest

from experiments.configs import sft
from experiments.sequences import make_sequences
from experiments.sft_settings import read_sft_settings


def make(*, path="", data=1, count=4):
  config = sft.get_config()
  config.data.sequences = path
  config.mesh.data = data
  config.train.prompts_per_step = count
  return make_sequences(config, read_sft_settings(config))


def write(path):
  lines = [{"tokens": [1, 2, 3 + i], "loss_mask": [0, 0, 1]} for i in range(8)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def tokens(step):
  return [sequence.tokens.tolist() for turn in step for sequence in turn]


@pytest.mark.parametrize("source", ["text", "file"])
def test_the_data_is_the_same_on_every_mesh(tmp_path, source):
  path = write(tmp_path / "x.jsonl") if source == "file" else ""
  one, two = (make(path=path, data=data) for data in (1, 2))
  assert [len(turn) for turn in one(4)] == [1, 1, 1, 1]
  assert [len(turn) for turn in two(4)] == [2, 2]
  assert tokens(one(4)) == tokens(two(4)) != tokens(one(0))
  assert tokens(one(4)) == tokens(make(path=path, count=2)(4)) + tokens(
      make(path=path, count=2)(6)
  )


def test_a_file_is_seen_once_before_any_of_it_is_seen_again(tmp_path):
  sequences = make(path=write(tmp_path / "x.jsonl"))
  seen = tokens(sequences(0)) + tokens(sequences(4))
  assert sorted(seen) == [[1, 2, 3 + i] for i in range(8)]
  (first, *_), *_ = sequences(8)
  assert first.loss_mask.tolist() == [False, False, True]


def test_text_carries_loss_on_all_but_its_first_byte():
  (window,), *_ = make()(0)
  assert window.tokens.size == 1024 and window.tokens.dtype == np.int32
  assert not window.loss_mask[0] and window.loss_mask[1:].all()

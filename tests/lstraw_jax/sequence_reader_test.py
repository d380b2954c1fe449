"""Reading sequences, and refusing every bad one by name."""

import json
import re

import numpy as np
import pytest

from lstraw_jax.sequence_reader import read_sequences

LIMITS = {"vocab_size": 100, "max_prompt_tokens": 4}


def write(folder, *records):
  path = folder / "sequences.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def read(path, **limits):
  return read_sequences(path, **(LIMITS | limits))


BAD = {
    "not_an_object": ([1, 2], "line"),
    "unknown_key": ({"tokens": [1, 2], "los_mask": [0, 1]}, "los_mask"),
    "no_tokens": ({"loss_mask": [0, 1]}, "tokens"),
    "both": ({"tokens": [1, 2], "tokens_file": "x.npy"}, "tokens"),
    "no_file": ({"tokens_file": "nope.npy"}, "tokens_file"),
    "one_token": ({"tokens": [1]}, "tokens"),
    "too_long": ({"tokens": [1] * 5}, "tokens"),
    "id_is_the_vocab": ({"tokens": [1, 100]}, "tokens[1]"),
    "id_is_negative": ({"tokens": [-1, 1]}, "tokens[0]"),
    "id_is_a_float": ({"tokens": [1, 2.0]}, "tokens[1]"),
    "mask_is_short": ({"tokens": [1, 2], "loss_mask": [1]}, "loss_mask"),
    "mask_is_zero": ({"tokens": [1, 2], "loss_mask": [0, 0]}, "loss_mask"),
    "mask_is_two": ({"tokens": [1, 2], "loss_mask": [0, 2]}, "loss_mask[1]"),
    "mask_on_the_first": (
        {"tokens": [1, 2], "loss_mask": [1, 1]},
        "loss_mask[0]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_sequence_is_refused_by_file_line_and_field(tmp_path, case):
  record, field = BAD[case]
  path = write(tmp_path, {"tokens": [1, 2]}, record)
  with pytest.raises(ValueError) as caught:
    read(path)
  message = str(caught.value)
  assert message.startswith(f"{path}:2: {field}=")
  assert re.search(r"got .+, wanted .+\. Fix: .+", message)


@pytest.mark.parametrize(
    "record,reason",
    [
        ({"tokens": [1, 2], "loss_mask": [1, 1]}, "nothing predicts the first"),
        ({"tokens": [1, 2], "los_mask": [0, 1]}, "did you mean 'loss_mask'?"),
        ({"tokens": [1]}, "got 1 tokens, wanted 2 to max_prompt_tokens=4"),
    ],
)
def test_a_refusal_says_why(tmp_path, record, reason):
  with pytest.raises(ValueError, match=re.escape(reason)):
    read(write(tmp_path, record))


def test_a_file_without_sequences_is_refused(tmp_path):
  with pytest.raises(ValueError, match="a file without sequences"):
    read(write(tmp_path))


@pytest.mark.parametrize(
    "name,least", [("vocab_size", 1), ("max_prompt_tokens", 2)]
)
def test_limits_that_allow_nothing_are_refused(tmp_path, name, least):
  path = write(tmp_path, {"tokens": [1, 2]})
  with pytest.raises(ValueError, match=f"{name}={least - 1}: .* >= {least}"):
    read(path, **{name: least - 1})


def test_a_file_round_trips(tmp_path):
  np.save(tmp_path / "x.npy", np.arange(4, dtype=np.uint16))
  path = write(
      tmp_path,
      {"tokens": [5, 6, 7], "loss_mask": [0, False, True]},
      {"tokens_file": "x.npy"},
  )
  first, second = read(path)
  assert first.tokens.tolist() == [5, 6, 7]
  assert first.loss_mask.tolist() == [False, False, True]
  assert second.tokens.tolist() == [0, 1, 2, 3]
  assert second.loss_mask.tolist() == [False, True, True, True]
  assert {x.tokens.dtype for x in (first, second)} == {np.dtype(np.int32)}
  assert {x.loss_mask.dtype for x in (first, second)} == {np.dtype(bool)}

"""Reading groups of responses, and refusing every bad one by name."""

import json
import re

import numpy as np
import pytest

from lstraw_jax.rollout_reader import read_rollout_groups

LIMITS = {"vocab_size": 100, "max_prompt_tokens": 8, "max_response_tokens": 4}


def response(**changes):
  """A good response; a change to None removes the key."""
  record = {
      "tokens": [3, 4],
      "reward": 0.5,
      "log_probs": [-0.1, -2],
      "loss_mask": [1, 0],
  }
  return without_none(record | changes)


def group(**changes):
  """A good group; a change to None removes the key."""
  record = {
      "group_id": "a",
      "prompt_tokens": [1, 2],
      "responses": [response(), response(tokens=[5, 6], reward=1)],
  }
  return without_none(record | changes)


def without_none(record):
  return {key: value for key, value in record.items() if value is not None}


def with_response(**changes):
  """A group whose second response is bad."""
  return group(responses=[response(), response(**changes)])


def write(folder, *lines):
  """Writes a file of lines: objects, or text as it is."""
  path = folder / "groups.jsonl"
  path.write_text(
      "".join(
          (line if isinstance(line, str) else json.dumps(line)) + "\n"
          for line in lines
      )
  )
  return path


def read(path, **limits):
  return read_rollout_groups(path, **(LIMITS | limits))


def refusal(path):
  """Returns the message with which the file is refused."""
  with pytest.raises(ValueError) as caught:
    read(path)
  return str(caught.value)


NAN, INF = float("nan"), float("inf")
BAD_GROUPS = {
    "not_json": ("{nope", "line"),
    "not_utf8": ('"\udcff"', "line"),
    "too_deep": ("[" * 100_000, "line"),
    "not_an_object": ([1, 2], "line"),
    "repeated_key": ('{"group_id": "a", "group_id": "b"}', "group_id"),
    "unknown_key": (group(promt_tokens=[1]), "promt_tokens"),
    "no_group_id": (group(group_id=None), "group_id"),
    "group_id_is_a_number": (group(group_id=7), "group_id"),
    "group_id_is_empty": (group(group_id=""), "group_id"),
    "no_prompt": (group(prompt_tokens=None), "prompt_tokens"),
    "two_prompts": (group(prompt_file="x.npy"), "prompt_tokens"),
    "prompt_is_no_list": (group(prompt_tokens="12"), "prompt_tokens"),
    "prompt_is_empty": (group(prompt_tokens=[]), "prompt_tokens"),
    "prompt_is_nested": (group(prompt_tokens=[[1]]), "prompt_tokens[0]"),
    "prompt_is_too_long": (group(prompt_tokens=[1] * 9), "prompt_tokens"),
    "prompt_id_is_a_bool": (group(prompt_tokens=[1, True]), "prompt_tokens[1]"),
    "prompt_id_is_a_float": (group(prompt_tokens=[1, 2.0]), "prompt_tokens[1]"),
    "prompt_id_is_negative": (group(prompt_tokens=[1, -1]), "prompt_tokens[1]"),
    "prompt_id_is_the_vocab": (
        group(prompt_tokens=[100, 1]),
        "prompt_tokens[0]",
    ),
    "prompt_id_is_huge": (group(prompt_tokens=[10**30]), "prompt_tokens[0]"),
    "no_responses": (group(responses=None), "responses"),
    "responses_is_no_list": (group(responses={}), "responses"),
    "group_of_one": (group(responses=[response()]), "responses"),
    "response_is_no_object": (
        group(responses=[response(), 1]),
        "responses[1]",
    ),
}
BAD_RESPONSES = {
    "unknown_key": ({"rewrad": 1.0}, "rewrad"),
    "no_tokens": ({"tokens": None}, "tokens"),
    "no_token": ({"tokens": [], "log_probs": [], "loss_mask": []}, "tokens"),
    "too_long": ({"tokens": [1] * 5}, "tokens"),
    "id_is_a_bool": ({"tokens": [True, 1]}, "tokens[0]"),
    "id_is_a_float": ({"tokens": [1, 1.5]}, "tokens[1]"),
    "id_is_null": ({"tokens": [1, None]}, "tokens[1]"),
    "id_is_out_of_range": ({"tokens": [1, 100]}, "tokens[1]"),
    "no_reward": ({"reward": None}, "reward"),
    "reward_is_nan": ({"reward": NAN}, "reward"),
    "reward_is_infinite": ({"reward": -INF}, "reward"),
    "reward_is_huge": ({"reward": 10**400}, "reward"),
    "reward_is_text": ({"reward": "1"}, "reward"),
    "reward_is_a_bool": ({"reward": True}, "reward"),
    "log_probs_are_short": ({"log_probs": [-1.0]}, "log_probs"),
    "log_probs_are_no_list": ({"log_probs": -1.0}, "log_probs"),
    "log_prob_is_text": ({"log_probs": [-1.0, "x"]}, "log_probs[1]"),
    "log_prob_is_a_bool": ({"log_probs": [False, 0]}, "log_probs[0]"),
    "log_prob_is_nan": ({"log_probs": [-1.0, NAN]}, "log_probs[1]"),
    "log_prob_is_infinite": ({"log_probs": [-INF, -1]}, "log_probs[0]"),
    "log_prob_is_positive": ({"log_probs": [-1, 1e-3]}, "log_probs[1]"),
    "log_probs_are_mixed": ({"log_probs": None}, "log_probs"),
    "loss_mask_is_long": ({"loss_mask": [1, 1, 1]}, "loss_mask"),
    "loss_mask_is_zero": ({"loss_mask": [0, False]}, "loss_mask"),
    "loss_mask_is_two": ({"loss_mask": [1, 2]}, "loss_mask[1]"),
    "loss_mask_is_a_float": ({"loss_mask": [1.0, 1]}, "loss_mask[0]"),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_bad_group_is_refused_by_file_line_and_field(tmp_path, case):
  record, field = BAD_GROUPS[case]
  path = tmp_path / "groups.jsonl"
  text = record if isinstance(record, str) else json.dumps(record)
  good = json.dumps(group(group_id="good"))
  path.write_text(f"{good}\n{text}\n", errors="surrogateescape")
  message = refusal(path)
  assert message.startswith(f"{path}:2: {field}=")
  assert re.search(r"got .+, wanted .+\. Fix: .+", message)


@pytest.mark.parametrize("case", BAD_RESPONSES)
def test_a_bad_response_is_refused_by_file_line_and_field(tmp_path, case):
  changes, field = BAD_RESPONSES[case]
  record = with_response(**changes)
  if case == "id_is_null":
    record["responses"][1]["tokens"] = [1, None]
  path = write(tmp_path, group(group_id="good"), record)
  message = refusal(path)
  assert message.startswith(f"{path}:2: responses[1].{field}=")
  assert re.search(r"got .+, wanted .+\. Fix: .+", message)


@pytest.mark.parametrize(
    "array",
    [
        np.ones((2, 2), np.int32),
        np.ones(3, np.float32),
        np.ones(3, bool),
        np.array([1, 100]),
        np.array([-1, 1]),
        np.ones(9, np.int64),
        np.ones(0, np.int32),
        np.array(["a"]),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_a_bad_prompt_file_is_refused_by_file_line_and_field(tmp_path, array):
  np.save(tmp_path / "x.npy", array)
  path = write(tmp_path, group(prompt_tokens=None, prompt_file="x.npy"))
  assert refusal(path).startswith(f"{path}:1: prompt_file")


@pytest.mark.parametrize("contents", [None, b"", b"text", b"\x93NUMPY\x01\x00"])
def test_an_unreadable_prompt_file_is_refused(tmp_path, contents):
  if contents is not None:
    (tmp_path / "x.npy").write_bytes(contents)
  path = write(tmp_path, group(prompt_tokens=None, prompt_file="x.npy"))
  assert refusal(path).startswith(f"{path}:1: prompt_file='x.npy'")


def test_a_truncated_prompt_file_is_refused(tmp_path):
  np.save(tmp_path / "x.npy", np.ones(8, np.int32))
  whole = (tmp_path / "x.npy").read_bytes()
  (tmp_path / "x.npy").write_bytes(whole[:-4])
  path = write(tmp_path, group(prompt_tokens=None, prompt_file="x.npy"))
  assert refusal(path).startswith(f"{path}:1: prompt_file='x.npy'")


def test_a_prompt_file_that_is_no_name_is_refused(tmp_path):
  path = write(tmp_path, group(prompt_tokens=None, prompt_file=3))
  assert refusal(path).startswith(f"{path}:1: prompt_file=3")


def test_a_repeated_group_id_is_refused(tmp_path):
  path = write(tmp_path, group(), "", group())
  assert refusal(path).startswith(f"{path}:3: group_id='a'")


@pytest.mark.parametrize("lines,number", [([], 1), (["", "  "], 2)])
def test_a_file_without_groups_is_refused(tmp_path, lines, number):
  path = write(tmp_path, *lines)
  assert refusal(path).startswith(f"{path}:{number}: line=")


def test_a_misspelt_key_is_answered_with_a_suggestion(tmp_path):
  path = write(tmp_path, with_response(rewrad=1.0))
  assert "did you mean 'reward'?" in refusal(path)


def test_a_length_refusal_names_the_limit_to_change(tmp_path):
  path = write(tmp_path, group(prompt_tokens=[1] * 9))
  assert "max_prompt_tokens=8" in refusal(path)
  assert read(path, max_prompt_tokens=9)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_below_one_are_refused(tmp_path, name):
  with pytest.raises(ValueError, match=f"{name}=0"):
    read(write(tmp_path, group()), **{name: 0})


def test_a_file_round_trips(tmp_path):
  np.save(tmp_path / "x.npy", np.arange(8, dtype=np.uint16))
  bare = [
      response(tokens=[9], log_probs=None, loss_mask=None),
      response(tokens=[7, 8, 9], log_probs=None, loss_mask=[0, True, 1]),
  ]
  path = write(
      tmp_path,
      group(),
      group(
          group_id="b", prompt_tokens=None, prompt_file="x.npy", responses=bare
      ),
  )
  first, second = read(path)
  assert (first.group_id, second.group_id) == ("a", "b")
  assert first.prompt_tokens.tolist() == [1, 2]
  assert second.prompt_tokens.tolist() == list(range(8))
  one = first.rollouts[0]
  assert one.tokens.tolist() == [3, 4] and one.reward == 0.5
  assert one.loss_mask.tolist() == [True, False]
  np.testing.assert_array_equal(one.log_probs, np.float32([-0.1, -2]))
  assert [r.log_probs for r in second.rollouts] == [None, None]
  assert [r.loss_mask.tolist() for r in second.rollouts] == [
      [True],
      [False, True, True],
  ]
  for array, dtype in [
      (first.prompt_tokens, np.int32),
      (second.prompt_tokens, np.int32),
      (one.tokens, np.int32),
      (one.log_probs, np.float32),
      (one.loss_mask, np.bool_),
  ]:
    assert array.dtype == dtype


def test_a_prompt_outlives_changes_of_its_file(tmp_path):
  np.save(tmp_path / "x.npy", np.zeros(4, np.int32))
  path = write(tmp_path, group(prompt_tokens=None, prompt_file="x.npy"))
  (read_group,) = read(path)
  np.save(tmp_path / "x.npy", np.ones(4, np.int32))
  assert not read_group.prompt_tokens.any()

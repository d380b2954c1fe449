"""The prompts of each step, by position in the data."""

import json

import numpy as np
import pytest

from experiments.configs import tiny
from experiments.requests import make_requests
from experiments.settings import read_settings


def write_groups(path, names):
  groups = [
      {
          "group_id": name,
          "prompt_tokens": [1, 2, 3 + index],
          "responses": [
              {"tokens": [4, 5], "reward": 0.0},
              {"tokens": [6], "reward": 1.0},
          ],
      }
      for index, name in enumerate(names)
  ]
  path.write_text("".join(json.dumps(group) + "\n" for group in groups))
  return str(path)


def make(config, *, data, prompts):
  config.mesh.data = data
  config.train.prompts_per_step = prompts
  return make_requests(config, read_settings(config))


@pytest.mark.parametrize("data", [1, 2])
def test_rollouts_from_a_file_take_the_place_of_sampling(tmp_path, data):
  changed = tiny.get_config()
  changed.data.rollouts = write_groups(tmp_path / "groups.jsonl", "ab")
  requests = make(changed, data=data, prompts=2)
  for position in (0, 2, 100):
    found = []
    for prompts, respond in requests(position):
      assert len(prompts) == data
      for prompt, group in zip(prompts, respond(None, None, None), strict=True):
        assert group.prompt_tokens is prompt
        found.append(group.group_id)
    assert sorted(found) == ["a", "b"]


def test_the_data_is_the_same_on_every_mesh(tmp_path):
  changed = tiny.get_config()
  for path in ("", write_groups(tmp_path / "groups.jsonl", "abcdefgh")):
    changed.data.rollouts = path
    one, two = (make(changed, data=data, prompts=4) for data in (1, 2))
    flat = lambda step: [prompt for request in step for prompt in request[0]]
    assert [len(one(4)), len(two(4))] == [4, 2]
    np.testing.assert_array_equal(flat(one(4)), flat(two(4)))
    np.testing.assert_array_equal(
        flat(one(4)), flat(one(2))[2:] + flat(one(6))[:2]
    )

"""The prompts of each step, by position in the data."""

import json

from experiments.configs import tiny
from experiments.requests import make_requests
from experiments.settings import read_settings


def test_rollouts_from_a_file_take_the_place_of_sampling(tmp_path):
  groups = [
      {
          "group_id": name,
          "prompt_tokens": [1, 2, 3],
          "responses": [
              {"tokens": [4, 5], "reward": 0.0},
              {"tokens": [6], "reward": 1.0},
          ],
      }
      for name in "ab"
  ]
  path = tmp_path / "groups.jsonl"
  path.write_text("".join(json.dumps(group) + "\n" for group in groups))
  changed = tiny.get_config()
  changed.data.rollouts = str(path)
  changed.train.prompts_per_step = 2
  requests = make_requests(changed, read_settings(changed))
  for position in (0, 2, 100):
    step = [respond(None, None, None) for _, respond in requests(position)]
    assert {group.group_id for group in step} == {"a", "b"}

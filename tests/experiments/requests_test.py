"""The prompts of each step, by position in the data."""

import json

import jax
import numpy as np
import pytest

from experiments.configs import tiny, tiny_glm
from experiments.requests import make_requests
from experiments.settings import read_settings
from modeling.presets import preset
from tests.random_model import random_model


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


@pytest.mark.first_class
def test_what_the_model_chose_is_read_from_files(tmp_path):
  """The prompt is as long as a choice: every token has as many entries."""
  model = random_model(preset("tiny-glm").replace(dtype="float32"))
  count, responses = model.config.index_topk, [4, 6]
  tokens = np.arange(count + max(responses), dtype=np.int32)[None]
  run = jax.jit(
      lambda model, tokens: model(
          tokens, positions_BT=tokens, prefixes=(), recurrent=None
      )[1].record
  )
  record = jax.device_get(run(model, jax.numpy.asarray(tokens)))
  line = {"group_id": "a", "prompt_tokens": tokens[0, :count].tolist()}
  line["responses"] = []
  for length in responses:
    fed = slice(count - 1, count - 1 + length)
    response = {"tokens": tokens[0, count : count + length].tolist()}
    for name, chosen in record._asdict().items():
      file = f"{name}-{length}.npy"
      np.save(tmp_path / file, np.moveaxis(chosen[:, 0, fed], 1, 0))
      response |= {f"{name}_file": file, "reward": float(length)}
    line["responses"].append(response)
  path = tmp_path / "groups.jsonl"
  path.write_text(json.dumps(line))

  config = tiny_glm.get_config()
  config.data.rollouts = str(path)
  ((prompts, respond),) = make(config, data=1, prompts=1)(0)
  assert len(prompts) == 1
  (group,) = respond(None, None, None)
  for rollout, length in zip(group.rollouts, responses, strict=True):
    fed = slice(count - 1, count - 1 + length)
    for name, chosen in record._asdict().items():
      np.testing.assert_array_equal(
          getattr(rollout.record, name), np.moveaxis(chosen[:, 0, fed], 1, 0)
      )

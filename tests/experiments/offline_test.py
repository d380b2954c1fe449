"""Training a user's model on a user's responses, from files to a checkpoint."""

import json

import numpy as np
import pytest

from experiments import settings, train_grpo
from experiments.configs import tiny
from experiments.requests import make_requests
from modeling.checkpoints import load_model, save_model
from modeling.presets import preset
from tests.random_model import random_model


def write_rollouts(path):
  """Two groups; one response has a token that a tool wrote."""
  rng = np.random.default_rng(0)
  prompts = {"a": rng.integers(0, 256, 90), "b": rng.integers(0, 256, 41)}
  np.save(path.with_name("b.npy"), prompts["b"].astype(np.uint16))
  with path.open("w") as file:
    for name in prompts:
      prompt = {"prompt_tokens": prompts["a"].tolist()}
      if name == "b":
        prompt = {"prompt_file": "b.npy"}
      responses = [
          {
              "tokens": rng.integers(0, 256, count).tolist(),
              "reward": reward,
              "log_probs": [-5.5] * count,
              "loss_mask": [1] * (count - 1) + [int(reward)],
          }
          for count, reward in ((3, 1.0), (9, 0.0))
      ]
      group = {"group_id": name, **prompt, "responses": responses}
      file.write(json.dumps(group) + "\n")


def offline_config(folder, **changes):
  config = tiny.get_config()
  config.model.checkpoint = str(folder / "model")
  config.model.dtype = config.model.param_dtype = "float32"
  config.lora.rank = 2
  config.data.rollouts = str(folder / "groups.jsonl")
  config.train.steps = 3
  config.train.prompts_per_step = 2
  config.train.capture_chunk_tokens = 32
  config.train.replay_block_tokens = 8
  config.train.response_multiple = 8
  config.train.old_log_probs = "rollouts"
  config.checkpoint.export = True
  config.update_from_flattened_dict(changes)
  return config


@pytest.mark.first_class
def test_adapters_train_on_rollouts_from_a_file(tmp_path):
  save_model(random_model(preset("tiny"), seed=0), tmp_path / "model")
  write_rollouts(tmp_path / "groups.jsonl")
  config = offline_config(tmp_path)
  read = settings.read_settings(config)
  requests = make_requests(config, read)
  rows = train_grpo.train(config, read, requests, workdir=tmp_path / "run")

  assert [row["step"] for row in rows] == [1, 2, 3]
  for row in rows:
    assert row["reward_mean"] == 0.5
    assert row["prompt_tokens"] == 90 + 41
    assert row["response_tokens"] == 2 * (3 + 9)
    assert row["denominator"] == 4
    # The file's log-probs are not this model's: the ratio is no longer 1.
    assert abs(row["ratio_mean"] - 1) > 0.05
    assert row["sampler_gap_nats"] > 0.05
  assert rows[-1]["loss"] < rows[0]["loss"]

  trained, _ = load_model(tmp_path / "run" / "model", config=preset("tiny"))
  before = random_model(preset("tiny"), seed=0)
  q_proj, head = (
      lambda model: np.asarray(model.blocks.full_layer.self_attn.q_proj.kernel),
      lambda model: np.asarray(model.lm_head.kernel),
  )
  assert (q_proj(trained) != q_proj(before)).any()  # its adapter is merged in
  np.testing.assert_array_equal(head(trained), head(before))

  other = offline_config(tmp_path, **{"model.checkpoint": str(tmp_path / "2")})
  save_model(random_model(preset("tiny"), seed=1), tmp_path / "2")
  with pytest.raises(ValueError, match=r"model\.checkpoint: checkpoint"):
    train_grpo.train(other, read, requests, workdir=tmp_path / "run")


def test_stored_log_probs_are_asked_for_where_there_are_none(tmp_path):
  save_model(random_model(preset("tiny"), seed=0), tmp_path / "model")
  path = tmp_path / "groups.jsonl"
  responses = [{"tokens": [1], "reward": reward} for reward in (0, 1)]
  group = {"group_id": "a", "prompt_tokens": [1, 2], "responses": responses}
  path.write_text(json.dumps(group) + "\n")
  config = offline_config(tmp_path)
  read = settings.read_settings(config)
  with pytest.raises(
      ValueError, match=r"groups\.jsonl: group_id='a' has no log_probs"
  ):
    make_requests(config, read)

"""From settings to the library's types: what is taken over, what is refused."""

import jax
import numpy as np
import pytest

from experiments import settings
from experiments.configs import base, tiny
from lstraw_jax.policy import make_policy
from modeling.checkpoints import save_model
from modeling.presets import preset
from modeling.qwen3_5_config import LoraConfig
from tests.random_model import random_model


def config(**changes):
  """The tiny settings; `a__b` stands for the setting a.b."""
  tree = tiny.get_config()
  tree.update_from_flattened_dict(
      {name.replace("__", "."): value for name, value in changes.items()}
  )
  return tree


@pytest.mark.parametrize(
    "change,message",
    [
        ({"train__steps": 0}, "train.steps=0"),
        ({"train__prompts_per_step": 0}, "train.prompts_per_step=0"),
        ({"train__group_size": 1}, "train.group_size=1"),
        ({"train__prompt_gradient": "exakt"}, "prompt_gradient='exakt'"),
        ({"train__old_log_probs": "new"}, "old_log_probs='new'"),
        ({"train__capture_chunk_tokens": 0}, "capture_chunk_tokens=0"),
        ({"train__replay_block_tokens": 0}, "block_tokens=0"),
        ({"sampling__top_p": 0.9}, "would bias every ratio"),
        ({"sampling__temperature": 0.0}, "temperature=0"),
        ({"sampling__stop_tokens": (3, 256)}, "want ids in 0..255"),
        ({"objective__kl_estimator": "k2"}, "kl_estimator='k2'"),
        ({"optimizer__learning_rate": -1.0}, "learning_rate=-1"),
        ({"model__preset": "tinny"}, "did you mean 'tiny'"),
        ({"model__dtype": "int8"}, "dtype='int8'"),
        ({"model__param_dtype": "bfloat16"}, "would lose small updates"),
        ({"model__checkpoint": "/nope"}, "/nope"),
        ({"lora__rank": 4, "lora__targets": ("q",)}, "lora.targets="),
    ],
)
def test_a_bad_setting_is_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    settings.read_settings(config(**change))


def test_stop_tokens_may_be_a_list():
  read = settings.read_settings(config(sampling__stop_tokens=[3, 5]))
  assert read.sampling.stop_tokens == (3, 5)


def test_an_unknown_setting_is_refused():
  with pytest.raises(AttributeError, match="Did you mean"):
    base.get_config().train.stepz = 3


def test_a_rank_trains_adapters_alone():
  changed = config(lora__rank=2, lora__targets=("q_proj",))
  model = settings.read_settings(changed).model
  policy = settings.load_policy(changed, model)
  assert len(jax.tree.leaves(policy.trainable)) == 2
  assert len(jax.tree.leaves(policy.frozen)) > 20


def test_the_seed_draws_the_weights():
  model = settings.read_settings(config()).model
  first, other = (
      settings.load_policy(config(seed=seed), model) for seed in (0, 1)
  )
  assert (first.model.embed_tokens[...] != other.model.embed_tokens[...]).any()


def test_a_checkpoint_takes_the_place_of_the_preset(tmp_path):
  model = random_model(preset("tiny"), seed=3)
  save_model(model, tmp_path / "model")
  changed = config(
      model__checkpoint=str(tmp_path / "model"),
      model__dtype="float32",
      model__param_dtype="float32",
  )
  read = settings.read_settings(changed)
  policy = settings.load_policy(changed, read.model)
  jax.tree.map(np.testing.assert_array_equal, policy, make_policy(model))


def test_default_lora_targets_are_the_library_s():
  assert base.get_config().lora.targets == LoraConfig(rank=1, alpha=1).targets

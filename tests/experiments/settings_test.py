"""From settings to the library's types: what is taken over, what is refused."""

import sys

import jax
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from experiments import settings
from experiments.configs import base, tiny
from experiments.run_settings import load_policy
from lstraw_jax.policy import make_policy
from modeling.checkpoints import save_model
from modeling.presets import preset
from tests import binaries
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
        ({"refresh__rule": "often"}, "refresh.rule='often'"),
        ({"refresh__limit_nats": 0.0}, "refresh.limit_nats=0.0"),
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
        (
            {
                "model__preset": "tiny-glm",
                "lora__rank": 4,
                "lora__targets": ("q_proj",),
            },
            r"lora.targets=\('q_proj',\): want some of \('q_a_proj', ",
        ),
        (
            {"model__preset": "tiny-glm", "mesh__tensor": 2},
            "mesh.tensor=2: want 1, since all heads of a layer",
        ),
        ({"sampling__record": ("experts",)}, "sampling.record=.* want ()"),
        (
            {"model__preset": "tiny-glm", "sampling__record": ("expert",)},
            "record=.'expert',.: want some of selections, experts",
        ),
        ({"model__latent_norm_eps": 1e-5}, "latent_norm_eps=1e-05: leave it"),
        ({"mesh__data": 0}, "mesh.data=0: want an integer >= 1, or 'auto'"),
        ({"mesh__data": "all"}, "mesh.data='all'"),
        ({"mesh__context": 16}, "is 16 devices, but there are 8"),
        ({"mesh__tensor": 4}, "mesh.tensor=4: want a divisor of 2"),
        ({"mesh__context": 3}, "axis 'embed' of 64 does not divide over 3"),
        (
            {"mesh__context": 8, "train__capture_chunk_tokens": 12},
            "capture_chunk_tokens=12 over mesh.context=8 is 1.5 tokens a"
            " device: want a multiple of 8, as 16",
        ),
        (
            {"mesh__context": 4, "train__replay_block_tokens": 1},
            "replay_block_tokens=1 .* is 0.25 tokens a device: .* as 4",
        ),
        (
            {"mesh__data": 2, "train__prompts_per_step": 3},
            "prompts_per_step=3: want a multiple of mesh.data=2",
        ),
        ({"state__memory_kind": "disk"}, "memory_kind='disk': want"),
    ],
)
def test_a_bad_setting_is_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    settings.read_settings(config(**change))


def test_a_mesh_is_made_of_numbers_or_of_all_devices():
  changed = config(mesh__context=2, mesh__tensor="auto")
  changed.model.preset = "qwen3.5-4b"  # of shapes alone: nothing is allocated
  changed.model.param_dtype = "float32"
  assert settings.read_settings(changed).mesh.shape == {
      "data": 1,
      "context": 2,
      "tensor": 4,
  }
  assert settings.read_settings(config()).mesh.size == 1


def test_the_memory_of_prompt_states_is_taken_over():
  read = settings.read_settings(config(state__memory_kind="pinned_host"))
  assert read.update.memory_kind == "pinned_host"


def test_a_process_without_a_device_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  with pytest.raises(ValueError, match=r"leaves processes \[1, 2\] of 3 with"):
    settings.read_settings(config(mesh__context=2))


def test_stop_tokens_may_be_a_list():
  read = settings.read_settings(config(sampling__stop_tokens=[3, 5]))
  assert read.sampling.stop_tokens == (3, 5)


def test_what_only_glm_has_is_taken_over():
  changes = {"model__latent_norm_eps": 1e-5, "sampling__record": ["experts"]}
  read = settings.read_settings(config(model__preset="tiny-glm", **changes))
  assert read.model.latent_norm_eps == 1e-5
  assert read.sampling.record == ("experts",)


def test_an_unknown_setting_is_refused():
  with pytest.raises(AttributeError, match="Did you mean"):
    base.get_config().train.stepz = 3


def test_a_rank_trains_adapters_alone():
  changed = config(lora__rank=2, lora__targets=("q_proj",))
  policy = load_policy(changed, settings.read_settings(changed))
  assert len(jax.tree.leaves(policy.trainable)) == 2
  assert len(jax.tree.leaves(policy.frozen)) > 20


def test_the_seed_draws_the_weights_on_any_mesh():
  draw = lambda **changes: load_policy(
      config(**changes), settings.read_settings(config(**changes))
  )
  first, other = draw(seed=0), draw(seed=1)
  assert (first.model.embed_tokens[...] != other.model.embed_tokens[...]).any()
  spread = draw(seed=0, mesh__context=4, mesh__tensor=2)
  jax.tree.map(np.testing.assert_array_equal, spread.trainable, first.trainable)
  table = spread.model.embed_tokens[...]
  assert 8 * table.addressable_shards[0].data.size == table.size


def test_a_checkpoint_takes_the_place_of_the_preset(tmp_path):
  model = random_model(preset("tiny"), seed=3)
  save_model(model, tmp_path / "model")
  changed = config(
      model__checkpoint=str(tmp_path / "model"),
      model__dtype="float32",
      model__param_dtype="float32",
  )
  read = settings.read_settings(changed)
  policy = load_policy(changed, read)
  jax.tree.map(np.testing.assert_array_equal, policy, make_policy(model))


@pytest.mark.parametrize("name", ["tiny", "tiny-glm"])
def test_by_default_adapters_are_where_the_model_has_them(name):
  assert base.get_config().lora.targets == ()
  changed = config(model__preset=name, lora__rank=2)
  model = settings.read_settings(changed).model
  assert model.adapted == preset(name).ADAPTED_NAMES != ()


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    "text,wanted",
    [
        ("('o_proj',)", ("o_proj",)),
        ("('kv_b_proj', 'experts')", ("kv_b_proj", "experts")),
    ],
)
def test_targets_are_given_on_the_command_line(monkeypatch, text, wanted):
  """One, and several, which are of GLM alone; ml_collections is what warns."""
  path = binaries.ROOT / "experiments/configs/tiny_glm.py"
  arguments = ["train_grpo", f"--config={path}"]
  arguments += ["--config.lora.rank=2", f"--config.lora.targets={text}"]
  monkeypatch.setattr(sys, "argv", arguments)  # ml_collections reads it
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file("config", flag_values=values)
  values(arguments)
  assert settings.read_settings(holder.value).model.adapted == wanted

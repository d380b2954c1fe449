"""Settings of supervised training: what there is, and that nothing else is."""

import pytest

from experiments.configs import base, sft, sft_base, tiny
from experiments.settings import read_settings
from experiments.sft_settings import read_sft_settings
from modeling.parameter import IndexerParam


def config(**changes):
  """The tiny settings; `a__b` stands for the setting a.b."""
  tree = sft.get_config()
  tree.update_from_flattened_dict(
      {name.replace("__", "."): value for name, value in changes.items()}
  )
  return tree


@pytest.mark.parametrize(
    "change,message",
    [
        ({"train__steps": 0}, "train.steps=0"),
        ({"train__prompts_per_step": 0}, "train.prompts_per_step=0"),
        ({"train__head_chunk_tokens": 0}, "head_chunk_tokens=0"),
        ({"train__cotangent_dtype": "int8"}, "cotangent_dtype='int8'"),
        ({"capture__boundary_every": 0}, "boundary_every=0"),
        ({"state__memory_kind": "disk"}, "memory_kind='disk': want"),
        ({"train__indexers": True}, "train.indexers=True: leave it out"),
        (
            {
                "train__indexers": True,
                "model__preset": "tiny-glm",
                "lora__rank": 2,
            },
            r"lora=.*: want None with train_indexers=True",
        ),
        ({"mesh__context": 3}, "axis 'embed' of 64 does not divide over 3"),
        (
            {"mesh__data": 2, "train__prompts_per_step": 3},
            "prompts_per_step=3: want a multiple of mesh.data=2",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    read_sft_settings(config(**change))


def test_every_setting_reaches_the_update():
  read = read_sft_settings(
      config(
          capture__boundary_every=3,
          capture__memory_kind="pinned_host",
          state__memory_kind="pinned_host",
          train__cotangent_dtype="bfloat16",
          train__capture_chunk_tokens=32,
          train__head_chunk_tokens=16,
      )
  ).update
  assert (read.tape.boundary_every, read.tape.memory_kind) == (3, "pinned_host")
  assert (read.memory_kind, read.cotangent_dtype) == ("pinned_host", "bfloat16")
  assert (read.capture_chunk_tokens, read.head_chunk_tokens) == (32, 16)


def test_training_indexers_takes_no_other_weight():
  """The rest may then be in bfloat16, which full training refuses."""
  given = dict(model__preset="tiny-glm", model__param_dtype="bfloat16")
  with pytest.raises(ValueError, match="param_dtype='bfloat16'"):
    read_sft_settings(config(**given))
  model = read_sft_settings(config(**given, train__indexers=True)).model
  assert model.trained is IndexerParam


@pytest.mark.parametrize(
    "section,name",
    [
        ("train", "group_size"),
        ("train", "prompt_gradient"),
        ("data", "rollouts"),
        ("data", "max_response_tokens"),
    ],
)
def test_a_setting_of_grpo_alone_does_not_exist(section, name):
  assert name in base.get_config()[section]
  with pytest.raises(AttributeError, match=f'"{name}" does not exist'):
    setattr(sft_base.get_config()[section], name, 1)


def test_sections_of_grpo_alone_do_not_exist():
  gone = set(base.get_config()) - set(sft_base.get_config())
  assert {"sampling", "objective"} <= gone


def test_a_misspelt_setting_is_answered_with_a_suggestion():
  with pytest.raises(AttributeError, match='Did you mean "sequences"'):
    sft_base.get_config().data.sequence = "x.jsonl"


def test_the_config_of_another_program_is_refused():
  with pytest.raises(
      ValueError, match=r"with data\.max_response_tokens, which"
  ):
    read_sft_settings(tiny.get_config())
  with pytest.raises(ValueError, match=r"with data\.sequences, which"):
    read_settings(sft.get_config())

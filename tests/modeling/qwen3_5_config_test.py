"""config.json in and out; what the model does not honour is refused."""

import re

import pytest

from modeling import presets
from modeling.decoder_config import LoraConfig, RopeConfig, YarnConfig
from modeling.qwen3_5_config import MoeConfig, Qwen3_5Config

YARN = YarnConfig(
    factor=4.0, original_max_position_embeddings=262144, beta_fast=16.0
)


def file(**changes):
  """The text part of a good config.json."""
  return presets.preset("tiny").to_hf() | changes


def refusal(config):
  """The message with which a config.json is refused."""
  with pytest.raises(ValueError) as caught:
    Qwen3_5Config.from_hf(config)
  return str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        *[
            config
            for config in presets.PRESETS.values()
            if isinstance(config, Qwen3_5Config)
        ],
        presets.preset("tiny").replace(rope=RopeConfig(yarn=YARN)),
        presets.preset("tiny").replace(
            full_attention_interval=2, rms_norm_eps=1e-5, initializer_range=0.1
        ),
    ],
)
def test_a_configuration_survives_its_file(config):
  read = Qwen3_5Config.from_hf(
      config.to_hf(), dtype=config.dtype, param_dtype=config.param_dtype
  )
  assert read == config


def test_adapters_are_not_in_the_file():
  config = presets.preset("tiny")
  adapted = config.replace(lora=LoraConfig(rank=2, alpha=4.0))
  assert adapted.to_hf() == config.to_hf()


def test_a_table_of_frequencies_cannot_be_written():
  config = presets.preset("tiny").replace(rope=RopeConfig(inv_freq=(1.0,)))
  with pytest.raises(ValueError, match="inv_freq has no place"):
    config.to_hf()


def test_the_text_part_of_a_vision_language_file_is_read():
  wrapped = {
      "model_type": "qwen3_5",
      "text_config": file(),
      "vision_config": {"depth": 27},
      "tie_word_embeddings": True,
  }
  assert Qwen3_5Config.from_hf(wrapped) == Qwen3_5Config.from_hf(
      file(tie_word_embeddings=True)
  )


def test_the_window_written_is_that_of_yarn():
  config = presets.preset("tiny").replace(rope=RopeConfig(yarn=YARN))
  assert config.to_hf()["max_position_embeddings"] == 4 * 262144


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "qwen3_next"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("norm_topk_prob", False),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
    ],
)
def test_values_that_the_model_does_not_honour_are_named(name, value):
  assert f"{name}={value!r} is not supported" in refusal(file(**{name: value}))


@pytest.mark.parametrize(
    "types",
    [
        ["linear_attention"] * 4,
        ["full_attention", *["linear_attention"] * 3],
        ["linear_attention", "full_attention", *["linear_attention"] * 2],
        ["linear_attention", "sliding_attention"] * 2,
    ],
)
def test_layers_that_do_not_repeat_are_named(types):
  assert "layer_types=" in refusal(file(layer_types=types))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
    ],
)
def test_other_ropes_are_named(rope):
  kind = rope.get("rope_type", rope.get("type"))
  assert f"rope_type={kind!r}" in refusal(file(rope_parameters=rope))


def test_settings_of_yarn_that_are_not_honoured_are_named():
  rope = presets.preset("tiny").replace(rope=RopeConfig(yarn=YARN)).to_hf()
  rope = rope["rope_parameters"] | {"attention_factor": 2.0, "truncate": False}
  message = refusal(file(rope_parameters=rope))
  assert "['attention_factor', 'truncate'] are not supported" in message


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("tiny", ["vocab_size", "num_hidden_layers", "linear_num_key_heads"]),
        ("tiny-moe", ["moe_intermediate_size", "num_experts_per_tok"]),
    ],
)
def test_missing_keys_are_named(preset, names):
  config = presets.preset(preset).to_hf()
  for name in names:
    del config[name]
  assert all(name in refusal(config) for name in names)


def test_missing_keys_of_yarn_are_named():
  rope = {"rope_type": "yarn", "factor": 4.0}
  message = refusal(file(rope_parameters=rope))
  assert "lacks original_max_position_embeddings" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 6}, "num_hidden_layers=6"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5"),
        ({"intermediate_size": None}, "intermediate_size=None"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"param_dtype": "int8"}, "param_dtype='int8'"),
        (
            {
                "moe": MoeConfig(
                    num_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=8,
                    shared_expert_intermediate_size=8,
                )
            },
            "want exactly one of the two",
        ),
    ],
)
def test_impossible_models_are_refused(changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    presets.preset("tiny").replace(**changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora.rank=0"),
        ({"rank": 1, "targets": ("q_prj",)}, "lora.targets=('q_prj',)"),
    ],
)
def test_impossible_adapters_are_refused(settings, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    presets.preset("tiny").replace(lora=LoraConfig(alpha=1.0, **settings))


def test_adapters_without_targets_are_those_of_the_model():
  config = presets.preset("tiny").replace(lora=LoraConfig(rank=1, alpha=1.0))
  assert config.adapted == Qwen3_5Config.ADAPTED_NAMES
  assert config.replace(lora=None).adapted == ()


def test_unknown_presets_are_refused_with_the_nearest():
  with pytest.raises(ValueError, match=r"did you mean 'qwen3\.6-27b'"):
    presets.preset("qwen3.6-27B")

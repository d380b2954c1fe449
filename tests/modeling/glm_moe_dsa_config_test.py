"""config.json in and out, the schedules of layers, and how they are grouped."""

import dataclasses
import json
import math

import jax
import pytest

from modeling import models, presets
from modeling.decoder_config import LoraConfig, RopeConfig, YarnConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig, Group

TINY = presets.preset("tiny-glm")
GLM = {
    name: config
    for name, config in presets.PRESETS.items()
    if isinstance(config, GlmMoeDsaConfig)
}
# What the published files say, as far as a model is concerned.
GLM_5_2 = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "rope_scaling": None,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
SHARING = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")


def file(**changes):
  """A good config.json."""
  return TINY.to_hf() | changes


def without(config, *names):
  return {name: x for name, x in config.items() if name not in names}


def refusal(config):
  """The message with which a config.json is refused."""
  with pytest.raises(ValueError) as caught:
    GlmMoeDsaConfig.from_hf(config)
  return str(caught.value)


def scheduled(pattern):
  """The tiny model with layers as in "FS fs": capitals are dense."""
  letters = pattern.replace(" ", "")
  return TINY.replace(
      num_hidden_layers=len(letters),
      indexer_types=tuple(
          {"f": "full", "s": "shared"}[x] for x in letters.lower()
      ),
      mlp_layer_types=tuple(
          "dense" if x.isupper() else "sparse" for x in letters
      ),
  )


def test_the_published_file_is_the_preset():
  assert GlmMoeDsaConfig.from_hf(GLM_5_2) == presets.preset("glm-5.2")
  first = without(GLM_5_2, *SHARING, "moe_router_dtype", "rope_parameters")
  first |= {"rope_theta": 1000000, "head_dim": 64}
  assert GlmMoeDsaConfig.from_hf(first) == presets.preset("glm-5")


@pytest.mark.parametrize(
    "config",
    [
        *GLM.values(),
        TINY.replace(rms_norm_eps=1e-6, n_shared_experts=2, index_topk=3),
        scheduled("FSfs FsfS"),
    ],
)
def test_a_configuration_survives_its_file(config):
  read = models.read_config(
      json.loads(json.dumps(config.to_hf())),
      dtype=config.dtype,
      param_dtype=config.param_dtype,
  )
  assert read == config


def test_what_is_not_in_the_file_can_be_given():
  config = TINY.replace(
      lora=LoraConfig(rank=2, alpha=4.0), latent_norm_eps=1e-5
  )
  assert config.to_hf() == TINY.to_hf()
  given = {
      name: getattr(config, name)
      for name in ("lora", "latent_norm_eps", "dtype", "param_dtype")
  }
  assert GlmMoeDsaConfig.from_hf(config.to_hf(), **given) == config


def test_a_table_of_frequencies_cannot_be_written():
  rope = dataclasses.replace(TINY.rope, inv_freq=(1.0,))
  with pytest.raises(ValueError, match="inv_freq has no place"):
    TINY.replace(rope=rope).to_hf()


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(
            partial_rotary_factor=1.0,
            yarn=YarnConfig(factor=4.0, original_max_position_embeddings=1024),
        ),
    ],
)
def test_another_rope_is_refused(rope):
  with pytest.raises(ValueError, match=r"rope=.* want partial_rotary_factor=1"):
    TINY.replace(rope=rope)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "deepseek_v32"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("mlp_bias", True),
        ("moe_layer_freq", 2),
        ("moe_router_dtype", "bfloat16"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 8),
        ("topk_group", 4),
        ("norm_topk_prob", False),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("num_key_value_heads", 2),
        ("qk_head_dim", 64),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_values_that_the_model_does_not_honour_are_named(name, value):
  assert f"{name}={value!r} is not supported" in refusal(file(**{name: value}))


def test_layers_of_another_kind_are_named():
  types = ["indexed_attention"] * 7 + ["full_attention"]
  message = refusal(file(layer_types=types))
  assert "layer_types='full_attention' is not supported" in message
  old = ["deepseek_sparse_attention"] * 8
  GlmMoeDsaConfig.from_hf(file(layer_types=old))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_other_ropes_are_named(key, name):
  config = without(file(), "rope_parameters")
  config[key] = {name: "yarn", "factor": 4.0, "rope_theta": 1e6}
  assert "rope_type='yarn' is not supported" in refusal(config)


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(quant_method="gptq"), "quant_method='gptq'"),
        (dict(fmt="e5m2"), "fmt='e5m2'"),
        (dict(weight_block_size=[64, 128]), "weight_block_size=[64, 128]"),
        (dict(weight_block_size=None), "weight_block_size=None"),
    ],
)
def test_other_quantisations_are_named(changes, named):
  assert GlmMoeDsaConfig.from_hf(
      file(quantization_config=without(FP8, "fmt"))
  ) == GlmMoeDsaConfig.from_hf(file())
  message = refusal(file(quantization_config=FP8 | changes))
  assert f"{named} is not supported" in message


def test_a_weight_has_many_scales():
  config = without(FP8, "weight_block_size")
  assert "weight_block_size=None" in refusal(file(quantization_config=config))


@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in dataclasses.fields(GlmMoeDsaConfig)
        if field.default is dataclasses.MISSING
        and field.name not in ("indexer_types", "mlp_layer_types")
    ],
)
def test_a_missing_key_is_named(name):
  assert f"config.json lacks {name}" in refusal(without(file(), name))


def test_missing_rope_and_feed_forwards_are_named():
  assert "lacks rope_theta" in refusal(without(file(), "rope_parameters"))
  config = without(file(), "mlp_layer_types", "first_k_dense_replace")
  assert "lacks mlp_layer_types" in refusal(config)


PERIOD = {"index_topk_freq": 3, "index_skip_topk_offset": 3}
PATTERN = PERIOD | {"index_topk_pattern": "FSSFSSSS"}
LIST = PATTERN | {"indexer_types": ["full", "shared"] * 4}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (LIST, "FSFSFSFS"),
        (PATTERN, "FSSFSSSS"),
        (PERIOD, "FFFSSFSS"),
        (
            LIST | dict.fromkeys(["indexer_types", "index_topk_pattern"]),
            "FFFSSFSS",
        ),
        ({"index_topk_freq": 3}, "FFSSFSSF"),
        ({"index_skip_topk_offset": 3}, "FFFFFFFF"),
        ({}, "FFFFFFFF"),
    ],
)
def test_the_schedule_of_indexers_is_the_first_that_is_given(keys, wanted):
  config = without(file(), "indexer_types", *SHARING) | keys
  read = GlmMoeDsaConfig.from_hf(config)
  assert "".join(kind[0].upper() for kind in read.indexer_types) == wanted


@pytest.mark.parametrize("dense", [0, 3, 8, 9])
def test_the_first_layers_are_dense(dense):
  config = without(file(first_k_dense_replace=dense), "mlp_layer_types")
  read = GlmMoeDsaConfig.from_hf(config)
  wanted = ["dense"] * min(dense, 8) + ["sparse"] * max(8 - dense, 0)
  assert list(read.mlp_layer_types) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full"] * 7},
        {"indexer_types": ["full"] * 7 + ["half"]},
        {"indexer_types": ["shared"] + ["full"] * 7},
        {"indexer_types": None, "index_topk_pattern": "FFFFFFFX"},
        {"indexer_types": None, "index_topk_pattern": "FFFF"},
        {"mlp_layer_types": ["dense"] * 9},
        {"mlp_layer_types": ["moe"] * 8},
    ],
)
def test_impossible_schedules_are_named(changes):
  assert f"{next(iter(changes))}=(" in refusal(file(**changes))


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (
            presets.preset("glm-5.2"),
            [
                (0, 2, "dense", ()),
                (2, 1, "dense", (("sparse", 3),)),
                (6, 18, "sparse", (("sparse", 3),)),
            ],
        ),
        (
            presets.preset("glm-5"),
            [(0, 3, "dense", ()), (3, 75, "sparse", ())],
        ),
        (TINY, [(0, 2, "dense", ()), (2, 2, "sparse", (("sparse", 2),))]),
        (
            scheduled("FSss FSss f Fss"),
            [
                (0, 2, "dense", (("dense", 1), ("sparse", 2))),
                (8, 1, "sparse", ()),
                (9, 1, "dense", (("sparse", 2),)),
            ],
        ),
    ],
)
def test_like_runs_are_grouped(config, groups):
  names = [field.name for field in dataclasses.fields(Group)]
  wanted = [Group(**dict(zip(names, group, strict=True))) for group in groups]
  assert list(config.groups) == wanted


@pytest.mark.parametrize(
    "config", [*GLM.values(), scheduled("FSss FSss f Fss fsSs")]
)
def test_every_layer_is_in_one_group(config):
  found = {}
  for group in config.groups:
    for run in range(group.runs):
      start = group.first_layer + run * group.layers_per_run
      found[start] = ("full", group.full)
      for offset, (kind, count) in zip(
          group.sharer_offsets, group.sharers, strict=True
      ):
        for i in range(count):
          assert start + offset + i not in found
          found[start + offset + i] = ("shared", kind)
  layers = zip(config.indexer_types, config.mlp_layer_types, strict=True)
  assert found == dict(enumerate(layers))


@pytest.mark.parametrize(
    ("name", "parameters", "state_bytes"),
    [
        ("glm-5.2", 743_377_000_704, 95_232),
        ("glm-5", 743_911_199_232, 109_824),
    ],
)
def test_real_sizes(name, parameters, state_bytes):
  config = presets.preset(name)
  assert models.parameter_count(config) == parameters
  slots = jax.tree.leaves(config.slot_shapes(batch=1, slots=1))
  assert sum(math.prod(x.shape) * x.dtype.itemsize for x in slots) == (
      state_bytes
  )

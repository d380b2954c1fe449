"""Hugging Face checkpoints in and out."""

import json
import logging
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from modeling import (
    checkpoint_files,
    checkpoint_names,
    checkpoints,
    presets,
    sharding,
)
from modeling.decoder_config import LoraConfig, RopeConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.qwen3_5_config import Qwen3_5Config
from tests.random_model import random_model

DENSE = presets.preset("tiny").replace(
    vocab_size=32, hidden_size=16, num_hidden_layers=8
)
MOE = presets.preset("tiny-moe").replace(
    vocab_size=32, hidden_size=16, num_hidden_layers=8
)
TIED = DENSE.replace(tie_word_embeddings=True)
# Two runs of one layer; one with two kinds of sharers; two with one kind.
GLM = presets.preset("tiny-glm").replace(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=11,
    indexer_types=("full", "full") + ("full", "shared", "shared") * 3,
    mlp_layer_types=("dense",) * 4 + ("sparse",) * 7,
)
LORA = LoraConfig(rank=4, alpha=2.0, targets=("in_proj_qkv", "down_proj"))
ROUTED = LoraConfig(rank=4, alpha=2.0, targets=("experts", "down_proj"))
TEXT, VISION_LANGUAGE = "model.", "model.language_model."
VISION = "model.visual.patch_embed.proj.weight"
MTP = ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight")
GLM_MTP = (
    "model.layers.11.eh_proj.weight",
    "model.layers.11.mlp.experts.0.up_proj.weight_scale_inv",
)


def glm_shapes(config: GlmMoeDsaConfig) -> dict[str, tuple[int, ...]]:
  """Names and shapes of the published files, but for experts in one tensor."""
  hidden, heads = config.hidden_size, config.num_attention_heads
  queries, latent = config.q_lora_rank, config.kv_lora_rank
  index, inner = config.index_head_dim, config.moe_intermediate_size
  attention = {
      "q_a_proj.weight": (queries, hidden),
      "q_a_layernorm.weight": (queries,),
      "q_b_proj.weight": (heads * config.qk_head_dim, queries),
      "kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
      "kv_a_layernorm.weight": (latent,),
      "kv_b_proj.weight": (
          heads * (config.qk_nope_head_dim + config.v_head_dim),
          latent,
      ),
      "o_proj.weight": (hidden, heads * config.v_head_dim),
  }
  indexer = {
      "wq_b.weight": (config.index_n_heads * index, queries),
      "wk.weight": (index, hidden),
      "k_norm.weight": (index,),
      "k_norm.bias": (index,),
      "weights_proj.weight": (config.index_n_heads, hidden),
  }
  experts = config.n_routed_experts
  routed = {
      "mlp.gate.weight": (experts, hidden),
      "mlp.gate.e_score_correction_bias": (experts,),
      "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
      "mlp.experts.down_proj": (experts, hidden, inner),
  }
  shapes = {
      "embed_tokens.weight": (config.vocab_size, hidden),
      "lm_head.weight": (config.vocab_size, hidden),
      "norm.weight": (hidden,),
  }
  for layer in range(config.num_hidden_layers):
    found = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    found |= {f"self_attn.{name}": x for name, x in attention.items()}
    if config.indexer_types[layer] == "full":
      found |= {f"self_attn.indexer.{name}": x for name, x in indexer.items()}
    mlp, size = "mlp", config.intermediate_size
    if config.mlp_layer_types[layer] == "sparse":
      found |= routed
      mlp, size = "mlp.shared_experts", config.n_shared_experts * inner
    found |= {
        f"{mlp}.gate_proj.weight": (size, hidden),
        f"{mlp}.up_proj.weight": (size, hidden),
        f"{mlp}.down_proj.weight": (hidden, size),
    }
    shapes |= {f"layers.{layer}.{name}": x for name, x in found.items()}
  return shapes


def qwen_shapes(config: Qwen3_5Config) -> dict[str, tuple[int, ...]]:
  """Names and shapes of the published files, written down by hand."""
  hidden, size = config.hidden_size, config.head_dim
  queries = config.num_attention_heads * size
  keys = config.num_key_value_heads * size
  values = config.linear_num_value_heads * config.linear_value_head_dim
  gates, channels = config.linear_num_value_heads, config.conv_channels
  full = {
      "self_attn.q_proj.weight": (2 * queries, hidden),
      "self_attn.k_proj.weight": (keys, hidden),
      "self_attn.v_proj.weight": (keys, hidden),
      "self_attn.o_proj.weight": (hidden, queries),
      "self_attn.q_norm.weight": (size,),
      "self_attn.k_norm.weight": (size,),
  }
  linear = {
      "linear_attn.in_proj_qkv.weight": (channels, hidden),
      "linear_attn.in_proj_z.weight": (values, hidden),
      "linear_attn.in_proj_b.weight": (gates, hidden),
      "linear_attn.in_proj_a.weight": (gates, hidden),
      "linear_attn.conv1d.weight": (channels, 1, 4),
      "linear_attn.A_log": (gates,),
      "linear_attn.dt_bias": (gates,),
      "linear_attn.norm.weight": (config.linear_value_head_dim,),
      "linear_attn.out_proj.weight": (hidden, values),
  }
  every = {
      "input_layernorm.weight": (hidden,),
      "post_attention_layernorm.weight": (hidden,),
  }
  if config.moe is None:
    inner, mlp = config.intermediate_size, "mlp"
  else:
    moe = config.moe
    inner, mlp = moe.shared_expert_intermediate_size, "mlp.shared_expert"
    experts, expert_inner = moe.num_experts, moe.moe_intermediate_size
    every |= {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * expert_inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, expert_inner),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
  every |= {
      f"{mlp}.gate_proj.weight": (inner, hidden),
      f"{mlp}.up_proj.weight": (inner, hidden),
      f"{mlp}.down_proj.weight": (hidden, inner),
  }
  shapes = {
      "embed_tokens.weight": (config.vocab_size, hidden),
      "norm.weight": (hidden,),
  }
  for layer in range(config.num_hidden_layers):
    mixer = full if layer % 4 == 3 else linear
    shapes |= {
        f"layers.{layer}.{name}": shape
        for name, shape in (every | mixer).items()
    }
  if not config.tie_word_embeddings:
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
  return shapes


def official_shapes(config) -> dict[str, tuple[int, ...]]:
  """Those of either architecture, all experts of a layer in one tensor."""
  if isinstance(config, GlmMoeDsaConfig):
    return glm_shapes(config)
  return qwen_shapes(config)


def draw(config, dtype=np.float32):
  """Random tensors by plain name, all experts of a layer in one."""
  rng = np.random.default_rng(0)
  return {
      name: rng.normal(size=shape).astype(dtype)
      for name, shape in official_shapes(config).items()
  }


def official(tensors, config):
  """The same as the files of the architecture have experts."""
  return per_expert(tensors) if isinstance(config, GlmMoeDsaConfig) else tensors


def per_expert(tensors):
  """The same with a tensor for each expert."""
  split = {}
  for name, tensor in tensors.items():
    parent, _, last = name.rpartition(".")
    if last == "gate_up_proj":
      gate, up = np.split(tensor, 2, axis=-2)
      parts = {"gate_proj": gate, "up_proj": up}
    elif last == "down_proj":
      parts = {last: tensor}
    else:
      split[name] = tensor
      continue
    for part, matrices in parts.items():
      for expert, matrix in enumerate(matrices):
        split[f"{parent}.{expert}.{part}.weight"] = matrix
  return split


def named(tensors, prefix=TEXT):
  """The same under the names that files use."""
  return {
      name if name.startswith("lm_head") else prefix + name: tensor
      for name, tensor in tensors.items()
  }


def write(directory, tensors, config=DENSE):
  """A checkpoint of one file."""
  directory.mkdir(exist_ok=True)
  contiguous = {n: np.ascontiguousarray(x) for n, x in tensors.items()}
  save_file(contiguous, directory / "model.safetensors")
  (directory / "config.json").write_text(json.dumps(config.to_hf()))
  return directory


def write_sharded(directory, *shards):
  """A checkpoint of several files with their index."""
  directory.mkdir()
  weight_map = {}
  for i, tensors in enumerate(shards):
    save_file(tensors, directory / f"shard-{i}.safetensors")
    weight_map |= dict.fromkeys(tensors, f"shard-{i}.safetensors")
  index = json.dumps({"weight_map": weight_map})
  (directory / "model.safetensors.index.json").write_text(index)
  return directory


def halves(tensors):
  names = sorted(tensors)
  return (
      {name: tensors[name] for name in names[::2]},
      {name: tensors[name] for name in names[1::2]},
  )


def assert_same_tensors(ours, expected):
  assert ours.keys() == expected.keys()
  for name, tensor in expected.items():
    assert ours[name].dtype == tensor.dtype, name
    np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def refusal(call, *args, **kwargs):
  with pytest.raises(ValueError) as caught:
    call(*args, **kwargs)
  return str(caught.value)


def test_the_map_covers_the_published_files():
  config = presets.preset("qwen3.6-27b")
  places = checkpoint_names.places(config)
  assert len(places) == 851
  shapes = {name: place.shape for name, place in places.items()}
  assert shapes == official_shapes(config)


def test_the_map_covers_the_published_files_of_glm():
  config = presets.preset("glm-5.2")
  places = checkpoint_names.places(config, per_expert=True)
  assert len(places) == 58794
  empty = {
      name: np.broadcast_to(np.int8(0), shape)
      for name, shape in official_shapes(config).items()
  }
  shapes = {name: tensor.shape for name, tensor in per_expert(empty).items()}
  assert {name: place.shape for name, place in places.items()} == shapes


@pytest.mark.parametrize("prefix", [TEXT, VISION_LANGUAGE])
@pytest.mark.parametrize(
    "config", [DENSE, TIED, MOE, GLM], ids=["dense", "tied", "moe", "glm"]
)
def test_every_tensor_survives_load_and_save(tmp_path, config, prefix):
  tensors = official(draw(config), config)
  source = write(tmp_path / "source", named(tensors, prefix), config)
  read = checkpoints.load_config(source, dtype="float32", param_dtype="float32")
  assert read == config
  model, report = checkpoints.load_model(source, config=read)
  assert report.loaded == len(tensors)
  assert not report.vision and not report.mtp and not report.fresh
  checkpoints.save_model(model, tmp_path / "out")
  assert_same_tensors(
      load_file(tmp_path / "out" / "model.safetensors"), named(tensors)
  )
  assert (
      checkpoints.load_config(
          tmp_path / "out", dtype="float32", param_dtype="float32"
      )
      == config
  )


@pytest.mark.parametrize("split", [per_expert, dict])
@pytest.mark.parametrize("config", [MOE, GLM], ids=["qwen", "glm"])
def test_experts_may_have_tensors_of_their_own(tmp_path, config, split):
  tensors = draw(config)
  source = write(tmp_path / "source", named(split(tensors)))
  model, report = checkpoints.load_model(source, config=config)
  assert report.loaded == len(split(tensors))
  checkpoints.save_model(model, tmp_path / "out")
  assert_same_tensors(
      load_file(tmp_path / "out" / "model.safetensors"),
      named(official(tensors, config)),
  )


def test_layers_stand_in_their_block_and_kernels_are_transposed(tmp_path):
  tensors = draw(DENSE)
  model, _ = checkpoints.load_model(
      write(tmp_path / "source", named(tensors, "language_model.model.")),
      config=DENSE,
  )
  layers = model.blocks.linear_layers
  np.testing.assert_array_equal(
      layers.mlp.up_proj.kernel[1, 2],
      tensors["layers.6.mlp.up_proj.weight"].T,
  )
  np.testing.assert_array_equal(
      layers.linear_attn.conv1d[0, 1],
      tensors["layers.1.linear_attn.conv1d.weight"][:, 0].T,
  )
  np.testing.assert_array_equal(
      model.blocks.full_layer.self_attn.q_norm.weight[1],
      tensors["layers.7.self_attn.q_norm.weight"],
  )


def test_layers_stand_in_their_run(tmp_path):
  tensors = draw(GLM)
  model, _ = checkpoints.load_model(
      write(tmp_path / "source", named(per_expert(tensors))), config=GLM
  )
  single, mixed, last = model.runs
  for leaf, name in [
      (single.full_layer.self_attn.indexer.wk.kernel[1], "1.indexer.wk"),
      (mixed.full_layer.self_attn.indexer.wk.kernel[0], "2.indexer.wk"),
      (mixed.sharers[0].self_attn.o_proj.kernel[0, 0], "3.o_proj"),
      (mixed.sharers[1].self_attn.o_proj.kernel[0, 0], "4.o_proj"),
      (last.full_layer.self_attn.o_proj.kernel[1], "8.o_proj"),
      (last.sharers[0].self_attn.o_proj.kernel[1, 1], "10.o_proj"),
  ]:
    layer, _, name = name.partition(".")
    name = f"layers.{layer}.self_attn.{name}.weight"
    np.testing.assert_array_equal(leaf, tensors[name].T, err_msg=name)
  np.testing.assert_array_equal(
      last.sharers[0].mlp.experts.gate_up_proj[1, 0, 5],
      tensors["layers.9.mlp.experts.gate_up_proj"][5].T,
  )


def test_a_checkpoint_in_shards_loads_as_one(tmp_path):
  tensors = named(draw(DENSE))
  shards = write_sharded(tmp_path / "shards", *halves(tensors))
  model, _ = checkpoints.load_model(shards, config=DENSE)
  checkpoints.save_model(model, tmp_path / "out")
  assert_same_tensors(
      load_file(tmp_path / "out" / "model.safetensors"), tensors
  )


def test_shards_are_written_below_their_limit(tmp_path):
  tensors = named(draw(DENSE))
  source = write(tmp_path / "source", tensors)
  model, _ = checkpoints.load_model(source, config=DENSE)
  checkpoints.save_model(model, tmp_path / "out", max_shard_bytes=60_000)

  index = checkpoint_files.read_json(
      tmp_path / "out" / "model.safetensors.index.json"
  )
  files = sorted(set(index["weight_map"].values()))
  assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
  loaded = {}
  for file in files:
    shard = load_file(tmp_path / "out" / file)
    assert sum(x.nbytes for x in shard.values()) <= 60_000
    assert all(index["weight_map"][name] == file for name in shard)
    loaded |= shard
  assert_same_tensors(loaded, tensors)
  total = sum(x.nbytes for x in tensors.values())
  assert index["metadata"]["total_size"] == total
  assert len(files) == pytest.approx(total / 60_000, rel=0.3)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
  checkpoints.save_model(
      random_model(DENSE), tmp_path / "out", max_shard_bytes=1
  )
  assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(draw(DENSE))


def test_vision_and_mtp_are_skipped_and_reported(tmp_path, caplog):
  tensors = named(draw(MOE), VISION_LANGUAGE)
  extra = {name: np.ones((2, 2), np.float32) for name in (VISION, *MTP)}
  source = write(tmp_path / "source", tensors | extra)
  with caplog.at_level(logging.INFO, logger="absl"):
    _, report = checkpoints.load_model(source, config=MOE)
  assert report.vision == (VISION,)
  assert sorted(report.mtp) == sorted(MTP)
  assert report.loaded == len(tensors)
  (record,) = [r for r in caplog.records if "skipped" in r.message]
  assert "1 of vision and 2 of MTP skipped" in record.message


def test_the_layer_after_the_last_is_that_of_mtp(tmp_path):
  tensors = named(per_expert(draw(GLM)))
  extra = {name: np.ones((2, 2), np.float32) for name in GLM_MTP}
  source = write(tmp_path / "source", tensors | extra)
  _, report = checkpoints.load_model(source, config=GLM)
  assert sorted(report.mtp) == sorted(GLM_MTP)
  assert report.loaded == len(tensors)
  extra = {"model.layers.12.norm.weight": np.ones(2, np.float32)}
  source = write(tmp_path / "source", tensors | extra)
  message = refusal(checkpoints.load_model, source, config=GLM)
  assert "1 unexpected:\n    model.layers.12.norm.weight" in message


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str
)
def test_weights_take_the_dtype_of_the_model(tmp_path, dtype):
  tensors = draw(DENSE, dtype)
  config = DENSE.replace(param_dtype="bfloat16")
  source = write(tmp_path / "source", named(tensors))
  model, _ = checkpoints.load_model(source, config=config)
  kept = {"A_log", "dt_bias", "norm.weight"}
  for path, leaf in checkpoint_names.leaves(model).items():
    is_kept = "linear_attn" in path and any(
        ".".join(path).endswith(name) for name in kept
    )
    assert leaf.dtype == ("float32" if is_kept else "bfloat16"), path
  mixer = model.blocks.linear_layers.linear_attn
  np.testing.assert_array_equal(
      mixer.A_log[0, 0],
      tensors["layers.0.linear_attn.A_log"].astype(np.float32),
  )
  np.testing.assert_array_equal(
      mixer.in_proj_z.kernel[0, 0],
      tensors["layers.0.linear_attn.in_proj_z.weight"]
      .astype(ml_dtypes.bfloat16)
      .T,
  )
  checkpoints.save_model(model, tmp_path / "out")
  saved = load_file(tmp_path / "out" / "model.safetensors")
  assert saved["model.layers.0.linear_attn.A_log"].dtype == np.float32
  assert saved["lm_head.weight"].dtype == ml_dtypes.bfloat16


def test_a_router_stays_in_float32(tmp_path):
  config = GLM.replace(param_dtype="bfloat16")
  tensors = named(per_expert(draw(GLM, ml_dtypes.bfloat16)))
  # Of as many biases in bfloat16 only two would be left, and other experts.
  bias = np.linspace(6.95, 7.01, 8, dtype=np.float32)
  name = "model.layers.9.mlp.gate.e_score_correction_bias"
  source = write(tmp_path / "source", tensors | {name: bias})
  model, _ = checkpoints.load_model(source, config=config)
  router = model.runs[2].sharers[0].mlp.gate
  assert router.kernel.dtype == np.float32
  np.testing.assert_array_equal(router.e_score_correction_bias[1, 0], bias)
  checkpoints.save_model(model, tmp_path / "out")
  saved = load_file(tmp_path / "out" / "model.safetensors")
  assert saved["model.layers.9.mlp.gate.weight"].dtype == np.float32
  assert saved["lm_head.weight"].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(saved[name], bias)


MESHES = {
    "qwen": (MOE.replace(lora=LORA), dict(data=2, context=2, tensor=2)),
    "glm": (GLM.replace(lora=ROUTED), dict(data=2, context=4)),
}


@pytest.mark.parametrize("family", MESHES)
def test_a_mesh_changes_where_weights_lie_and_nothing_else(tmp_path, family):
  config, sizes = MESHES[family]
  tensors = named(official(draw(config), config))
  source = write(tmp_path / "source", tensors, config)
  mesh = sharding.make_mesh(**sizes)
  model, _ = checkpoints.load_model(source, config=config, mesh=mesh)
  assert model.mesh == mesh
  wanted = sharding.shardings(model, mesh)
  jax.tree.map(lambda x, layout: _expect_layout(x, layout), model, wanted)
  kernel = next(
      leaf
      for path, leaf in checkpoint_names.leaves(model).items()
      if path[-3:] == ("self_attn", "o_proj", "kernel")
  )
  assert 8 * kernel.addressable_shards[0].data.size == kernel.size
  plain, _ = checkpoints.load_model(source, config=config)
  jax.tree.map(
      np.testing.assert_array_equal, nnx.state(model), nnx.state(plain)
  )
  checkpoints.save_model(model, tmp_path / "out")  # B is zero in new adapters
  assert_same_tensors(
      load_file(tmp_path / "out" / "model.safetensors"), tensors
  )


def _expect_layout(array, layout):
  assert array.sharding == layout


def test_adapters_are_drawn_as_for_a_new_model(tmp_path):
  source = write(tmp_path / "source", named(draw(DENSE)))
  config = DENSE.replace(lora=LORA)
  model, report = checkpoints.load_model(source, config=config, lora_seed=1)
  leaves = checkpoint_names.leaves(model)
  adapters = {path for path in leaves if path[-1] in ("lora_a", "lora_b")}
  assert set(report.fresh) == {".".join(path) for path in adapters}
  assert {path[-2] for path in adapters} == set(LORA.targets)
  for path in adapters:
    leaf = np.asarray(leaves[path])
    assert leaf.dtype == np.float32
    if path[-1] == "lora_b":
      assert not leaf.any()
    else:
      assert leaf.std() == pytest.approx(leaf.shape[-2] ** -0.5, rel=0.3)
  a = model.blocks.linear_layers.linear_attn.in_proj_qkv.lora_a[...]
  assert np.unique(a).size == a.size  # no layer repeats another
  other, _ = checkpoints.load_model(source, config=config, lora_seed=2)
  assert (
      other.blocks.linear_layers.linear_attn.in_proj_qkv.lora_a[...] != a
  ).all()


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_into_what_is_saved(tmp_path, param_dtype):
  config = DENSE.replace(lora=LORA, param_dtype=param_dtype)
  model = random_model(config)
  checkpoints.save_model(model, tmp_path / "out")
  saved = load_file(tmp_path / "out" / "model.safetensors")
  assert saved.keys() == named(draw(DENSE)).keys()
  layers = model.blocks.linear_layers.linear_attn
  kernel, a, b = (
      np.asarray(leaf[1, 2]).astype(np.float32)
      for leaf in (
          layers.in_proj_qkv.kernel,
          layers.in_proj_qkv.lora_a,
          layers.in_proj_qkv.lora_b,
      )
  )
  merged = saved["model.layers.6.linear_attn.in_proj_qkv.weight"]
  assert merged.dtype == param_dtype
  np.testing.assert_array_equal(
      merged, (kernel + np.float32(0.5) * (a @ b)).astype(param_dtype).T
  )
  np.testing.assert_array_equal(
      saved["model.layers.6.linear_attn.in_proj_z.weight"],
      np.asarray(layers.in_proj_z.kernel[1, 2]).T,
  )


def merged(kernel, a, b):
  """W + (alpha / rank) A B as it is in a file, of the adapters here."""
  return (kernel + np.float32(0.5) * (a @ b)).swapaxes(-1, -2)


def test_saving_an_expert_gathers_no_other():
  mesh = sharding.make_mesh(data=2, context=4)
  axes = ("layers", "experts", "expert_embed", "expert_mlp")
  leaf = jax.ShapeDtypeStruct(
      (3, 64, 32, 64), np.float32, sharding=sharding.sharding(mesh, axes)
  )
  program = checkpoints._part.lower(leaf, (1,), 5, mesh=mesh).compile()
  experts = leaf.size // 3 // 2 * 4  # of a layer, as they lie over `data`
  assert program.memory_analysis().temp_size_in_bytes < 0.5 * experts


@pytest.mark.parametrize("config", [MOE, GLM], ids=["qwen", "glm"])
def test_adapters_of_experts_are_merged_into_what_is_saved(tmp_path, config):
  config = config.replace(lora=ROUTED)
  model = random_model(config)
  checkpoints.save_model(model, tmp_path / "out")
  saved = load_file(tmp_path / "out" / "model.safetensors")
  assert saved.keys() == named(official(draw(config), config)).keys()
  if isinstance(config, GlmMoeDsaConfig):
    layer, index, layers = 9, (1, 0), model.runs[2].sharers[0]
  else:
    layer, index, layers = 6, (1, 2), model.blocks.linear_layers
  leaf = {
      path[-1]: np.asarray(x[index])
      for path, x in checkpoint_names.leaves(layers.mlp.experts).items()
  }
  gate_up = np.split(leaf["gate_up_proj"], 2, axis=-1)
  a, b = leaf["gate_up_proj_lora_a"], leaf["gate_up_proj_lora_b"]
  halves = [merged(gate_up[i], a[:, i], b[:, i]) for i in range(2)]
  a, b = leaf["down_proj_lora_a"], leaf["down_proj_lora_b"]
  wanted = {
      "gate_up_proj": np.concatenate(halves, axis=-2),
      "down_proj": merged(leaf["down_proj"], a, b),
  }
  prefix = f"model.layers.{layer}.mlp.experts."
  wanted = {prefix + name: tensor for name, tensor in wanted.items()}
  for name, tensor in official(wanted, config).items():
    np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


def test_all_that_does_not_fit_is_named_at_once(tmp_path):
  tensors = named(draw(DENSE))
  del tensors["model.norm.weight"]
  del tensors["model.layers.3.self_attn.q_proj.weight"]
  tensors["model.layers.0.mlp.gate_proj.bias"] = np.zeros(3, np.float32)
  tensors["model.layers.8.input_layernorm.weight"] = np.zeros(3, np.float32)
  embed = "model.embed_tokens.weight"
  tensors[embed] = tensors[embed][:-1]
  quantised = "model.layers.1.mlp.up_proj.weight"
  tensors[quantised] = tensors[quantised].astype(np.int8)
  source = write(tmp_path / "source", tensors)
  assert refusal(checkpoints.load_model, source, config=DENSE) == (
      f"directory={str(source)!r} does not fit the model:"
      "\n  2 missing:"
      "\n    norm.weight"
      "\n    layers.3.self_attn.q_proj.weight"
      "\n  2 unexpected:"
      "\n    model.layers.0.mlp.gate_proj.bias"
      "\n    model.layers.8.input_layernorm.weight"
      "\n  1 misshaped:"
      "\n    model.embed_tokens.weight (31, 16), want (32, 16)"
      "\n  1 of an unsupported dtype:"
      "\n    model.layers.1.mlp.up_proj.weight I8, want one of BF16, F16, F32,"
      " F64, or F8_E4M3 for a matrix"
  )


def test_long_lists_are_cut(tmp_path):
  source = write(tmp_path / "source", {"x": np.zeros(1, np.float32)})
  message = refusal(checkpoints.load_model, source, config=DENSE)
  total = len(draw(DENSE))
  assert f"{total} missing:" in message and f"and {total - 20} more" in message


@pytest.mark.parametrize("drop", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_expert_is_named(tmp_path, drop):
  tensors = per_expert(draw(MOE))
  name = f"layers.2.mlp.experts.5.{drop}.weight"
  del tensors[name]
  source = write(tmp_path / "source", named(tensors))
  message = refusal(checkpoints.load_model, source, config=MOE)
  assert f"1 missing:\n    {name}" in message


def test_a_tied_model_takes_a_copy_of_the_embedding_for_its_head(tmp_path):
  tensors = named(draw(TIED))
  head = tensors["model.embed_tokens.weight"].copy()
  source = write(tmp_path / "copy", tensors | {"lm_head.weight": head})
  model, report = checkpoints.load_model(source, config=TIED)
  assert model.lm_head is None and report.loaded == len(tensors)
  head[3, 3] += 1.0
  source = write(tmp_path / "other", tensors | {"lm_head.weight": head})
  message = refusal(checkpoints.load_model, source, config=TIED)
  assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_an_untied_model_needs_its_head(tmp_path):
  source = write(tmp_path / "source", named(draw(TIED)))
  message = refusal(checkpoints.load_model, source, config=DENSE)
  assert "1 missing:\n    lm_head.weight" in message


def test_a_tensor_under_two_prefixes_is_refused(tmp_path):
  tensors = named(draw(DENSE))
  twice = {"model.language_model.norm.weight": tensors["model.norm.weight"]}
  source = write(tmp_path / "source", tensors | twice)
  message = refusal(checkpoints.load_model, source, config=DENSE)
  assert "are both 'norm.weight'" in message


def test_a_tensor_in_two_shards_is_refused(tmp_path):
  first, second = halves(named(draw(DENSE)))
  name = next(iter(first))
  source = write_sharded(
      tmp_path / "source", first, second | {name: first[name]}
  )
  message = refusal(checkpoints.load_model, source, config=DENSE)
  assert f"tensor {name!r} is in another shard too" in message


def test_an_absent_shard_is_named(tmp_path):
  source = write_sharded(tmp_path / "source", *halves(named(draw(DENSE))))
  (source / "shard-1.safetensors").unlink()
  message = refusal(checkpoints.load_model, source, config=DENSE)
  assert str(source) in message and "lacks shard-1.safetensors" in message


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": []}']
)
def test_an_index_without_shards_is_refused(tmp_path, index):
  (tmp_path / "model.safetensors.index.json").write_text(index)
  message = refusal(checkpoints.load_model, tmp_path, config=DENSE)
  assert "has no weight_map" in message


def test_a_directory_without_weights_is_refused(tmp_path):
  for directory in (tmp_path, tmp_path / "absent"):
    message = refusal(checkpoints.load_model, directory, config=DENSE)
    assert str(directory) in message
    assert (
        "neither model.safetensors nor model.safetensors.index.json" in message
    )


@pytest.mark.parametrize("keep", [0, 4, 5000, -1], ids=str)
def test_a_file_cut_short_is_named(tmp_path, keep):
  path = write(tmp_path / "source", named(draw(DENSE))) / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  message = refusal(checkpoints.load_model, path.parent, config=DENSE)
  assert f"{path} is damaged or no safetensors file" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "model_type=None is not supported"),
        (
            json.dumps(DENSE.to_hf() | {"model_type": "llama"}),
            "model_type='llama' is not supported",
        ),
    ],
)
def test_a_bad_config_is_refused_with_its_directory(tmp_path, text, reason):
  if text is not None:
    (tmp_path / "config.json").write_text(text)
  message = refusal(checkpoints.load_config, tmp_path)
  assert f"directory={str(tmp_path)!r}" in message and reason in message


def test_what_exists_is_not_overwritten(tmp_path):
  model = random_model(DENSE)
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "notes.txt").write_text("mine")
  (tmp_path / "file").write_text("mine")
  for name in ("full", "file"):
    message = refusal(checkpoints.save_model, model, tmp_path / name)
    assert "exists and is not an empty directory" in message
  assert (tmp_path / "file").read_text() == "mine"
  (tmp_path / "empty").mkdir()
  checkpoints.save_model(model, tmp_path / "empty")
  assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
  def fail(tensors, path, **_):
    pathlib.Path(path).write_bytes(b"half")
    raise OSError("No space left on device")

  monkeypatch.setattr(checkpoint_files.safetensors.numpy, "save_file", fail)
  with pytest.raises(OSError, match="No space left"):
    checkpoints.save_model(random_model(DENSE), tmp_path / "out")
  assert not list(tmp_path.iterdir())


def test_a_configuration_without_a_file_format_is_refused_first(tmp_path):
  model = random_model(DENSE.replace(rope=RopeConfig(inv_freq=(1.0,) * 4)))
  message = refusal(checkpoints.save_model, model, tmp_path / "out")
  assert "rope.inv_freq" in message and not list(tmp_path.iterdir())


MEASURE_LOAD = """
import pathlib, sys
from modeling import checkpoints

def status(field):
  text = pathlib.Path("/proc/self/status").read_text()
  return int(text.split(field + ":")[1].split()[0]) * 1024

def load(directory):
  config = checkpoints.load_config(directory)
  return checkpoints.load_model(directory, config=config)

small = load(sys.argv[2])  # what a first load leaves behind is not the model's
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak
before = status("VmRSS")
large = load(sys.argv[1])
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux"
)
def test_a_load_takes_the_model_and_one_tensor(tmp_path):
  config = DENSE.replace(
      hidden_size=512, intermediate_size=8192, param_dtype="bfloat16"
  )
  for name, size in (("large", config), ("small", DENSE)):
    zeros = {
        name: np.zeros(shape, ml_dtypes.bfloat16)
        for name, shape in official_shapes(size).items()
    }
    write(tmp_path / name, named(zeros), size)
  large = (tmp_path / "large" / "model.safetensors").stat().st_size
  assert large > 200e6
  result = subprocess.run(
      [
          sys.executable,
          "-c",
          MEASURE_LOAD,
          tmp_path / "large",
          tmp_path / "small",
      ],
      capture_output=True,
      check=True,
      text=True,
      timeout=120,
      cwd=pathlib.Path(__file__).parents[2],
  )
  # Measured: the model and 11 MB; a tensor is 8 MB, a stacked leaf 50 MB.
  assert int(result.stdout) < large + 16e6

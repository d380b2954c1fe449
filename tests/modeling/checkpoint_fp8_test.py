"""Checkpoints whose weights are in FP8, with a scale for each block."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from modeling import (
    checkpoint_files,
    checkpoint_fp8,
    checkpoint_names,
    checkpoints,
    presets,
)
from tests.random_model import random_model

# Weights of less than a block, of whole ones, and of some and a part.
CONFIG = presets.preset("tiny-glm").replace(
    vocab_size=32,
    hidden_size=144,
    intermediate_size=256,
    num_hidden_layers=3,
    n_routed_experts=2,
    indexer_types=("full", "full", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse"),
)
WIDE = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj")
ONE = "model.layers.0.mlp.up_proj.weight"  # [256, 144]


def quantised(tensors):
  """The same as published in FP8, and what its weights then are."""
  stored, exact = {}, {}
  for name, tensor in tensors.items():
    if any(part in name for part in WIDE):
      stored[name] = exact[name] = tensor
      continue
    rows, columns = (-(-size // 128) for size in tensor.shape)
    scale = np.empty((rows, columns), np.float32)
    values = np.empty(tensor.shape, ml_dtypes.float8_e4m3fn)
    exact[name] = np.empty_like(tensor)
    for row in range(rows):
      for column in range(columns):
        block = np.s_[
            128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)
        ]
        scale[row, column] = np.abs(tensor[block]).max() / 448
        values[block] = tensor[block] / scale[row, column]
        exact[name][block] = (
            values[block].astype(np.float32) * scale[row, column]
        )
    stored |= {name: values, f"{name}_scale_inv": scale}
  return stored, exact


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Tensors of a checkpoint in FP8, and those that it stands for."""
  directory = tmp_path_factory.mktemp("wide") / "model"
  checkpoints.save_model(random_model(CONFIG), directory)
  return quantised(load_file(directory / "model.safetensors"))


def load(directory, tensors, config=CONFIG):
  """Loads a checkpoint of two files: a scale may be in the other one."""
  names = sorted(tensors)
  shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, part in shards.items():
    save_file({name: tensors[name] for name in part}, directory / file)
  (directory / checkpoint_files.INDEX_FILE).write_text(
      '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
  )
  return checkpoints.load_model(directory, config=config)


def refusal(directory, tensors):
  with pytest.raises(ValueError) as caught:
    load(directory, tensors)
  return str(caught.value)


def test_weights_are_values_times_the_scale_of_their_block(tmp_path, files):
  stored, exact = files
  assert stored[ONE].dtype == ml_dtypes.float8_e4m3fn
  assert stored[ONE + "_scale_inv"].shape == (2, 2)
  model, report = load(tmp_path, stored)
  assert report.loaded == len(exact)
  assert not report.fresh and not report.mtp
  checkpoints.save_model(model, tmp_path / "out")
  saved = load_file(tmp_path / "out" / "model.safetensors")
  assert saved.keys() == exact.keys()
  for name, tensor in exact.items():
    np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


def test_the_product_is_rounded_once(tmp_path, files):
  stored, exact = files
  model, _ = load(tmp_path, stored, CONFIG.replace(param_dtype="bfloat16"))
  leaf = checkpoint_names.leaves(model)[
      ("runs", "0", "full_layer", "mlp", "up_proj", "kernel")
  ]
  np.testing.assert_array_equal(
      leaf[0], exact[ONE].T.astype(ml_dtypes.bfloat16)
  )


def test_a_weight_without_its_scale_is_named(tmp_path, files):
  stored = dict(files[0])
  del stored[ONE + "_scale_inv"]
  message = refusal(tmp_path, stored)
  assert "1 missing:\n    layers.0.mlp.up_proj.weight_scale_inv" in message
  assert "unexpected" not in message and "unsupported" not in message


def test_a_scale_of_other_blocks_is_named(tmp_path, files):
  stored = dict(files[0])
  stored[ONE + "_scale_inv"] = np.ones((2, 1), np.float32)
  message = refusal(tmp_path, stored)
  assert f"1 misshaped:\n    {ONE}_scale_inv (2, 1), want (2, 2)" in message


def test_a_scale_without_a_weight_in_fp8_is_named(tmp_path, files):
  stored = files[0] | {ONE: files[1][ONE]}
  stored["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)
  message = refusal(tmp_path, stored)
  assert (
      f"2 unexpected:\n    {ONE}_scale_inv\n    model.norm.weight_scale_inv"
      in message
  )


def test_a_scale_of_an_integer_dtype_is_named(tmp_path, files):
  stored = files[0] | {ONE + "_scale_inv": np.ones((2, 2), np.uint8)}
  message = refusal(tmp_path, stored)
  assert f"1 of an unsupported dtype:\n    {ONE}_scale_inv U8" in message


def test_a_vector_in_fp8_is_refused(tmp_path, files):
  name = "model.norm.weight"
  stored = dict(files[0])
  stored[name] = stored[name].astype(ml_dtypes.float8_e4m3fn)
  stored[name + "_scale_inv"] = np.ones((2,), np.float32)
  assert f"of an unsupported dtype:\n    {name} F8_E4M3" in refusal(
      tmp_path, stored
  )


def test_all_experts_may_be_in_one_tensor(tmp_path):
  """Each has blocks of its own: scales are [E, blocks, blocks]."""
  rng = np.random.default_rng(0)
  values = rng.normal(size=(3, 130, 260)).astype(ml_dtypes.float8_e4m3fn)
  scale = rng.uniform(1, 2, size=(3, 2, 3)).astype(np.float32)
  assert checkpoint_fp8.scale_shape(values.shape) == scale.shape
  save_file({"w": values, "s": scale}, tmp_path / "model.safetensors")
  with checkpoint_files.open_tensors(tmp_path) as stored:
    weight = checkpoint_fp8.ScaledTensor(
        values=stored["w"], scale=stored["s"]
    ).read()
  expanded = scale.repeat(128, axis=1).repeat(128, axis=2)[:, :130, :260]
  np.testing.assert_array_equal(weight, values.astype(np.float32) * expanded)

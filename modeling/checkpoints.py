"""Hugging Face checkpoints in and out.

Loading, with one tensor and one shard of a leaf in host memory:

1. Read the headers of all files; name all that is missing, unexpected or of
   another shape at once, before anything is allocated.
2. For each shard of each leaf that a device of this process is to have,
   allocate it and fill it with what the tensors have of it.
3. Put it on its device and free it here. What several shards have a part of is
   read for each of them.

Saving gathers one tensor at a time. Of several processes, each reads the files,
and process 0 alone writes.
"""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from modeling.checkpoint_family import family
from modeling.checkpoint_files import open_tensors, read_json, write_tensors
from modeling.checkpoint_match import match
from modeling.checkpoint_names import (
    LeafPath,
    leaves,
    places,
    prefixed,
    variables,
)
from modeling.decoder_config import DecoderConfig
from modeling.models import Model, abstract_model, make_model, read_config
from modeling.sharding import make_mesh, names, replicate, sharding, shardings
from pallas_kernels.shapes import wide_dtype

CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
  """What a load did with the tensors of the files."""

  loaded: int  # tensors that went into the model, scales not counted
  vision: tuple[str, ...]  # skipped: the vision tower
  mtp: tuple[str, ...]  # skipped: multi-token prediction
  fresh: tuple[str, ...]  # leaves that no file holds: adapters


def load_config(
    directory: str | os.PathLike[str], **changes: Any
) -> DecoderConfig:
  """Reads the configuration of a checkpoint.

  Args:
    directory: holds `config.json`.
    **changes: fields of the configuration that the file does not hold
      (`dtype`, `param_dtype`, `lora`).

  Raises:
    ValueError: names the directory and what is missing or not supported.
  """
  try:
    config = read_json(pathlib.Path(directory) / CONFIG_FILE)
    return read_config(config, **changes)
  except ValueError as error:
    raise ValueError(f"directory={str(directory)!r}: {error}") from error


def load_model(
    directory: str | os.PathLike[str],
    *,
    config: DecoderConfig,
    mesh: Mesh | None = None,
    lora_seed: int = 0,
) -> tuple[Model, LoadReport]:
  """Reads a checkpoint into a new model.

  Text-only files and the text part of vision-language files are read, with one
  tensor for all experts of a layer or one for each. Weights in FP8 are
  multiplied with the scales of their blocks. Every leaf gets the dtype that the
  model gives it: `A_log`, `dt_bias` and the norm of Gated DeltaNet, and a
  router with its bias, are in float32 whatever `param_dtype` is.

  Args:
    directory: holds `model.safetensors`, or shards and their index.
    config: the model, as `load_config` returns it.
    mesh: where the weights are to lie, each by the names of its axes; default:
      one device.
    lora_seed: adapters are not in the files: they are drawn as a new model with
      this seed would draw them.

  Returns:
    The model, and what was loaded and skipped.

  Raises:
    ValueError: names every tensor that is missing, unexpected, or of another
      shape or dtype than the model wants, or the file that cannot be read.
  """
  directory = pathlib.Path(directory)
  mesh = make_mesh() if mesh is None else mesh
  with open_tensors(directory) as stored:
    matched = match(directory, stored, config)

    values = _fresh_adapters(config, lora_seed, mesh)
    adapters = tuple(values)
    for path, variable in variables(nnx.state(abstract_model(config))).items():
      if path not in adapters:
        values[path] = _load_leaf(
            path,
            variable.get_value(),
            matched,
            sharding(mesh, names(variable)),
        )
  report = LoadReport(
      loaded=len(matched.pairs),
      vision=matched.vision,
      mtp=matched.mtp,
      fresh=tuple(".".join(path) for path in adapters),
  )
  logging.info(
      "%s: %d tensors loaded, %d of vision and %d of MTP skipped, %d adapter"
      " leaves drawn", directory, report.loaded, len(report.vision),
      len(report.mtp), len(report.fresh),
  )  # fmt: skip
  return assemble(config, values, mesh=mesh), report


def assemble(
    config: DecoderConfig,
    values: Mapping[LeafPath, jax.Array],
    *,
    mesh: Mesh | None = None,
) -> Model:
  """Returns a model with the given weights, one for each leaf path.

  They are taken as they are: where they are to lie is the caller's affair.
  """
  graphdef, state = nnx.split(abstract_model(config, mesh=mesh))
  flat = [
      (path, variable.replace(values[path]))
      for path, variable in variables(state).items()
  ]
  return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save_model(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: float = 5e9,
) -> None:
  """Writes a text-only checkpoint that transformers loads.

  Adapters are merged into their kernels, W + (alpha / rank) A B, computed in
  float32 and rounded to the dtype of W: the file has no trace of them. Experts
  are written as in the official files of the architecture, as one tensor a
  layer or one an expert. Tokenizer and
  `generation_config.json` are to be copied from the checkpoint that was loaded.

  The directory appears when it is complete: files are written to a temporary
  directory beside it, which is then renamed. Every process must call this; one
  that does not write is let go when the last tensor is gathered.

  Args:
    model: all weights, adapters included.
    directory: absent or empty.
    max_shard_bytes: largest file, and the most that is in host memory at once.

  Raises:
    ValueError: if the directory is not empty, or the configuration cannot be
      expressed in a `config.json`.
  """
  directory = pathlib.Path(directory)
  if directory.exists() and (
      not directory.is_dir() or any(directory.iterdir())
  ):
    raise ValueError(
        f"directory={str(directory)!r} exists and is not an empty directory:"
        " name a new one"
    )
  config = json.dumps(model.config.to_hf(), indent=2) + "\n"
  weights = leaves(model)
  found = places(model.config, per_expert=family(model.config).per_expert)
  wanted = {prefixed(name): place for name, place in found.items()}
  nbytes = {
      name: math.prod(place.shape) * weights[place.path].dtype.itemsize
      for name, place in wanted.items()
  }

  def read(name):
    place = wanted[name]
    merged = _merged(weights, place, model)
    tensor = np.empty(place.shape, merged.dtype)
    _copy(tensor, place.to_checkpoint(merged))
    return tensor

  if jax.process_index() > 0:
    for place in wanted.values():
      jax.block_until_ready(_gathered(weights, place, model.mesh))
    return
  directory.parent.mkdir(parents=True, exist_ok=True)
  partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
  partial.mkdir()
  try:
    (partial / CONFIG_FILE).write_text(config)
    write_tensors(partial, nbytes, read, max_shard_bytes=max_shard_bytes)
    partial.rename(directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


_ALIGNMENT = 64  # bytes; what XLA's CPU client asks of a buffer
_COLUMNS = 256  # a block of a transposed copy: it stays in the cache


def _load_leaf(path, leaf, matched, layout):
  """Reads a leaf; a process reads the shards of its own devices alone."""
  pairs = [pair for pair in matched.pairs if pair[1].path == path]
  shards = []
  indices = layout.addressable_devices_indices_map(leaf.shape)
  for device, index in indices.items():
    # No name for the shard: it is to be freed before the next is allocated.
    on_device = jax.device_put(_fill(leaf, pairs, index), device)
    shards.append(on_device.block_until_ready())
  return jax.make_array_from_single_device_arrays(leaf.shape, layout, shards)


def _fill(leaf, pairs, index):
  """Reads what the tensors have of a shard into an array of its shape."""
  bounds = [s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True)]
  array = _empty([stop - start for start, stop in bounds], leaf.dtype)
  for tensor, place in pairs:
    target, source = [], []
    for part, (start, stop) in zip(
        place.region(leaf.shape), bounds, strict=True
    ):
      low, high = max(part.start, start), min(part.stop, stop)
      target.append(slice(low - start, max(high - start, 0)))
      source.append(slice(low - part.start, high - part.start))
    if array[tuple(target)].size:
      tensor = place.to_model(tensor.read())
      stacked = (None,) * (array.ndim - tensor.ndim)
      _copy(array[tuple(target)], tensor[stacked][tuple(source)])
  return array


def _empty(shape, dtype):
  """Allocates an array that JAX takes over on a CPU instead of copying it."""
  nbytes = math.prod(shape) * dtype.itemsize
  buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
  start = -buffer.ctypes.data % _ALIGNMENT
  return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _copy(target, source):
  """Copies, and casts; by blocks if transposed, which is four times as fast."""
  if source.flags.c_contiguous:
    target[...] = source
    return
  for start in range(0, target.shape[-1], _COLUMNS):
    block = (..., slice(start, start + _COLUMNS))
    target[block] = source[block]


def _fresh_adapters(config, seed, mesh):
  """Returns the adapters of a new model, whose other weights are never made."""
  if config.lora is None:
    return {}
  draw = lambda: nnx.state(
      make_model(config, rngs=nnx.Rngs(seed), mesh=mesh), nnx.LoRAParam
  )
  drawn = jax.jit(
      draw,
      out_shardings=shardings(jax.eval_shape(draw), mesh),
      # It runs once, and would compile for 20 s instead of 1.
      compiler_options={"xla_backend_optimization_level": 0},
  )()
  return {path: x.get_value() for path, x in variables(drawn).items()}


def _merged(weights, place, model):
  """Returns what a place holds on the host, its adapter merged into it."""
  array, *adapter = map(np.asarray, _gathered(weights, place, model.mesh))
  array = place.within(array)
  if not adapter:
    return array
  dtype = wide_dtype(array.dtype)
  a, b = (part.astype(dtype) for part in adapter)
  lora = model.config.lora
  scale = np.asarray(lora.alpha / lora.rank, dtype)
  merged = array.astype(dtype) + scale * place.product(a, b)
  return merged.astype(array.dtype)


def _gathered(weights, place, mesh):
  """Returns a leaf's layer or expert, and its adapter's, whole everywhere."""
  paths = [place.path, *(x for x in place.adapter if x in weights)]
  return [
      _part(weights[path], place.layer, place.expert, mesh=mesh)
      for path in paths
  ]


@partial(jax.jit, static_argnames="mesh")
def _part(leaf, layer, expert, *, mesh):
  """No leaf is cut by layers, so that this gathers no more than is wanted."""
  part = leaf[layer]
  if expert is not None:
    # Leaves are cut by experts, and an index would gather all of them first.
    wanted = jnp.arange(len(part)) == expert
    wanted = wanted.reshape(-1, *[1] * (part.ndim - 1))
    part = jnp.where(wanted, part, 0).sum(0, dtype=part.dtype)
  return replicate(part, mesh)

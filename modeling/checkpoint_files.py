"""Directories of safetensors files: read one tensor at a time, write in shards.

Nothing here knows a model. A directory holds `model.safetensors`, or shards and
`model.safetensors.index.json` that names the shard of each tensor.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FP8 = "F8_E4M3"  # as safetensors writes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
  """A tensor in a file that is open."""

  name: str
  dtype: str  # as safetensors writes it: "BF16"
  shape: tuple[int, ...]
  file: "safetensors.safe_open"
  path: pathlib.Path  # of the file
  start: int  # of the tensor in the file, in bytes

  def read(self) -> np.ndarray:
    """Reads the tensor into memory of its own."""
    if self.dtype != FP8:
      return self.file.get_tensor(self.name)
    # safetensors looks for this type in NumPy, which has none.
    values = np.fromfile(
        self.path, np.uint8, math.prod(self.shape), offset=self.start
    )
    return values.view(jnp.float8_e4m3fn).reshape(self.shape)


@contextlib.contextmanager
def open_tensors(
    directory: pathlib.Path,
) -> Iterator[Mapping[str, StoredTensor]]:
  """Opens every file of a checkpoint and yields its tensors by name.

  Files are read with `pread`: mapped pages would count as this process's
  memory for as long as the file is open.

  Raises:
    ValueError: if a file is absent or no safetensors file, or two files hold a
      tensor of one name.
  """
  with contextlib.ExitStack() as stack:
    tensors = {}
    for path in _tensor_files(directory):
      file = stack.enter_context(_open(path))
      starts = _starts(path)
      for name in file.keys():  # noqa: SIM118, it is no mapping
        if name in tensors:
          raise ValueError(f"{path}: tensor {name!r} is in another shard too")
        part = file.get_slice(name)
        tensors[name] = StoredTensor(
            name=name,
            dtype=part.get_dtype(),
            shape=tuple(part.get_shape()),
            file=file,
            path=path,
            start=starts[name],
        )
    yield tensors


def write_tensors(
    directory: pathlib.Path,
    nbytes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    *,
    max_shard_bytes: float,
) -> None:
  """Writes tensors in the order of `nbytes`; one shard is in memory at a time.

  Args:
    directory: exists, and is empty of checkpoints.
    nbytes: size of each tensor by name.
    read: returns the tensor of a name.
    max_shard_bytes: a shard is closed before it outgrows this; a tensor larger
      than it gets a shard of its own.
  """
  shards = _shards(nbytes, max_shard_bytes)
  files = [
      f"model-{i:05}-of-{len(shards):05}.safetensors"
      for i in range(1, len(shards) + 1)
  ]
  if len(shards) == 1:
    files = [SINGLE_FILE]
  for file, names in zip(files, shards, strict=True):
    tensors = {name: np.ascontiguousarray(read(name)) for name in names}
    # Other readers take the format for a list of frameworks they know.
    safetensors.numpy.save_file(
        tensors, directory / file, metadata={"format": "pt"}
    )
  if len(shards) > 1:
    weight_map = {
        name: file
        for file, names in zip(files, shards, strict=True)
        for name in names
    }
    index = {
        "metadata": {"total_size": sum(nbytes.values())},
        "weight_map": weight_map,
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _shards(nbytes, max_shard_bytes):
  shards, room = [], -math.inf
  for name, size in nbytes.items():
    if size > room:
      shards.append([])
      room = max_shard_bytes
    shards[-1].append(name)
    room -= size
  return shards


def read_json(path: pathlib.Path) -> dict:
  """Reads a JSON object.

  Raises:
    ValueError: if the file is absent or holds anything else.
  """
  try:
    value = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise ValueError(f"{path} does not exist") from error
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds a {type(value).__name__}: want an object")
  return value


def _tensor_files(directory):
  """Returns the files that the index names, or the single file."""
  index = directory / INDEX_FILE
  if not index.exists():
    if not (directory / SINGLE_FILE).exists():
      raise ValueError(
          f"directory={str(directory)!r} has neither {SINGLE_FILE} nor"
          f" {INDEX_FILE}"
      )
    return [directory / SINGLE_FILE]
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index} has no weight_map: it names no shard")
  files = [directory / file for file in sorted(set(weight_map.values()))]
  absent = [file.name for file in files if not file.exists()]
  if absent:
    raise ValueError(
        f"directory={str(directory)!r} lacks {', '.join(absent)}, named in"
        f" {INDEX_FILE}: was the download cut short?"
    )
  return files


def _open(path):
  try:
    return safetensors.safe_open(path, framework="np", backend="pread")
  except safetensors.SafetensorError as error:
    raise ValueError(
        f"{path} is damaged or no safetensors file ({error}): fetch it again"
    ) from error


def _starts(path):
  """Returns where each tensor of a sound file starts."""
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
  header.pop("__metadata__", None)
  return {
      name: 8 + size + entry["data_offsets"][0]
      for name, entry in header.items()
  }

"""Where each tensor of a Hugging Face checkpoint stands in the model.

Our leaves carry the checkpoint's names, so the map is derived from the model:

1. Layers are stacked. With n layers a block, layer i is linear layer i % n of
   block i // n, or its full layer when i % n = n - 1.
2. Kernels are transposed: [out, in] there, [in, out] here. The convolution is
   [channels, 1, taps] there, [taps, channels] here.
3. Experts are one tensor a layer, or one an expert with gate and up apart.
"""

import dataclasses
import enum
import re
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from modeling.qwen3_5 import abstract_model
from modeling.qwen3_5_config import Qwen3_5Config

LeafPath = tuple[str, ...]


class Layout(enum.Enum):
  """How the axes of a tensor differ between checkpoint and model."""

  SAME = enum.auto()
  TRANSPOSED = enum.auto()  # the last two axes
  CONV = enum.auto()  # [channels, 1, taps] -> [taps, channels]


@dataclasses.dataclass(frozen=True)
class Place:
  """The part of a leaf that one tensor of the checkpoint fills."""

  path: LeafPath
  index: tuple[int | slice, ...]
  layout: Layout
  shape: tuple[int, ...]  # of the tensor in the checkpoint

  def to_model(self, tensor: np.ndarray) -> np.ndarray:
    """Returns a view of the checkpoint's tensor with the model's axes."""
    if self.layout is Layout.CONV:
      tensor = tensor[:, 0]
    return tensor if self.layout is Layout.SAME else tensor.swapaxes(-1, -2)

  def to_checkpoint(self, part: np.ndarray) -> np.ndarray:
    """Returns a view of `leaf[index]` with the checkpoint's axes."""
    if self.layout is not Layout.SAME:
      part = part.swapaxes(-1, -2)
    return part[:, None] if self.layout is Layout.CONV else part


def places(
    config: Qwen3_5Config, *, per_expert: bool = False
) -> dict[str, Place]:
  """Returns the place of every tensor of a text checkpoint, in layer order.

  Args:
    config: the model; adapters are not in a checkpoint.
    per_expert: whether each expert has tensors of its own.

  Returns:
    Places by name, without the prefix `model.` that all but the head carry.
  """
  found = []
  for path, leaf in leaves(abstract_model(config.replace(lora=None))).items():
    for layer, stack in _layers(path, config):
      for name, index, layout in _parts(path, leaf.shape, per_expert):
        index = stack + index
        place = Place(path, index, layout, ())
        part = np.broadcast_to(np.int8(0), leaf.shape)[index]
        shape = place.to_checkpoint(part).shape
        name = name if layer is None else f"layers.{layer}.{name}"
        found.append((layer, name, dataclasses.replace(place, shape=shape)))
  found.sort(key=lambda item: -1 if item[0] is None else item[0])
  return {name: place for _, name, place in found}


def variables(state: nnx.State) -> dict[LeafPath, nnx.Variable]:
  """Returns the variables of a state by path."""
  return {tuple(map(str, path)): x for path, x in nnx.to_flat_state(state)}


def leaves(model: nnx.Module) -> dict[LeafPath, jax.Array]:
  """Returns the model's weights by path."""
  found = variables(nnx.state(model))
  return {path: variable.get_value() for path, variable in found.items()}


def plain_name(name: str) -> str:
  """Returns `name` without the prefix that tells what wraps the decoder."""
  return _PREFIX.sub("", name)


def prefixed(name: str) -> str:
  """Returns the name that transformers gives it in a text-only checkpoint."""
  return name if name.startswith("lm_head.") else f"model.{name}"


_PREFIX = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)"
)

# The last name of a leaf -> the checkpoint's, where they differ.
_RENAMED = {
    "kernel": "weight",
    "embed_tokens": "embed_tokens.weight",
    "conv1d": "conv1d.weight",
    "gate": "gate.weight",
    "gate_up_proj": "experts.gate_up_proj",
    "down_proj": "experts.down_proj",
}
_TRANSPOSED = ("kernel", "gate", "gate_up_proj", "down_proj")


def _layers(
    path: LeafPath, config: Qwen3_5Config
) -> Iterator[tuple[int | None, tuple[int, ...]]]:
  """Yields each layer that the leaf holds, and its index in the leaf."""
  if path[0] != "blocks":
    yield None, ()
    return
  interval = config.full_attention_interval
  for layer in range(config.num_hidden_layers):
    block, within = divmod(layer, interval)
    if path[1] == "full_layer" and within == interval - 1:
      yield layer, (block,)
    elif path[1] == "linear_layers" and within < interval - 1:
      yield layer, (block, within)


def _parts(path, shape, per_expert):
  """Yields name, index and layout of the tensors of one layer of a leaf."""
  *parents, last = path[2:] if path[0] == "blocks" else path
  layout = Layout.CONV if last == "conv1d" else Layout.SAME
  layout = Layout.TRANSPOSED if last in _TRANSPOSED else layout
  if per_expert and last in ("gate_up_proj", "down_proj"):
    experts, inner = shape[-3], shape[-1] // 2
    halves = {"gate_proj": slice(inner), "up_proj": slice(inner, None)}
    columns = halves if last == "gate_up_proj" else {last: slice(None)}
    for expert in range(experts):
      for name, column in columns.items():
        name = ".".join([*parents, "experts", str(expert), name, "weight"])
        yield name, (expert, slice(None), column), layout
  else:
    yield ".".join([*parents, _RENAMED.get(last, last)]), (), layout

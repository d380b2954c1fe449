"""Where each tensor of a Hugging Face checkpoint stands in the model.

Our leaves carry the checkpoint's names, so the map is derived from the model:

1. Layers are stacked: where each stands, `modeling.checkpoint_family` tells.
2. Kernels are transposed: [out, in] there, [in, out] here. The convolution is
   [channels, 1, taps] there, [taps, channels] here.
3. Experts are one tensor a layer, or one an expert with gate and up apart.
"""

import dataclasses
import enum
import re

import jax
import numpy as np
from flax import nnx

from modeling.checkpoint_family import LeafPath, family
from modeling.decoder_config import DecoderConfig
from modeling.models import abstract_model


class Layout(enum.Enum):
  """How the axes of a tensor differ between checkpoint and model."""

  SAME = enum.auto()
  TRANSPOSED = enum.auto()  # the last two axes
  CONV = enum.auto()  # [channels, 1, taps] -> [taps, channels]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """The part of a leaf that one tensor of the checkpoint fills."""

  path: LeafPath
  layer: tuple[int, ...]  # index of the layer in the leaf
  expert: int | None = None  # which of the layer's; None: all
  half: int | None = None  # 0 = gate, 1 = up; None: both, or there are none
  layout: Layout
  shape: tuple[int, ...] = ()  # of the tensor in the checkpoint

  @property
  def adapter(self) -> tuple[LeafPath, LeafPath]:
    """Paths of the A and B that the leaf has if it is adapted."""
    *parents, last = self.path
    prefix = "" if last == "kernel" else f"{last}_"
    return (*parents, f"{prefix}lora_a"), (*parents, f"{prefix}lora_b")

  def region(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns where in a leaf of this shape the part is, by axis."""
    stacked = self.layer if self.expert is None else (*self.layer, self.expert)
    within = [slice(0, size) for size in shape[len(stacked) :]]
    if self.half is not None:
      size = shape[-1] // 2
      within[-1] = slice(self.half * size, (self.half + 1) * size)
    return *[slice(i, i + 1) for i in stacked], *within

  def part(self, leaf: np.ndarray) -> np.ndarray:
    """Returns a view of the part."""
    leaf = leaf[self.layer]
    return self.within(leaf if self.expert is None else leaf[self.expert])

  def within(self, array: np.ndarray) -> np.ndarray:
    """Returns a view of the part of its layer, or of its expert if it has."""
    if self.half is None:
      return array
    return np.split(array, 2, axis=-1)[self.half]

  def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns A B as the part; a, b are of the layer, or of the expert."""
    if self.half is not None:
      return a[self.half] @ b[self.half]
    product = a @ b
    if product.ndim > len(self.shape):  # gate and up have an axis: [E, 2, D, F]
      product = np.concatenate(np.moveaxis(product, -3, 0), axis=-1)
    return product

  def to_model(self, tensor: np.ndarray) -> np.ndarray:
    """Returns a view of the checkpoint's tensor with the model's axes."""
    if self.layout is Layout.CONV:
      tensor = tensor[:, 0]
    return tensor if self.layout is Layout.SAME else tensor.swapaxes(-1, -2)

  def to_checkpoint(self, part: np.ndarray) -> np.ndarray:
    """Returns a view of the part with the checkpoint's axes."""
    if self.layout is not Layout.SAME:
      part = part.swapaxes(-1, -2)
    return part[:, None] if self.layout is Layout.CONV else part


def places(
    config: DecoderConfig, *, per_expert: bool = False
) -> dict[str, Place]:
  """Returns the place of every tensor of a text checkpoint, in layer order.

  Args:
    config: the model; adapters are not in a checkpoint.
    per_expert: whether each expert has tensors of its own.

  Returns:
    Places by name, without the prefix `model.` that all but the head carry.
  """
  found = []
  stacks = family(config).stacks
  for path, leaf in leaves(abstract_model(config.replace(lora=None))).items():
    stack = next((x for x in stacks if path[: len(x)] == x), ())
    filled = np.broadcast_to(np.int8(0), leaf.shape)
    for layer, index in stacks.get(stack, [(None, ())]):
      prefix = "" if layer is None else f"layers.{layer}."
      for name, place in _parts(path, len(stack), index, leaf, per_expert):
        shape = place.to_checkpoint(place.part(filled)).shape
        place = dataclasses.replace(place, shape=shape)
        found.append((layer, prefix + name, place))
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
}
_LAYOUTS = {
    "kernel": Layout.TRANSPOSED,
    "gate": Layout.TRANSPOSED,
    "gate_up_proj": Layout.TRANSPOSED,
    "down_proj": Layout.TRANSPOSED,
    "conv1d": Layout.CONV,
}
# An expert's tensors, and which half of the leaf each is.
_OF_EXPERT: dict[str, tuple[tuple[str, int | None], ...]] = {
    "gate_up_proj": (("gate_proj", 0), ("up_proj", 1)),
    "down_proj": (("down_proj", None),),
}


def _parts(path: LeafPath, start, layer, leaf, per_expert):
  """Yields name and place of the tensors of one layer of a leaf."""
  *parents, last = path[start:]
  place = Place(path=path, layer=layer, layout=_LAYOUTS.get(last, Layout.SAME))
  if not (per_expert and last in _OF_EXPERT):
    yield ".".join([*parents, _RENAMED.get(last, last)]), place
    return
  for expert in range(leaf.shape[-3]):
    for name, half in _OF_EXPERT[last]:
      name = ".".join([*parents, str(expert), name, "weight"])
      yield name, dataclasses.replace(place, expert=expert, half=half)

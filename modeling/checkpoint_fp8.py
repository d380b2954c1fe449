"""Weights in FP8: e4m3 values, and a scale for each block of 128 x 128.

A weight is value * scale of its block. Blocks begin at the first row and
column, so that the last ones may be cut. The scale of `x.weight` is named
`x.weight_scale_inv`, although one multiplies with it.
"""

import dataclasses

import numpy as np

from modeling.checkpoint_files import FP8, StoredTensor

BLOCK = 128
_SUFFIX = "_scale_inv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledTensor:
  """A weight that two tensors make up."""

  values: StoredTensor
  scale: StoredTensor

  def read(self) -> np.ndarray:
    """Reads both and multiplies, in float32."""
    values = self.values.read()
    scale = self.scale.read().astype(np.float32)
    weight = np.empty(values.shape, np.float32)
    columns = values.shape[-1]
    for block in range(scale.shape[-2]):
      # Row by row of blocks: a scale is never expanded to a whole weight.
      rows = (..., slice(block * BLOCK, (block + 1) * BLOCK), slice(None))
      along = np.repeat(scale[..., block, :], BLOCK, axis=-1)[..., :columns]
      weight[rows] = values[rows].astype(np.float32) * along[..., None, :]
    return weight


def has_scale(tensor: StoredTensor) -> bool:
  """Whether it is a weight beside which a scale belongs."""
  return tensor.dtype == FP8 and len(tensor.shape) > 1


def scale_name(name: str) -> str:
  """Returns the name of the scale of a weight."""
  return name + _SUFFIX


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of the scale of a weight."""
  return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def take_scales(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
  """Removes the scale of each FP8 weight, and returns them by weight."""
  return {
      name: tensors.pop(scale_name(name))
      for name, tensor in list(tensors.items())
      if has_scale(tensor) and scale_name(name) in tensors
  }

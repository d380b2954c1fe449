"""Names for the arrays of a pytree, and a fingerprint of frozen weights."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lstraw_jax.policy import Policy

_SAMPLED = 4096  # elements of each frozen weight that its fingerprint reads


def fingerprint(policy: Policy) -> dict[str, str]:
  """Returns shape, dtype and a hash of some elements of each frozen weight.

  Raises:
    ValueError: for a weight that is not loaded.
  """
  weights = named_leaves(policy.frozen)
  for name, weight in weights.items():
    if isinstance(weight, jax.ShapeDtypeStruct):
      raise ValueError(f"policy.frozen.{name}={weight}: want a loaded weight")
  indices = {name: _spread(x.shape) for name, x in weights.items()}
  samples = jax.device_get(_take(weights, indices))
  hashes = {
      name: hashlib.sha256(sample.tobytes()).hexdigest()[:16]
      for name, sample in samples.items()
  }
  kinds = specs(weights)
  return {name: f"{kinds[name]} sha256:{hashes[name]}" for name in weights}


def named_leaves(
    tree: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
  """Returns the leaves of a tree by their dotted path, in the tree's order."""
  named = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
    if path[-1:] == (jax.tree_util.GetAttrKey("value"),):
      path = path[:-1]  # how flax gets from a variable to its array
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    assert name not in named, f"two leaves called {name}"
    named[name] = leaf
  return named


def specs(arrays: Mapping[str, Any]) -> dict[str, str]:
  """Returns dtype and shape of arrays, as "float32[2, 3]"."""
  return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


@jax.jit
def _take(arrays, indices):
  return {name: array[indices[name]] for name, array in arrays.items()}


def _spread(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
  """Returns indices of up to `_SAMPLED` elements, all over the array."""
  size = math.prod(shape)
  index = np.arange(min(size, _SAMPLED))
  stride = max(size // _SAMPLED, 1)
  # Scattered within each stride by Knuth's multiplicative hash, since a stride
  # that the rows divide would stay in the same columns.
  offset = (index * 2654435761 % 2**32) * stride >> 32
  return np.unravel_index(index * stride + offset, shape)

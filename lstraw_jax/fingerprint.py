"""A fingerprint of frozen weights: are they still those of a checkpoint?"""

import hashlib
import math
from functools import partial

import jax
import numpy as np

from lstraw_jax.named_leaves import named_leaves, specs
from lstraw_jax.policy import Policy
from modeling.sharding import replicate

_SAMPLED = 4096  # elements of each frozen weight that its fingerprint reads


def fingerprint(policy: Policy) -> dict[str, str]:
  """Returns shape, dtype and a hash of some elements of each frozen weight.

  It does not depend on the mesh that the weights lie on, and is the same in
  every process.

  Raises:
    ValueError: for a weight that is not loaded.
  """
  weights = named_leaves(policy.frozen)
  for name, weight in weights.items():
    if isinstance(weight, jax.ShapeDtypeStruct):
      raise ValueError(f"policy.frozen.{name}={weight}: want a loaded weight")
  indices = {name: _spread(x.shape) for name, x in weights.items()}
  samples = jax.device_get(_take(weights, indices, mesh=policy.mesh))
  hashes = {name: _hash(sample) for name, sample in samples.items()}
  kinds = specs(weights)
  return {name: f"{kinds[name]} sha256:{hashes[name]}" for name in weights}


@partial(jax.jit, static_argnames="mesh")
def _take(arrays, indices, *, mesh):
  taken = {name: array[indices[name]] for name, array in arrays.items()}
  return replicate(taken, mesh)


def _hash(sample: np.ndarray) -> str:
  # Shards are added up, each with zeros for what it does not hold: -0 is lost.
  sample = np.where(sample == 0, np.zeros_like(sample), sample)
  return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def _spread(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
  """Returns indices of up to `_SAMPLED` elements, all over the array."""
  size = math.prod(shape)
  index = np.arange(min(size, _SAMPLED))
  stride = max(size // _SAMPLED, 1)
  # Scattered within each stride by Knuth's multiplicative hash, since a stride
  # that the rows divide would stay in the same columns.
  offset = (index * 2654435761 % 2**32) * stride >> 32
  return np.unravel_index(index * stride + offset, shape)

"""Bytes of everything that outlives a program, from shapes and the mesh alone.

They are those of real arrays, to the byte.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.optimizer import OptimizerConfig, make_optimizer
from lstraw_jax.policy import make_policy
from modeling.decoder_config import DecoderConfig
from modeling.layer_state import POSITION_AXES
from modeling.mesh_fit import check_mesh
from modeling.models import abstract_model
from modeling.sharding import AXES, names, shard_bytes
from pallas_kernels.shapes import wide_dtype


class KeptBytes(NamedTuple):
  """Bytes on each device."""

  trainable: int
  frozen: int
  gradients: int
  optimizer: int
  slots: int  # keys and values of one prompt state
  positions: int  # theirs, and the state's scalars
  recurrent: int  # of one state; a boundary is as large
  cotangent_slots: int
  cotangent_recurrent: int


def kept_bytes(workload: Workload) -> KeptBytes:
  """Counts what the arrays of an update take.

  Raises:
    ValueError: if the model does not fit the mesh.
  """
  sizes = (workload.data, workload.context, workload.tensor)
  return KeptBytes(
      **_weights(workload.model, workload.optimizer, sizes),
      **_state(workload, _mesh(sizes)),
  )


def recurrent_bytes(workload: Workload, *, cotangent: bool = False) -> int:
  """Returns the bytes of one recurrent state, or of its cotangent."""
  config = workload.model
  mesh = _mesh((workload.data, workload.context, workload.tensor))
  shapes = config.recurrent_shapes(batch=workload.data)
  if cotangent:
    shapes = jax.tree.map(_widened, shapes)
  count = lambda x, axes: shard_bytes(x, axes, mesh)
  sizes = jax.tree.map(count, shapes, config.recurrent_axes(mesh))
  return sum(jax.tree.leaves(sizes))


def slot_bytes(
    workload: Workload, *, slots: int, cotangent: bool = False
) -> int:
  """Returns the bytes of so many slots of a row, or of their cotangents."""
  shapes = workload.model.slot_shapes(batch=workload.data, slots=slots)
  if cotangent:
    narrow = workload.update.cotangent_dtype == "bfloat16"
    shapes = jax.tree.map(
        lambda x: x.update(dtype=jnp.bfloat16) if narrow else _widened(x),
        shapes.learned(workload.model.trained),
    )
  mesh = _mesh((workload.data, workload.context, workload.tensor))
  return sum(shard_bytes(x, shapes.AXES, mesh) for x in jax.tree.leaves(shapes))


@functools.cache
def _weights(
    config: DecoderConfig, optimizer: OptimizerConfig, sizes: tuple[int, ...]
) -> dict[str, int]:
  mesh = _mesh(sizes)
  check_mesh(config, mesh)
  policy = make_policy(abstract_model(config, mesh=mesh))
  init = make_optimizer(optimizer).init
  widened = jax.tree.map(_widened, policy.trainable)
  count = lambda tree: _tree_bytes(tree, mesh)
  return dict(
      trainable=count(policy.trainable),
      frozen=count(policy.frozen),
      gradients=count(widened),
      optimizer=count(jax.eval_shape(init, policy.trainable)),
  )


def _state(workload: Workload, mesh: Any) -> dict[str, int]:
  rows, slots = workload.data, workload.capacity
  positions = jax.ShapeDtypeStruct((rows, slots), jnp.int32)
  scalars = (2 * rows + 1) * 4  # length, next_token, policy_step
  return dict(
      slots=slot_bytes(workload, slots=slots),
      positions=shard_bytes(positions, POSITION_AXES, mesh) + scalars,
      recurrent=recurrent_bytes(workload),
      cotangent_slots=slot_bytes(workload, slots=slots, cotangent=True),
      cotangent_recurrent=recurrent_bytes(workload, cotangent=True),
  )


def _mesh(sizes) -> Any:
  return AbstractMesh(sizes, AXES)


def _tree_bytes(tree: Any, mesh: Any) -> int:
  """Counts weights by their names; what is no weight is whole everywhere."""
  is_weight = lambda x: isinstance(x, nnx.Variable)

  def count(leaf):
    if is_weight(leaf):
      return shard_bytes(leaf.get_value(), names(leaf), mesh)
    return math.prod(leaf.shape) * leaf.dtype.itemsize

  return sum(map(count, jax.tree.leaves(tree, is_leaf=is_weight)))


def _widened(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return x.update(dtype=wide_dtype(x.dtype))

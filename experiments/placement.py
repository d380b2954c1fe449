"""The mesh of a run, and whether all that is to lie on it fits."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lstraw_jax.prompt_state import check_memory_kind
from modeling.decoder_config import DecoderConfig
from modeling.mesh_fit import check_mesh
from modeling.sharding import MeshConfig


def read_mesh(
    config: Any, model: DecoderConfig, *, chunks: Sequence[str]
) -> Mesh:
  """Makes the mesh of a config.

  Args:
    config: the settings.
    model: what lies on the mesh.
    chunks: settings of `train` that count tokens which `mesh.context` shares.

  Raises:
    ValueError: for what does not fit it, with what would.
  """
  mesh = MeshConfig(**config.mesh).make()
  idle = set(range(jax.process_count()))
  idle -= {device.process_index for device in mesh.devices.flat}
  if idle:
    raise ValueError(
        f"mesh={dict(mesh.shape)} leaves processes {sorted(idle)} of"
        f" {jax.process_count()} without a device: one axis may be 'auto', or"
        " start fewer processes"
    )
  check_mesh(model, mesh)
  context, data = mesh.shape["context"], mesh.shape["data"]
  for name in chunks:
    tokens = config.train[name]
    if tokens % context:
      raise ValueError(
          f"train.{name}={tokens} over mesh.context={context} is"
          f" {tokens / context:.3g} tokens a device: want a multiple of"
          f" {context}, as {max(round(tokens / context), 1) * context}"
      )
  if config.train.prompts_per_step % data:
    raise ValueError(
        f"train.prompts_per_step={config.train.prompts_per_step}: want a"
        f" multiple of mesh.data={data}, which runs so many side by side"
    )
  for memory_kind in (config.state.memory_kind, config.optimizer.memory_kind):
    check_memory_kind(memory_kind, mesh)
  return mesh

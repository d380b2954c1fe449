"""How the data of a step is dealt out to the replicas of a mesh."""

from typing import Any

from jax.sharding import Mesh


def turns(config: Any, mesh: Mesh, position: int) -> list[range]:
  """Returns the places in the data of each turn of the step at `position`.

  A turn has as many as the mesh has replicas.
  """
  end = position + config.train.prompts_per_step
  rows = mesh.shape["data"]
  return [range(start, start + rows) for start in range(position, end, rows)]

"""The look-up of embeddings in a table whose rows lie over the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from modeling.sharding import RULES, spec
from pallas_kernels.shapes import typed


@typed
def look_up(
    table_VD: Float[Array, "vocab D"],
    tokens_BT: Int[Array, "B T"],
    *,
    mesh: Mesh,
) -> Float[Array, "B T D"]:
  """Returns the rows of the tokens, cut over `context` as a segment is.

  Each shard looks up the tokens whose rows it owns; a reduce-scatter puts them
  together. The table never moves, and neither does its gradient.
  """
  owners = RULES["vocab"]

  @partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(spec(("vocab", None)), spec(("batch", None))),
      out_specs=spec(("batch", "time", None)),
  )
  def look_up_owned(table, tokens):
    row = tokens - jax.lax.axis_index(owners) * table.shape[0]
    owned = (row >= 0) & (row < table.shape[0])
    x = jnp.where(owned[..., None], table[jnp.where(owned, row, 0)], 0.0)
    for axis in owners:
      if axis != "context":
        x = jax.lax.psum(x, axis)
    return jax.lax.psum_scatter(x, "context", scatter_dimension=1, tiled=True)

  return look_up_owned(table_VD, tokens_BT)

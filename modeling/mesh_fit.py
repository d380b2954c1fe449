"""Does a model fit a mesh? Known from its configuration, before a weight is."""

from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import DecoderConfig
from modeling.models import abstract_model
from modeling.sharding import check_fits


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
  """Refuses a mesh that does not divide the model's heads and weights.

  A head is never cut, though the columns of its weights could be.

  Raises:
    ValueError: names what is not divided, and by what.
  """
  config.check_tensor(mesh.shape["tensor"])
  check_fits(nnx.state(abstract_model(config, mesh=mesh)), mesh)

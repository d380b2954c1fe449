"""A policy: a model as two pytrees, what is trained and what is not."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import DecoderConfig
from modeling.models import Model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Weights of a model, split once at load.

  The model's configuration says which kind of them is trained.
  """

  trainable: nnx.State  # weights that get a gradient
  frozen: nnx.State  # all others
  graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})

  @property
  def model(self) -> Model:
    """The model that these weights make."""
    return nnx.merge(self.graphdef, self.trainable, self.frozen)

  @property
  def mesh(self) -> Mesh:
    """The mesh that they lie on."""
    return self.model.mesh

  @property
  def config(self) -> DecoderConfig:
    """The model's configuration."""
    return self.model.config

  def replace(self, *, trainable: nnx.State) -> "Policy":
    """Returns the same model with other trained weights."""
    return dataclasses.replace(self, trainable=trainable)


def make_policy(model: Model) -> Policy:
  """Splits a model into trained and frozen weights; no array is copied."""
  graphdef, trainable, frozen = nnx.split(model, model.config.trained, ...)
  return Policy(trainable=trainable, frozen=frozen, graphdef=graphdef)

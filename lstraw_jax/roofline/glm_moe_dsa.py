"""The layers of GLM-5: latent attention, indexers, and feed-forwards."""

from functools import partial

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.experts import (
    Mixture,
    exchange_cost,
    expert_matrices,
)
from lstraw_jax.roofline.indexer import indexer_cost, indexer_matrices
from lstraw_jax.roofline.latent_attention import (
    latent_attention_cost,
    latent_matrices,
)
from lstraw_jax.roofline.layer_kind import LayerKind
from lstraw_jax.roofline.mlp import mlp_matrices
from lstraw_jax.roofline.products import Matrix, linear
from lstraw_jax.roofline.widths import widths
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from pallas_kernels.shapes import wide_dtype


def glm_moe_dsa_layers(
    model: GlmMoeDsaConfig, workload: Workload, target: Target
) -> list[LayerKind]:
  """Returns the kinds of layers: all attend, some choose, some have experts."""
  mixture = mixture_of(model)
  dense = mlp_matrices(model.intermediate_size, workload, last=True)
  return [
      LayerKind(
          model.num_hidden_layers,
          latent_matrices(model, workload),
          partial(latent_attention_cost, model),
      ),
      LayerKind(
          model.num_indexers,
          indexer_matrices(model, workload),
          partial(indexer_cost, model),
      ),
      LayerKind(model.mlp_layer_types.count("dense"), dense),
      LayerKind(
          model.mlp_layer_types.count("sparse"),
          _expert_layer(model, workload, target),
          partial(exchange_cost, mixture),
      ),
  ]


def mixture_of(model: GlmMoeDsaConfig) -> Mixture:
  """Returns the sizes of the routed experts."""
  return Mixture(
      experts=model.n_routed_experts,
      per_token=model.num_experts_per_tok,
      size=model.moe_intermediate_size,
  )


def _expert_layer(
    model: GlmMoeDsaConfig, workload: Workload, target: Target
) -> list[Matrix]:
  """Returns the router, the shared expert, and a device's routed ones."""
  shared = model.n_shared_experts * model.moe_intermediate_size
  return [
      _router(model, workload),
      *mlp_matrices(shared, workload, last=True),
      *expert_matrices(mixture_of(model), workload, target),
  ]


def _router(model: GlmMoeDsaConfig, workload: Workload) -> Matrix:
  """Kept and multiplied in float32 or wider; it has no adapter."""
  hidden, experts = model.hidden_size, model.n_routed_experts
  (matrix,) = linear("gate", hidden, experts, workload)
  return matrix._replace(
      stored_bytes=wide_dtype(model.param_dtype).itemsize,
      used_bytes=widths(model).wide,
  )

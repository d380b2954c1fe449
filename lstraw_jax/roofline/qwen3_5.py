"""The layers of Qwen3.5: full attention, Gated DeltaNet, and feed-forwards."""

from functools import partial

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.attention import attention_cost
from lstraw_jax.roofline.delta_rule import delta_cost
from lstraw_jax.roofline.experts import (
    Mixture,
    exchange_cost,
    expert_matrices,
)
from lstraw_jax.roofline.layer_kind import LayerKind
from lstraw_jax.roofline.mlp import mlp_matrices
from lstraw_jax.roofline.products import Matrix, linear
from modeling.qwen3_5_config import MoeConfig, Qwen3_5Config


def qwen3_5_layers(
    model: Qwen3_5Config, workload: Workload, target: Target
) -> list[LayerKind]:
  """Returns the kinds of layers; each layer has a mixer and a feed-forward."""
  full, layers = model.num_blocks, model.num_hidden_layers
  return [
      LayerKind(
          full,
          attention_matrices(model, workload),
          partial(attention_cost, model),
      ),
      LayerKind(
          layers - full,
          delta_matrices(model, workload),
          partial(delta_cost, model),
      ),
      LayerKind(layers, *_feed_forward(model, workload, target)),
  ]


def attention_matrices(
    model: Qwen3_5Config, workload: Workload
) -> list[Matrix]:
  """Returns those of full attention; q_proj holds queries and gates."""
  hidden = model.hidden_size
  queries = model.num_attention_heads * model.head_dim
  keys = model.num_key_value_heads * model.head_dim
  return [
      *linear("q_proj", hidden, 2 * queries, workload, cut="out"),
      *linear("k_proj", hidden, keys, workload, cut="out"),
      *linear("v_proj", hidden, keys, workload, cut="out"),
      *linear("o_proj", queries, hidden, workload, cut="in"),
  ]


def delta_matrices(model: Qwen3_5Config, workload: Workload) -> list[Matrix]:
  """Returns those of Gated DeltaNet."""
  hidden = model.hidden_size
  heads = model.linear_num_value_heads
  values = heads * model.linear_value_head_dim
  channels = model.conv_channels
  return [
      *linear("in_proj_qkv", hidden, channels, workload, cut="out"),
      *linear("in_proj_z", hidden, values, workload, cut="out"),
      *_gate("in_proj_b", heads, workload),
      *_gate("in_proj_a", heads, workload),
      *linear("out_proj", values, hidden, workload, cut="in"),
  ]


def _gate(name: str, heads: int, workload: Workload) -> list[Matrix]:
  """Whole on each device of `tensor`, which computes it for its own heads.

  A backward gathers the small cotangents of all heads, so that dx is no partial
  sum; that, and its few more products, are not counted.
  """
  found = linear(name, workload.model.hidden_size, heads, workload, cut="out")
  return [matrix._replace(cut=None) for matrix in found]


def _feed_forward(model: Qwen3_5Config, workload: Workload, target: Target):
  """Returns the weights of one, and what else it costs, if it has experts."""
  if model.moe is None:
    assert model.intermediate_size is not None, "checked by the config"
    return mlp_matrices(model.intermediate_size, workload, last=True), None
  mixture = mixture_of(model.moe)
  hidden, shared = model.hidden_size, model.moe.shared_expert_intermediate_size
  matrices = [
      *linear("gate", hidden, mixture.experts, workload),  # has no adapter
      *linear("shared_expert_gate", hidden, 1, workload),
      *mlp_matrices(shared, workload, last=False),
      *expert_matrices(mixture, workload, target),
  ]
  return matrices, partial(exchange_cost, mixture)


def mixture_of(moe: MoeConfig) -> Mixture:
  """Returns the sizes of the routed experts."""
  return Mixture(
      experts=moe.num_experts,
      per_token=moe.num_experts_per_tok,
      size=moe.moe_intermediate_size,
  )

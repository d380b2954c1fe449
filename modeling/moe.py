"""Mixture of experts with a softmax router and one gated shared expert."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from modeling.linear import Linear
from modeling.mlp import MLP
from modeling.parameter import normal, param
from modeling.qwen3_5_config import Qwen3_5Config
from pallas_kernels.shapes import typed, wide


class MoE(nnx.Module):
  """sum_j w_j expert_j(x) + sigmoid(x w_s) shared(x).

  The router's softmax is over all experts; the weights of the chosen ones are
  renormalised to sum 1. Ties go to the lower expert. No token is dropped: they
  are sorted by expert and multiplied in groups.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "the decoder layer picks MoE only when configured"
    draw = partial(
        normal, rngs, std=config.initializer_range, dtype=config.param_dtype
    )
    experts, inner = moe.num_experts, moe.moe_intermediate_size
    self.gate = param(draw((hidden, experts)), ("embed", None))
    self.gate_up_proj = param(
        draw((experts, hidden, 2 * inner)),
        ("experts", "expert_embed", "expert_mlp"),
    )
    self.down_proj = param(
        draw((experts, inner, hidden)),
        ("experts", "expert_mlp", "expert_embed"),
    )
    self.shared_expert = MLP(
        moe.shared_expert_intermediate_size,
        config=config,
        mesh=mesh,
        rngs=rngs,
    )
    self.shared_expert_gate = Linear(
        "shared_expert_gate",
        hidden,
        1,
        axes=("embed", "gate"),
        config=config,
        mesh=mesh,
        rngs=rngs,
    )
    self.per_token = moe.num_experts_per_tok

  @typed
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Applies the experts to every token."""
    rows = x.reshape(-1, x.shape[-1])
    routed = self._routed(rows).reshape(x.shape)
    gate = jax.nn.sigmoid(self.shared_expert_gate(x))
    return routed + gate * self.shared_expert(x)

  def _routed(self, x_MD):
    logits = x_MD @ self.gate[...].astype(x_MD.dtype)
    probabilities = jax.nn.softmax(wide(logits), axis=-1)
    weights_MA, experts_MA = jax.lax.top_k(probabilities, self.per_token)
    weights_MA /= weights_MA.sum(-1, keepdims=True)
    weights_MA = weights_MA.astype(x_MD.dtype)

    order = jnp.argsort(experts_MA.reshape(-1), stable=True)
    counts = jnp.bincount(
        experts_MA.reshape(-1), length=self.gate_up_proj.shape[0]
    ).astype(jnp.int32)
    grouped = x_MD[order // self.per_token]
    gate_up = jax.lax.ragged_dot(
        grouped, self.gate_up_proj[...].astype(x_MD.dtype), counts
    )
    gate, up = jnp.split(gate_up, 2, axis=-1)
    out = jax.lax.ragged_dot(
        jax.nn.silu(gate) * up, self.down_proj[...].astype(x_MD.dtype), counts
    )
    back = jnp.argsort(order)
    out_MAD = out[back].reshape(*experts_MA.shape, -1)
    return (weights_MA[..., None] * out_MAD).sum(1)

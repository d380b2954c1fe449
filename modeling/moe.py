"""Mixture of experts with a softmax router and one gated shared expert."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from modeling.expert_exchange import apply_experts
from modeling.linear import Linear
from modeling.mlp import MLP
from modeling.parameter import normal, param
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.sharding import Axes, constrain, gather, spec
from pallas_kernels.shapes import typed, wide

_TOKENS = ("batch", "time", None)
_GATE = ("embed", None)
_GATE_UP = ("experts", "expert_embed", "expert_mlp")
_DOWN = ("experts", "expert_mlp", "expert_embed")
_HALVES = ("experts", None, None, "expert_mlp")  # [E, D, gate and up, F]
_WHOLE_DOWN = ("experts", "expert_mlp", None)


class MoE(nnx.Module):
  """sum_j w_j expert_j(x) + sigmoid(x w_s) shared(x).

  The router's softmax is over all experts; the weights of the chosen ones are
  renormalised to sum 1. Ties go to the lower expert. No token is dropped.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "the decoder layer picks MoE only when configured"
    draw = partial(
        normal, rngs, std=config.initializer_range, dtype=config.param_dtype
    )
    experts, inner = moe.num_experts, moe.moe_intermediate_size
    self.gate = param(draw((hidden, experts)), _GATE)
    self.gate_up_proj = param(draw((experts, hidden, 2 * inner)), _GATE_UP)
    self.down_proj = param(draw((experts, inner, hidden)), _DOWN)
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
    x = constrain(x, self.mesh, _TOKENS)
    gate = jax.nn.sigmoid(self.shared_expert_gate(x))
    return self._routed(x) + gate * self.shared_expert(x)

  def _routed(self, x_BTD):
    gate_up = self._used(self.gate_up_proj, _GATE_UP, x_BTD.dtype)
    # [gate | up] is cut anew, so that the columns of a shard belong together.
    gate_up = gate_up.reshape(*gate_up.shape[:2], 2, -1)
    gate_up = constrain(gate_up, self.mesh, _HALVES)
    down = self._used(self.down_proj, _DOWN, x_BTD.dtype)
    exchange = jax.shard_map(
        partial(_on_shard, per_token=self.per_token),
        mesh=self.mesh,
        in_specs=tuple(map(spec, (_HALVES, _WHOLE_DOWN, _TOKENS, _TOKENS))),
        out_specs=spec(_TOKENS),
    )
    return exchange(gate_up, down, x_BTD, self._probabilities(x_BTD))

  def _probabilities(self, x_BTD):
    logits = x_BTD @ self._used(self.gate, _GATE, x_BTD.dtype)
    return jax.nn.softmax(wide(logits), axis=-1)

  def _used(self, weight: nnx.Param, axes: Axes, dtype) -> Any:
    return gather(weight[...].astype(dtype), self.mesh, axes)


def _on_shard(gate_up, down, x_BTD, probabilities_BTE, *, per_token):
  """The routed part of a shard's tokens."""
  x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
  probabilities_ME = probabilities_BTE.reshape(len(x_MD), -1)
  # Here, because the compiler would gather the tokens of all shards to sort.
  weights_MA, experts_MA = jax.lax.top_k(probabilities_ME, per_token)
  weights_MA /= weights_MA.sum(-1, keepdims=True)
  total_MD = apply_experts(
      (gate_up.reshape(*gate_up.shape[:2], -1), down),
      x_MD,
      weights_MA.astype(x_MD.dtype),
      experts_MA,
      apply=_grouped,
  )
  total_MD = jax.lax.psum(total_MD, "tensor")
  return total_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)


def _grouped(params, rows, counts):
  """down(silu(gate x) * up x), each group of rows with its own expert."""
  gate_up, down = params
  real = (jnp.arange(len(rows)) < counts.sum())[:, None]

  def multiply(rows, weights):
    # What ragged_dot makes of rows after the last group is not specified.
    return jnp.where(real, jax.lax.ragged_dot(rows, weights, counts), 0)

  gate, up = jnp.split(multiply(rows, gate_up), 2, axis=-1)
  return multiply(jax.nn.silu(gate) * up, down)

"""Mixtures of experts in place of the dense feed-forward, one a family."""

from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from modeling.experts import Experts
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.linear import Linear
from modeling.mlp import MLP
from modeling.parameter import normal, param
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.router import SigmoidRouter, choose, softmax
from modeling.sharding import constrain, gather
from pallas_kernels.shapes import typed

_TOKENS = ("batch", "time", None)
_GATE = ("embed", None)


class SoftmaxMoE(nnx.Module):
  """sum_j w_j expert_j(x) + sigmoid(x w_s) shared(x), as in Qwen3.5.

  The router is `modeling.router.softmax`. No token is dropped.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "the decoder layer picks it only when configured"
    gate = normal(
        rngs,
        (hidden, moe.num_experts),
        std=config.initializer_range,
        dtype=config.param_dtype,
    )
    self.gate = param(gate, _GATE)
    self.experts = Experts(
        moe.num_experts,
        moe.moe_intermediate_size,
        config=config,
        mesh=mesh,
        rngs=rngs,
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
    x = constrain(x, self.mesh, _TOKENS)
    gate = jax.nn.sigmoid(self.shared_expert_gate(x))
    logits = x @ gather(self.gate[...].astype(x.dtype), self.mesh, _GATE)
    rule = partial(softmax, per_token=self.per_token)
    weights, experts = choose(rule, logits, None, mesh=self.mesh)
    # transformers rounds these weights, and not those of a sigmoid router.
    weights = weights.astype(x.dtype)
    routed = self.experts(x, weights=weights, experts=experts)
    return routed + gate * self.shared_expert(x)


class SigmoidMoE(nnx.Module):
  """sum_j w_j expert_j(x) + shared(x), as in GLM-5.

  The router is `modeling.router.sigmoid`. No token is dropped.
  """

  def __init__(self, config: GlmMoeDsaConfig, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    self.gate = SigmoidRouter(config, mesh=mesh, rngs=rngs)
    size = config.moe_intermediate_size
    self.experts = Experts(
        config.n_routed_experts, size, config=config, mesh=mesh, rngs=rngs
    )
    self.shared_experts = MLP(
        config.n_shared_experts * size, config=config, mesh=mesh, rngs=rngs
    )

  @typed
  def __call__(
      self,
      x: Float[Array, "B T D"],
      recorded: Int32[Array, "B T A"] | None = None,
  ) -> tuple[Float[Array, "B T D"], Int32[Array, "B T A"]]:
    """Applies the experts to every token.

    Args:
      x: tokens.
      recorded: experts to take instead of choosing, in [0, E). Their weights
        are computed from `x`, and the router keeps its gradient.

    Returns:
      The output, and the experts of each token, laid out as tokens are.

    Raises:
      ValueError: if other than `num_experts_per_tok` experts were recorded.
    """
    x = constrain(x, self.mesh, _TOKENS)
    weights, experts = self.gate(x, recorded)
    routed = self.experts(x, weights=weights, experts=experts)
    return routed + self.shared_experts(x), experts

"""Routers: the experts that a token goes to, and the weight of each.

A rule maps the logits of a shard's tokens to a choice: weights in float32 or
wider, and experts. A choice has no gradient. Its weights have one, through the
scores of the chosen experts alone. Where experts were recorded, none are
chosen: weights and gradient are those of the recorded ones.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.parameter import Buffer, normal, param
from modeling.sharding import gather, spec
from pallas_kernels.shapes import typed, wide, wide_dtype

_TOKENS = ("batch", "time", None)
_KERNEL = ("embed", None)
_BIAS = (None,)
_TINY = 1e-20  # transformers' guard of the sum of sigmoids

Choice = tuple[jax.Array, jax.Array]  # weights and experts [..., A]


class SigmoidRouter(nnx.Module):
  """The rule `sigmoid` on logits x W; W and its bias are always kept wide.

  The bias evens the loads of a pretraining and is not trained after it.
  """

  def __init__(self, config: GlmMoeDsaConfig, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    experts, dtype = config.n_routed_experts, wide_dtype(config.param_dtype)
    kernel = normal(
        rngs,
        (config.hidden_size, experts),
        std=config.initializer_range,
        dtype=str(dtype),
    )
    self.kernel = param(kernel, _KERNEL)
    self.e_score_correction_bias = param(
        jnp.zeros(experts, dtype), _BIAS, kind=Buffer
    )
    # Not as a partial: two models would be unequal, and compiled for apart.
    self.per_token = config.num_experts_per_tok
    self.scale = config.routed_scaling_factor

  @typed
  def __call__(
      self, x: Float[Array, "B T D"], recorded: Int32[Array, "B T A"] | None
  ) -> tuple[Float[Array, "B T A"], Int32[Array, "B T A"]]:
    """Returns weights and experts; see `sigmoid`."""
    x = wide(x)
    kernel = gather(self.kernel[...].astype(x.dtype), self.mesh, _KERNEL)
    # By default float32 is multiplied as tf32 on a GPU, as bfloat16 on a TPU:
    # that would choose other experts.
    logits = jnp.dot(x, kernel, precision=jax.lax.Precision.HIGHEST)
    bias = self.e_score_correction_bias[...].astype(x.dtype)
    rule = partial(sigmoid, per_token=self.per_token, scale=self.scale)
    return choose(rule, logits, recorded, bias, mesh=self.mesh)


def choose(
    rule: Callable[..., Choice],
    logits_BTE: jax.Array,
    recorded_BTA: jax.Array | None,
    *whole: jax.Array,
    mesh: Mesh,
) -> Choice:
  """Applies a rule to the tokens of each shard.

  Args:
    rule: called with a shard's logits, its recorded experts, and `whole`.
    logits_BTE: of all experts.
    recorded_BTA: int32 experts in [0, E), or None to choose.
    *whole: vectors of which each shard gets all.
    mesh: where the tokens lie.

  Returns:
    Weights [B,T,A] and experts [B,T,A], laid out as tokens are.
  """
  # The compiler would gather the tokens of all shards to sort.
  tokens = spec(_TOKENS)
  on_shards = jax.shard_map(
      rule,
      mesh=mesh,
      in_specs=(tokens, tokens, *[spec(_BIAS)] * len(whole)),
      out_specs=(tokens, tokens),
  )
  return on_shards(logits_BTE, recorded_BTA, *whole)


@typed
def softmax(
    logits: Float[Array, "*rows E"],
    recorded: Int32[Array, "*rows A"] | None,
    *,
    per_token: int,
) -> tuple[Float[Array, "*rows A"], Int32[Array, "*rows A"]]:
  """Returns w_j = p_j / sum_chosen p, with p the softmax over all experts.

  The highest p are chosen, of equal ones the lower expert.

  Args:
    logits: of a shard's tokens.
    recorded: experts to take instead, in [0, E).
    per_token: how many to choose.

  Raises:
    ValueError: if other than `per_token` experts were recorded.
  """
  scores = jax.nn.softmax(wide(logits), axis=-1)
  experts = _experts(scores, recorded, per_token)
  chosen = jnp.take_along_axis(scores, experts, axis=-1)
  return chosen / chosen.sum(-1, keepdims=True), experts


@typed
def sigmoid(
    logits: Float[Array, "*rows E"],
    recorded: Int32[Array, "*rows A"] | None,
    bias: Float[Array, "E"],
    *,
    per_token: int,
    scale: float,
) -> tuple[Float[Array, "*rows A"], Int32[Array, "*rows A"]]:
  """Returns w_j = scale s_j / (sum_chosen s + 1e-20), with s = sigmoid(logits).

  The highest s + bias are chosen, of equal ones the lower expert. The bias is
  in the choice alone.

  Args:
    logits: of a shard's tokens.
    recorded: experts to take instead, in [0, E).
    bias: in the dtype of the scores, float32 or wider.
    per_token: how many to choose.
    scale: the sum of the weights.

  Raises:
    ValueError: if other than `per_token` experts were recorded.

  Source: DeepSeek-V3, arXiv 2412.19437, equations 12 to 16, without groups.
  """
  scores = jax.nn.sigmoid(wide(logits))
  biased = scores + jnp.expand_dims(bias, range(scores.ndim - 1))
  experts = _experts(biased, recorded, per_token)
  chosen = jnp.take_along_axis(scores, experts, axis=-1)
  return scale * chosen / (chosen.sum(-1, keepdims=True) + _TINY), experts


def _experts(ranking, recorded, per_token):
  """Returns the recorded experts, or else those that rank highest."""
  if recorded is None:
    return jax.lax.top_k(jax.lax.stop_gradient(ranking), per_token)[1]
  if recorded.shape[-1] != per_token:
    raise ValueError(
        f"recorded: {recorded.shape[-1]} experts for each token; want"
        f" num_experts_per_tok={per_token}"
    )
  return recorded

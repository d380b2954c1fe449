"""The routed experts of a layer, spread over the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from modeling.decoder_config import DecoderConfig
from modeling.expert_exchange import apply_experts
from modeling.parameter import normal, param
from modeling.sharding import Axes, constrain, gather, spec
from pallas_kernels.shapes import typed, wide_dtype

_TOKENS = ("batch", "time", None)
_AXES: dict[str, Axes] = {
    "gate_up_proj": ("experts", "expert_embed", "expert_mlp"),
    "gate_up_proj_lora_a": ("experts", None, "expert_embed", None),
    "gate_up_proj_lora_b": ("experts", None, None, "expert_mlp"),
    "down_proj": ("experts", "expert_mlp", "expert_embed"),
    "down_proj_lora_a": ("experts", "expert_mlp", None),
    "down_proj_lora_b": ("experts", None, "expert_embed"),
}
_HALVES = ("experts", None, None, "expert_mlp")  # [E, D, gate and up, F]
_IN_USE: dict[str, Axes] = {
    **{
        name: tuple(None if axis == "expert_embed" else axis for axis in axes)
        for name, axes in _AXES.items()
    },
    "gate_up_proj": _HALVES,
}


class Experts(nnx.Module):
  """sum_j w_j down_j(silu(gate_j x) * up_j x).

  Weights are [E, in, out], the transpose of the checkpoint's; gate_up_proj is
  [gate | up]. Where the config adapts "experts", each of the three products of
  each expert is y = x W + (alpha / rank) (x A) B. A and B are kept in float32
  or wider: [E, in, r] and [E, r, out] of down_proj, and [E, 2, in, r] and
  [E, 2, r, out] of gate_up_proj, where gate comes before up. B starts at zero.
  """

  def __init__(
      self,
      count: int,
      size: int,
      *,
      config: DecoderConfig,
      mesh: Mesh,
      rngs: nnx.Rngs,
  ):
    self.mesh = mesh
    hidden = config.hidden_size
    draw = partial(
        normal, rngs, std=config.initializer_range, dtype=config.param_dtype
    )
    weight = lambda name, *shape: param(draw(shape), _AXES[name])
    self.gate_up_proj = weight("gate_up_proj", count, hidden, 2 * size)
    self.down_proj = weight("down_proj", count, size, hidden)
    self.lora_scale = 0.0
    self.gate_up_proj_lora_a = nnx.data(None)
    self.gate_up_proj_lora_b = nnx.data(None)
    self.down_proj_lora_a = nnx.data(None)
    self.down_proj_lora_b = nnx.data(None)
    lora = config.lora
    if lora is None or "experts" not in config.adapted:
      return
    self.lora_scale = lora.alpha / lora.rank
    adapter = partial(
        _adapter, rngs, rank=lora.rank, dtype=wide_dtype(config.param_dtype)
    )
    self.gate_up_proj_lora_a, self.gate_up_proj_lora_b = adapter(
        "gate_up_proj", (count, 2), hidden, size
    )
    self.down_proj_lora_a, self.down_proj_lora_b = adapter(
        "down_proj", (count,), size, hidden
    )

  @typed
  def __call__(
      self,
      x: Float[Array, "B T D"],
      *,
      weights: Float[Array, "B T A"],
      experts: Int32[Array, "B T A"],
  ) -> Float[Array, "B T D"]:
    """Sends every token to its experts; none is dropped.

    Args:
      x: tokens; the experts work in their dtype.
      weights: of each token's experts.
      experts: in [0, E).
    """
    used = self._gathered(x.dtype)
    # [gate | up] is cut anew, so that the columns of a shard belong together.
    halves = used["gate_up_proj"].reshape(*self.gate_up_proj.shape[:2], 2, -1)
    used["gate_up_proj"] = constrain(halves, self.mesh, _HALVES)
    tokens = spec(_TOKENS)
    exchange = jax.shard_map(
        partial(_on_shard, scale=self.lora_scale),
        mesh=self.mesh,
        in_specs=({k: spec(_IN_USE[k]) for k in used}, *[tokens] * 3),
        out_specs=tokens,
    )
    return exchange(used, x, weights, experts)

  def _gathered(self, dtype):
    found = {name: getattr(self, name) for name in _AXES}
    return {
        name: gather(weight[...].astype(dtype), self.mesh, _AXES[name])
        for name, weight in found.items()
        if weight is not None
    }


def _adapter(rngs, name, stack, d_in, d_out, *, rank, dtype):
  """Returns A and B, for each of a stack of kernels."""
  std = d_in**-0.5
  a = normal(rngs, (*stack, d_in, rank), std=std, dtype=str(dtype))
  b = jnp.zeros((*stack, rank, d_out), dtype)
  lora = partial(param, kind=nnx.LoRAParam)
  a_axes, b_axes = _AXES[f"{name}_lora_a"], _AXES[f"{name}_lora_b"]
  return lora(a, a_axes), lora(b, b_axes)


def _on_shard(params, x_BTD, weights_BTA, experts_BTA, *, scale):
  """The experts' output for a shard's tokens."""
  rows = lambda x: x.reshape(-1, x.shape[-1])
  total_MD = apply_experts(
      params,
      rows(x_BTD),
      rows(weights_BTA),
      rows(experts_BTA),
      apply=partial(_grouped, scale=scale),
  )
  total_MD = jax.lax.psum(total_MD, "tensor")
  return total_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)


def _grouped(params, rows, counts, *, scale):
  """down(silu(gate x) * up x), each group of rows with its own expert."""
  real = (jnp.arange(len(rows)) < counts.sum())[:, None]

  def multiply(rows, weights):
    # What ragged_dot makes of rows after the last group is not specified.
    return jnp.where(real, jax.lax.ragged_dot(rows, weights, counts), 0)

  gate_up = params["gate_up_proj"]
  flat = gate_up.reshape(*gate_up.shape[:2], -1)
  gate, up = jnp.split(multiply(rows, flat), 2, axis=-1)
  if "gate_up_proj_lora_a" in params:
    a, b = params["gate_up_proj_lora_a"], params["gate_up_proj_lora_b"]
    gate += scale * multiply(multiply(rows, a[:, 0]), b[:, 0])
    up += scale * multiply(multiply(rows, a[:, 1]), b[:, 1])
  inner = jax.nn.silu(gate) * up
  out = multiply(inner, params["down_proj"])
  if "down_proj_lora_a" in params:
    a, b = params["down_proj_lora_a"], params["down_proj_lora_b"]
    out += scale * multiply(multiply(inner, a), b)
  return out

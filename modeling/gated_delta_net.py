"""Gated DeltaNet: a linear-attention layer with a state of fixed size."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from modeling.causal_conv import causal_conv
from modeling.layer_state import DeltaState
from modeling.linear import Linear
from modeling.norm import GatedRMSNorm, l2_normalise
from modeling.parameter import param
from modeling.qwen3_5_config import Qwen3_5Config
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.shapes import wide, wide_dtype


class GatedDeltaNet(nnx.Module):
  """out_proj(norm(delta_rule(silu(conv(in_proj_qkv x)))) silu(in_proj_z x)).

  beta = sigmoid(b) and log-decay g = -exp(A_log) softplus(a + dt_bias), one of
  each a value head. A_log and dt_bias are kept in float32: a decay of exp(g) is
  raised to the power of a million tokens.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    hidden = config.hidden_size
    self.key_heads = config.linear_num_key_heads
    self.value_heads = config.linear_num_value_heads
    self.key_dim = config.linear_key_head_dim
    values = self.value_heads * config.linear_value_head_dim
    linear = partial(Linear, config=config, mesh=mesh, rngs=rngs)
    self.in_proj_qkv = linear(
        "in_proj_qkv",
        hidden,
        config.conv_channels,
        axes=("embed", "linear_heads"),
    )
    self.in_proj_z = linear(
        "in_proj_z", hidden, values, axes=("embed", "linear_heads")
    )
    self.in_proj_b = linear(
        "in_proj_b", hidden, self.value_heads, axes=("embed", "gate")
    )
    self.in_proj_a = linear(
        "in_proj_a", hidden, self.value_heads, axes=("embed", "gate")
    )
    self.out_proj = linear(
        "out_proj", values, hidden, axes=("linear_heads", "embed")
    )
    taps = config.linear_conv_kernel_dim
    bound = taps**-0.5
    self.conv1d = param(
        jax.random.uniform(
            rngs.params(),
            (taps, config.conv_channels),
            config.param_dtype,
            -bound,
            bound,
        ),
        (None, "linear_heads"),
    )
    dtype = wide_dtype(config.param_dtype)
    decay = jax.random.uniform(
        rngs.params(), (self.value_heads,), dtype, 0.01, 16.0
    )
    self.A_log = param(jnp.log(decay), ("gate",))
    self.dt_bias = param(jnp.ones((self.value_heads,), dtype), ("gate",))
    self.norm = GatedRMSNorm(
        config.linear_value_head_dim,
        eps=config.rms_norm_eps,
        dtype=config.param_dtype,
    )

  def __call__(
      self, x_BTD: jax.Array, *, valid_BT: jax.Array, state: DeltaState
  ) -> tuple[jax.Array, DeltaState]:
    """Returns the output [B,T,D] and the state after the last valid token.

    Args:
      x_BTD: the segment; rows may be padded on the right.
      valid_BT: False for padding, which leaves the state as it is.
      state: this layer's state before the segment, without layer axes.
    """
    u, tail = causal_conv(
        self.in_proj_qkv(x_BTD),
        state.conv,
        kernel=self.conv1d[...],
        lengths=valid_BT.sum(1, dtype=jnp.int32),
    )
    keys = self.key_heads * self.key_dim
    q, k, v = jnp.split(jax.nn.silu(u), (keys, 2 * keys), axis=-1)
    by_head = lambda y, heads: y.reshape(*y.shape[:2], heads, -1)
    q = l2_normalise(by_head(q, self.key_heads)) * self.key_dim**-0.5
    k = l2_normalise(by_head(k, self.key_heads))
    g, beta = self._gates(x_BTD, valid_BT)
    out, recurrent = gated_delta_rule(
        q,
        k,
        by_head(v, self.value_heads),
        g=g,
        beta=beta,
        initial_state=state.recurrent,
    )
    z = by_head(self.in_proj_z(x_BTD), self.value_heads)
    out = self.norm(out, z).reshape(*x_BTD.shape[:2], -1)
    return self.out_proj(out), DeltaState(recurrent=recurrent, conv=tail)

  def _gates(self, x_BTD, valid_BT):
    """Log-decay and write strength; both 0 on padding."""
    a = wide(self.in_proj_a(x_BTD)) + wide(self.dt_bias[...])[None, None]
    g = -jnp.exp(wide(self.A_log[...]))[None, None] * jax.nn.softplus(a)
    beta = wide(jax.nn.sigmoid(self.in_proj_b(x_BTD)))
    valid = valid_BT[..., None]
    return jnp.where(valid, g, 0.0), jnp.where(valid, beta, 0.0)

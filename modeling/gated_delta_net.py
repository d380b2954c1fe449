"""Gated DeltaNet: a linear-attention layer with a state of fixed size.

A segment lies over the mesh axis `context` by its tokens. The projections are
computed so. Convolution and recurrence run in one `jax.shard_map`:

1. Where `tensor` x `context` divides the heads, tokens are exchanged for heads
   (all-to-all): each shard has the whole segment for its heads, and back.
2. Elsewhere each shard has its tokens for all heads of its part of `tensor`.
   The inputs before its own and the state before them are handed on to it.
"""

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
from modeling.sharding import constrain, spec
from modeling.state_passing import sharded_delta_rule
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.shapes import wide, wide_dtype


class GatedDeltaNet(nnx.Module):
  """out_proj(norm(delta_rule(silu(conv(in_proj_qkv x)))) silu(in_proj_z x)).

  beta = sigmoid(b) and log-decay g = -exp(A_log) softplus(a + dt_bias), one of
  each a value head. A_log and dt_bias are kept in float32: a decay of exp(g) is
  raised to the power of a million tokens.
  """

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.config = config
    self.mesh = mesh
    self.heads = config.delta_heads(mesh)
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
        (None, None),  # small
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
      x_BTD: the segment; in a row, padding stands before and behind what is
        valid, not in between.
      valid_BT: False for padding, which leaves the state as it is.
      state: this layer's state before the segment, without layer axes.
    """
    frame = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
    start = jnp.where(valid_BT, frame, x_BTD.shape[1]).min(1)
    # Whole before each shard takes its own: the compiler would cut the weight.
    kernels = tuple(
        constrain(kernel, self.mesh, (None, None, None))
        for kernel in self._by_heads(self.conv1d[...])
    )
    tokens = spec(("batch", "time", "linear_heads"))
    heads, rows = spec((None, self.heads)), spec(("batch",))
    states = jax.tree.map(
        lambda axes: spec(axes[2:]),
        self.config.recurrent_axes(self.mesh),
        is_leaf=lambda x: type(x) is tuple,
    )
    mix = jax.shard_map(
        partial(_mix, spread=self.heads == "spread_heads"),
        mesh=self.mesh,
        in_specs=(tokens, tokens, states, heads, rows, rows),
        out_specs=(tokens, states),
    )
    out, state = mix(
        self._by_heads(self.in_proj_qkv(x_BTD)),
        self._gates(x_BTD, valid_BT),
        state,
        kernels,
        start,
        start + valid_BT.sum(1, dtype=jnp.int32),
    )
    z = self.in_proj_z(x_BTD).reshape(out.shape)
    out = self.norm(out, z).reshape(*x_BTD.shape[:2], -1)
    return self.out_proj(out), state

  def _by_heads(self, channels):
    """[..., channels] -> q and k [..., H, K], v [..., U, V]."""
    keys = self.key_heads * self.key_dim
    parts = jnp.split(channels, (keys, 2 * keys), axis=-1)
    heads = (self.key_heads, self.key_heads, self.value_heads)
    return tuple(
        part.reshape(*part.shape[:-1], count, -1)
        for part, count in zip(parts, heads, strict=True)
    )

  def _gates(self, x_BTD, valid_BT):
    """Log-decay and write strength [B,T,U]; both 0 on padding."""
    a = wide(self.in_proj_a(x_BTD)) + wide(self.dt_bias[...])[None, None]
    g = -jnp.exp(wide(self.A_log[...]))[None, None] * jax.nn.softplus(a)
    beta = wide(jax.nn.sigmoid(self.in_proj_b(x_BTD)))
    valid = valid_BT[..., None]
    return jnp.where(valid, g, 0.0), jnp.where(valid, beta, 0.0)


def _mix(channels, gates, state, kernels, start, stop, *, spread):
  """What a shard does: convolution and delta rule of its heads or tokens.

  Args:
    channels: q, k and v before the convolution, of this shard's tokens.
    gates: g and beta.
    state: that of this shard's heads.
    kernels: of the convolution, for q, k and v.
    start: [B] index in the frame of the first valid token.
    stop: [B] index after the last one.
    spread: whether the shard has the whole frame for a part of the heads, or
      all heads that `tensor` leaves it for a part of the frame.
  """
  over = () if spread else ("context",)
  if spread:
    # Each gets contiguous heads: value heads stay with their key head.
    channels, gates = jax.lax.all_to_all(
        (channels, gates), "context", split_axis=2, concat_axis=1, tiled=True
    )
  tails = (state.conv_q, state.conv_k, state.conv_v)
  with jax.named_scope("causal_conv"):
    convolved = [
        causal_conv(u, tail, kernel=kernel, start=start, stop=stop, over=over)
        for u, tail, kernel in zip(channels, tails, kernels, strict=True)
    ]
  (q, k, v), tails = zip(*convolved, strict=True)
  q, k, v = (jax.nn.silu(y) for y in (q, k, v))
  rule = gated_delta_rule
  if not spread:
    rule = partial(sharded_delta_rule, axis="context")
  out, recurrent = rule(
      l2_normalise(q) * q.shape[-1] ** -0.5,
      l2_normalise(k),
      v,
      g=gates[0],
      beta=gates[1],
      initial_state=state.recurrent,
  )
  if spread:
    out = jax.lax.all_to_all(
        out, "context", split_axis=1, concat_axis=2, tiled=True
    )
  return out, DeltaState(recurrent, *tails)

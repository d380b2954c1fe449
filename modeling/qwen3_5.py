"""Qwen3.5/3.6 text decoder: blocks of Gated DeltaNet layers and one full layer.

Like layers are stacked and scanned, so that 64 layers trace one of each kind.
No weight or state is ever written in a forward: states come in and go out.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from modeling.attention import Attention
from modeling.decoder import Decoder
from modeling.gated_delta_net import GatedDeltaNet
from modeling.layer_state import (
    NOTHING_RECORDED,
    DeltaState,
    KvState,
    Prefix,
    Record,
    Recurrent,
    SegmentDelta,
    with_sink,
)
from modeling.mlp import MLP
from modeling.moe import SoftmaxMoE
from modeling.norm import ZeroCentredRMSNorm
from modeling.parameter import stack
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.rope import Rotation, rotation
from modeling.sharding import constrain


class DecoderLayer(nnx.Module):
  """x += mixer(norm(x)); x += feed_forward(norm(x))."""

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    norm = partial(
        ZeroCentredRMSNorm,
        config.hidden_size,
        eps=config.rms_norm_eps,
        dtype=config.param_dtype,
    )
    self.input_layernorm = norm()
    self.post_attention_layernorm = norm()
    if config.moe is None:
      assert config.intermediate_size is not None, "checked by the config"
      self.mlp = MLP(
          config.intermediate_size, config=config, mesh=mesh, rngs=rngs
      )
    else:
      self.mlp = SoftmaxMoE(config, mesh=mesh, rngs=rngs)

  def residual(self, x_BTD: jax.Array, mixer: Callable) -> tuple:
    """Returns the layer's output and whatever else the mixer returns."""
    mixed, *kept = mixer(self.input_layernorm(x_BTD))
    x_BTD += mixed
    with jax.named_scope("mlp"):
      x_BTD += self.mlp(self.post_attention_layernorm(x_BTD))
    return constrain(x_BTD, self.mesh, ("batch", "time", None)), *kept


class LinearLayer(DecoderLayer):
  """A layer that mixes tokens by Gated DeltaNet."""

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    super().__init__(config, mesh=mesh, rngs=rngs)
    self.linear_attn = GatedDeltaNet(config, mesh=mesh, rngs=rngs)

  @jax.named_scope("linear_layer")
  def __call__(
      self, x_BTD: jax.Array, *, valid_BT: jax.Array, state: DeltaState
  ) -> tuple[jax.Array, DeltaState]:
    """Returns the output and the layer's state after the segment."""
    mixer = partial(self.linear_attn, valid_BT=valid_BT, state=state)
    return self.residual(x_BTD, mixer)


class FullLayer(DecoderLayer):
  """A layer that mixes tokens by full attention."""

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    super().__init__(config, mesh=mesh, rngs=rngs)
    self.self_attn = Attention(config, mesh=mesh, rngs=rngs)

  @jax.named_scope("full_layer")
  def __call__(
      self,
      x_BTD: jax.Array,
      *,
      positions_BT: jax.Array,
      rotation: Rotation,
      prefixes: tuple[Prefix, ...],
      layer: jax.Array,
  ) -> tuple[jax.Array, KvState, tuple[KvState | None, ...]]:
    """Returns the output, the segment's keys and values, and the sinks."""
    mixer = partial(
        self.self_attn,
        positions_BT=positions_BT,
        rotation=rotation,
        prefixes=prefixes,
        layer=layer,
    )
    return self.residual(x_BTD, mixer)


class Block(nnx.Module):
  """Some linear layers, stacked, then one full layer."""

  def __init__(self, config: Qwen3_5Config, *, mesh: Mesh, rngs: nnx.Rngs):
    self.linear_layers = stack(
        lambda rngs: LinearLayer(config, mesh=mesh, rngs=rngs),
        config.full_attention_interval - 1,
        rngs=rngs,
    )
    self.full_layer = FullLayer(config, mesh=mesh, rngs=rngs)


class Qwen3_5(Decoder):
  """The whole decoder, without vision and multi-token prediction."""

  def __init__(
      self, config: Qwen3_5Config, *, rngs: nnx.Rngs, mesh: Mesh | None = None
  ):
    super().__init__(config, rngs=rngs, mesh=mesh)
    self.config = config
    self.blocks = stack(
        lambda rngs: Block(config, mesh=self.mesh, rngs=rngs),
        config.num_blocks,
        rngs=rngs,
    )
    self.norm = ZeroCentredRMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, dtype=config.param_dtype
    )
    self.draw_head(config, rngs=rngs)

  def __call__(
      self,
      tokens_BT: jax.Array,
      *,
      positions_BT: jax.Array,
      prefixes: tuple[Prefix, ...],
      recurrent: Recurrent,
      record: Record = NOTHING_RECORDED,
  ) -> tuple[jax.Array, SegmentDelta]:
    """Runs a segment that follows a state.

    Activations are rematerialised layer by layer in a backward pass.

    Args:
      tokens_BT: token ids, int32; padding on either side, any id.
      positions_BT: int32 position of each token, -1 = padding.
      prefixes: stored keys and values that the segment attends to. A prefix of
        M rows serves B / M rows of the segment each.
      recurrent: state before the segment, B rows.
      record: of nothing: here no choice can be given.

    Returns:
      The hidden states [B,T,D] after the last norm, and what the segment adds.

    Raises:
      ValueError: if a choice is given.
    """
    if jax.tree.leaves(record):
      raise ValueError("record: Qwen3.5 replays no choices; want none")
    # On every shard: each layer asks where its rows begin and end.
    valid_BT = constrain(positions_BT >= 0, self.mesh, ("batch", None))
    x_BTD = self.embed(tokens_BT, dtype=self.config.activation_dtype)
    by = rotation(
        positions_BT,
        config=self.config.rope,
        head_dim=self.config.head_dim,
        dtype=x_BTD.dtype,
    )

    @partial(jax.checkpoint, prevent_cse=False)
    def linear_step(x_BTD, layer_and_state):
      layer, state = layer_and_state
      return layer(x_BTD, valid_BT=valid_BT, state=state)

    @partial(jax.checkpoint, prevent_cse=False)
    def full_step(x_BTD, sinks, layer, index):
      return layer(
          x_BTD,
          positions_BT=positions_BT,
          rotation=by,
          prefixes=tuple(map(with_sink, prefixes, sinks)),
          layer=index,
      )

    def block_step(carry, inputs):
      (x_BTD, sinks), (block, state, index) = carry, inputs
      x_BTD, state = jax.lax.scan(
          linear_step, x_BTD, (block.linear_layers, state)
      )
      x_BTD, own, sinks = full_step(x_BTD, sinks, block.full_layer, index)
      return (x_BTD, sinks), (own, state)

    sinks = tuple(prefix.sink for prefix in prefixes)
    indices = jnp.arange(self.config.num_blocks, dtype=jnp.int32)
    (x_BTD, sinks), (own, recurrent) = jax.lax.scan(
        block_step, (x_BTD, sinks), (self.blocks, recurrent, indices)
    )
    return self.norm(x_BTD), SegmentDelta(own, recurrent, sinks)

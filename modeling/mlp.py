"""The gated feed-forward."""

from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from modeling.decoder_config import DecoderConfig
from modeling.linear import Linear
from pallas_kernels.shapes import typed


class MLP(nnx.Module):
  """down(silu(gate x) * up x)."""

  def __init__(
      self, size: int, *, config: DecoderConfig, mesh: Mesh, rngs: nnx.Rngs
  ):
    hidden = config.hidden_size
    linear = partial(Linear, config=config, mesh=mesh, rngs=rngs)
    inward, outward = ("embed", "mlp"), ("mlp", "embed")
    self.gate_proj = linear("gate_proj", hidden, size, axes=inward)
    self.up_proj = linear("up_proj", hidden, size, axes=inward)
    self.down_proj = linear("down_proj", size, hidden, axes=outward)

  @typed
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Applies the feed-forward to every token."""
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))

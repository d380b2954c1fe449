"""Linear layers without bias, optionally with a low-rank adapter."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from modeling.decoder_config import DecoderConfig
from modeling.parameter import normal, param
from modeling.sharding import Axes, gather
from pallas_kernels.shapes import typed, wide_dtype


class Linear(nnx.Module):
  """y = x W, plus (alpha / rank) (x A) B where the config adapts `name`.

  W is [in, out], the transpose of the checkpoint's. A and B are kept in float32
  or wider; B starts at zero, so that a fresh adapter changes nothing.
  """

  def __init__(
      self,
      name: str,
      d_in: int,
      d_out: int,
      *,
      axes: tuple[str | None, str | None],
      kind: type[nnx.Variable] = nnx.Param,
      config: DecoderConfig,
      mesh: Mesh,
      rngs: nnx.Rngs,
  ):
    self.axes = axes
    self.mesh = mesh
    self.kernel = param(
        normal(
            rngs,
            (d_in, d_out),
            std=config.initializer_range,
            dtype=config.param_dtype,
        ),
        axes,
        kind=kind,
    )
    self.lora_scale = 0.0
    self.lora_a = nnx.data(None)
    self.lora_b = nnx.data(None)
    lora = config.lora
    if lora is None or name not in config.adapted:
      return
    dtype = wide_dtype(config.param_dtype)
    self.lora_scale = lora.alpha / lora.rank
    self.lora_a = param(
        normal(rngs, (d_in, lora.rank), std=d_in**-0.5, dtype=str(dtype)),
        (axes[0], None),
        kind=nnx.LoRAParam,
    )
    self.lora_b = param(
        jnp.zeros((lora.rank, d_out), dtype),
        (None, axes[1]),
        kind=nnx.LoRAParam,
    )

  @typed
  def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
    """Applies the layer in the dtype of `x`."""
    y = x @ self.used_kernel(x.dtype)
    if (adapter := self.used_adapter(x.dtype)) is not None:
      a, b = adapter
      y += self.lora_scale * (x @ a @ b)
    return y

  def wide_product(self, x: jax.Array) -> jax.Array:
    """Applies the layer with a result in float32 or wider, for the head."""
    y = wide_product(x, self.used_kernel(x.dtype))
    if (adapter := self.used_adapter(y.dtype)) is not None:
      a, b = adapter
      y += self.lora_scale * (x.astype(y.dtype) @ a @ b)
    return y

  def used_kernel(self, dtype: jnp.dtype) -> jax.Array:
    """Returns W as a product uses it: gathered, and cast."""
    return self._used(self.kernel, self.axes, dtype)

  def used_adapter(
      self, dtype: jnp.dtype
  ) -> tuple[jax.Array, jax.Array] | None:
    """Returns A and B so, or None without an adapter."""
    if self.lora_a is None or self.lora_b is None:
      return None
    return (
        self._used(self.lora_a, (self.axes[0], None), dtype),
        self._used(self.lora_b, (None, self.axes[1]), dtype),
    )

  def _used(self, weight: nnx.Param, axes: Axes, dtype):
    return gather(weight[...].astype(dtype), self.mesh, axes)


def wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns x W, accumulated and kept in float32 or wider."""
  return jnp.dot(x, kernel, preferred_element_type=wide_dtype(x.dtype))

"""Linear layers without bias, optionally with a low-rank adapter."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from modeling.parameter import normal, param
from modeling.qwen3_5_config import Qwen3_5Config
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
      axes: tuple[str, str],
      config: Qwen3_5Config,
      rngs: nnx.Rngs,
  ):
    self.kernel = param(
        normal(
            rngs,
            (d_in, d_out),
            std=config.initializer_range,
            dtype=config.param_dtype,
        ),
        axes,
    )
    lora = config.lora
    adapted = lora is not None and name in lora.targets
    self.lora_scale = lora.alpha / lora.rank if adapted else 0.0
    self.lora_a = nnx.data(None)
    self.lora_b = nnx.data(None)
    if adapted:
      dtype = wide_dtype(config.param_dtype)
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
    y = x @ self.kernel[...].astype(x.dtype)
    if self.lora_a is not None:
      low = x @ self.lora_a[...].astype(x.dtype)
      y += self.lora_scale * (low @ self.lora_b[...].astype(x.dtype))
    return y

  def wide_product(self, x: jax.Array) -> jax.Array:
    """Applies the layer with a result in float32 or wider, for the head."""
    return wide_product(x, self.kernel[...], self._adapter())

  def _adapter(self):
    if self.lora_a is None:
      return None
    return self.lora_a[...], self.lora_scale * self.lora_b[...]


def wide_product(
    x: jax.Array,
    kernel: jax.Array,
    adapter: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Returns x W (+ x A B), accumulated and kept in float32 or wider."""
  dtype = wide_dtype(x.dtype)
  y = jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=dtype)
  if adapter is not None:
    a, b = (weight.astype(dtype) for weight in adapter)
    y += x.astype(dtype) @ a @ b
  return y

"""Norms: RMS, plain, zero-centred or with a gate, and LayerNorm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from modeling.parameter import param
from pallas_kernels.shapes import typed, wide, wide_dtype


class RMSNorm(nnx.Module):
  """x rsqrt(mean(x^2) + eps) w, all in float32 or wider.

  GLM's in transformers rounds to the model's dtype before it multiplies by w.
  """

  def __init__(self, size: int, *, eps: float, dtype: str):
    self.weight = param(jnp.ones((size,), dtype), ("norm",))
    self.eps = eps

  @typed
  def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Normalises the last axis; returns the dtype of `x`."""
    y = _normalise(wide(x), self.eps)
    return _scale(y, wide(self.weight[...])).astype(x.dtype)


class ZeroCentredRMSNorm(nnx.Module):
  """x rsqrt(mean(x^2) + eps) (1 + w), all in float32 or wider."""

  def __init__(self, size: int, *, eps: float, dtype: str):
    self.weight = param(jnp.zeros((size,), dtype), ("norm",))
    self.eps = eps

  @typed
  def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Normalises the last axis; returns the dtype of `x`."""
    y = _normalise(wide(x), self.eps)
    return _scale(y, 1.0 + wide(self.weight[...])).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
  """x rsqrt(mean(x^2) + eps) w silu(z), all in float32 or wider.

  The weight itself stays in float32: it multiplies every GDN output.
  """

  def __init__(self, size: int, *, eps: float, dtype: str):
    self.weight = param(jnp.ones((size,), wide_dtype(dtype)), ("norm",))
    self.eps = eps

  @typed
  def __call__(
      self, x: Float[Array, "*rows V"], z: Float[Array, "*rows V"]
  ) -> Float[Array, "*rows V"]:
    """Normalises the last axis, then gates; returns the dtype of `z`."""
    y = _scale(_normalise(wide(x), self.eps), wide(self.weight[...]))
    return (y * jax.nn.silu(wide(z))).astype(z.dtype)


class LayerNorm(nnx.Module):
  """(x - mean(x)) rsqrt(var(x) + eps) w + b, all in float32 or wider."""

  def __init__(
      self, size: int, *, eps: float, dtype: str, kind: type[nnx.Variable]
  ):
    self.weight = param(jnp.ones((size,), dtype), ("norm",), kind=kind)
    self.bias = param(jnp.zeros((size,), dtype), ("norm",), kind=kind)
    self.eps = eps

  @typed
  def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Normalises the last axis; returns the dtype of `x`."""
    y = wide(x)
    y = _normalise(y - y.mean(-1, keepdims=True), self.eps)
    y = _scale(y, wide(self.weight[...]))
    bias = wide(self.bias[...]).reshape((1,) * (x.ndim - 1) + (-1,))
    return (y + bias).astype(x.dtype)


@typed
def l2_normalise(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
  """Returns x rsqrt(sum(x^2) + 1e-6) in float32 or wider."""
  x = wide(x)
  return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _normalise(x, eps):
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def _scale(x, weight):
  return x * weight.reshape((1,) * (x.ndim - 1) + (-1,))

"""What the configurations of all decoders have in common."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
  """YaRN extension of the context window. Source: arXiv 2309.00071."""

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding.

  `inv_freq`, when given, replaces theta^(-2j/d): PyTorch's float32 `pow` is one
  unit in the last place away from the correctly rounded value in about half of
  the entries, which moves cos by 4e-3 at position 262,143. Give PyTorch's table
  to reproduce it; YaRN is then assumed to be in the table already.
  """

  rope_theta: float = 1e7
  partial_rotary_factor: float = 0.25
  yarn: YarnConfig | None = None
  inv_freq: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Low-rank adapters: y = x W + (alpha / rank) (x A) B.

  `targets` are the names of the linear layers that get one; without any, those
  that the model adapts by default.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = ()

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"lora.rank={self.rank}: want at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(abc.ABC):
  """Shape and precision of a model; names are those of `config.json`.

  `dtype` is the dtype of activations and of the stored keys and values,
  `param_dtype` that of the weights. Norms, gates, recurrent states, softmax,
  router and head always work in float32 or wider.
  """

  # Linear layers that can have an adapter, and those that have by default.
  LINEAR_NAMES: ClassVar[tuple[str, ...]]
  ADAPTED_NAMES: ClassVar[tuple[str, ...]]

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  rms_norm_eps: float = 1e-6
  initializer_range: float = 0.02
  tie_word_embeddings: bool = False
  rope: RopeConfig = RopeConfig()
  lora: LoraConfig | None = None
  dtype: str = "bfloat16"
  param_dtype: str = "bfloat16"

  def __post_init__(self):
    for name in ("dtype", "param_dtype"):
      if getattr(self, name) not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            f"{name}={getattr(self, name)!r}: want bfloat16, float32 or float64"
        )
    if set(self.adapted) - set(self.LINEAR_NAMES):
      raise ValueError(
          f"lora.targets={self.adapted}: want some of {self.LINEAR_NAMES}"
      )

  @property
  def adapted(self) -> tuple[str, ...]:
    """Names of the linear layers that have an adapter."""
    if self.lora is None:
      return ()
    return self.lora.targets or self.ADAPTED_NAMES

  @property
  def trained(self) -> type[nnx.Variable]:
    """The kind of the weights that are trained: all, or adapters alone."""
    return nnx.Param if self.lora is None else nnx.LoRAParam

  @property
  def activation_dtype(self) -> jnp.dtype:
    """`dtype` as a dtype."""
    return jnp.dtype(self.dtype)

  def replace(self, **changes: Any) -> Self:
    """Returns a copy with some fields changed."""
    return dataclasses.replace(self, **changes)

  @abc.abstractmethod
  def slot_shapes(self, *, batch: int, slots: int) -> Any:
    """Returns the shapes of what grows by one slot a token."""

  @abc.abstractmethod
  def recurrent_shapes(self, *, batch: int) -> Any:
    """Returns the shapes of the states that are of one size."""

  @abc.abstractmethod
  def recurrent_axes(self, mesh: Mesh) -> Any:
    """Returns the logical axes of each of these."""

  @abc.abstractmethod
  def check_tensor(self, tensor: int) -> None:
    """Raises ValueError if so many devices cannot share a layer."""

  @classmethod
  @abc.abstractmethod
  def from_hf(cls, config: Mapping[str, Any], **changes: Any) -> Self:
    """Reads a Hugging Face `config.json`."""

  @abc.abstractmethod
  def to_hf(self) -> dict[str, Any]:
    """Returns the `config.json` of a text-only checkpoint."""

  def same_in_file(self, *left_out: str) -> dict[str, Any]:
    """Returns the fields that `config.json` has as they are.

    Raises:
      ValueError: if `rope.inv_freq` is given, which no such file can hold.
    """
    if self.rope.inv_freq is not None:
      raise ValueError(
          "rope.inv_freq has no place in config.json, and transformers makes"
          " its own table: export with rope.inv_freq=None"
      )
    names = (field.name for field in dataclasses.fields(self))
    return {n: getattr(self, n) for n in names if n not in left_out}


def refuse_other_values(
    source: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]
) -> None:
  """Refuses a file that wants what a model does not do."""
  for name, values in allowed.items():
    if name in source and source[name] not in values:
      wanted = " or ".join(repr(value) for value in values)
      raise ValueError(
          f"config.json: {name}={source[name]!r} is not supported; want"
          f" {wanted}"
      )


def require_fields(cls: Any, source: Mapping[str, Any]) -> None:
  """Refuses a file that lacks a field of `cls` without a default."""
  missing = [
      field.name
      for field in dataclasses.fields(cls)
      if field.default is dataclasses.MISSING and field.name not in source
  ]
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}")


def read_fields(cls: Any, source: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries of `source` that are named like fields of `cls`."""
  require_fields(cls, source)
  names = [field.name for field in dataclasses.fields(cls)]
  return {name: source[name] for name in names if name in source}

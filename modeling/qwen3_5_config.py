"""Configuration of Qwen3.5/3.6 decoders, with the checkpoint's own names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


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
class MoeConfig:
  """Mixture of experts in place of the dense feed-forward."""

  num_experts: int
  num_experts_per_tok: int
  moe_intermediate_size: int
  shared_expert_intermediate_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Low-rank adapters: y = x W + (alpha / rank) (x A) B.

  `targets` are the names of the linear layers that get one.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = (
      "q_proj", "k_proj", "v_proj", "o_proj",
      "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
      "gate_proj", "up_proj", "down_proj",
  )  # fmt: skip

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"lora.rank={self.rank}: want at least 1")
    unknown = set(self.targets) - set(LINEAR_NAMES)
    if unknown or not self.targets:
      raise ValueError(
          f"lora.targets={self.targets}: want some of {LINEAR_NAMES}"
      )


LINEAR_NAMES = (
    "q_proj", "k_proj", "v_proj", "o_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "gate_proj", "up_proj", "down_proj", "shared_expert_gate", "lm_head",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config:
  """Shape and precision of a model; names are those of `config.json`.

  `dtype` is the dtype of activations and of the stored keys and values,
  `param_dtype` that of the weights. Norms, gates, the recurrent state, softmax,
  router and head always work in float32 or wider.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int | None = None
  num_hidden_layers: int
  full_attention_interval: int = 4
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int = 256
  linear_num_key_heads: int
  linear_num_value_heads: int
  linear_key_head_dim: int = 128
  linear_value_head_dim: int = 128
  linear_conv_kernel_dim: int = 4
  rms_norm_eps: float = 1e-6
  initializer_range: float = 0.02
  tie_word_embeddings: bool = False
  rope: RopeConfig = RopeConfig()
  moe: MoeConfig | None = None
  lora: LoraConfig | None = None
  dtype: str = "bfloat16"
  param_dtype: str = "bfloat16"

  def __post_init__(self):
    whole = {
        "num_hidden_layers": (
            self.num_hidden_layers, "full_attention_interval",
            self.full_attention_interval,
        ),
        "num_attention_heads": (
            self.num_attention_heads, "num_key_value_heads",
            self.num_key_value_heads,
        ),
        "linear_num_value_heads": (
            self.linear_num_value_heads, "linear_num_key_heads",
            self.linear_num_key_heads,
        ),
    }  # fmt: skip
    for name, (value, divisor_name, divisor) in whole.items():
      if value % divisor:
        raise ValueError(
            f"{name}={value}: want a multiple of {divisor_name}={divisor}"
        )
    if (self.intermediate_size is None) == (self.moe is None):
      raise ValueError(
          f"intermediate_size={self.intermediate_size}, moe={self.moe}: want"
          " exactly one of the two"
      )
    for name in ("dtype", "param_dtype"):
      if getattr(self, name) not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            f"{name}={getattr(self, name)!r}: want bfloat16, float32 or float64"
        )

  @property
  def num_blocks(self) -> int:
    """Blocks of `full_attention_interval` layers; the last one is full."""
    return self.num_hidden_layers // self.full_attention_interval

  @property
  def conv_channels(self) -> int:
    """Channels of the convolution over q, k and v of a linear layer."""
    keys = self.linear_num_key_heads * self.linear_key_head_dim
    values = self.linear_num_value_heads * self.linear_value_head_dim
    return 2 * keys + values

  @property
  def activation_dtype(self) -> jnp.dtype:
    """`dtype` as a dtype."""
    return jnp.dtype(self.dtype)

  def replace(self, **changes: Any) -> "Qwen3_5Config":
    """Returns a copy with some fields changed."""
    return dataclasses.replace(self, **changes)

  @classmethod
  def from_hf(
      cls, config: Mapping[str, Any], **changes: Any
  ) -> "Qwen3_5Config":
    """Reads a Hugging Face `config.json`, whole or its `text_config`.

    Args:
      config: the parsed file.
      **changes: fields of this class that the file does not hold (`dtype`,
        `lora`, ...).

    Raises:
      ValueError: for a value that the model would have to honour and does not,
        and for a missing key, by name.
    """
    text = dict(config.get("text_config", config))
    _refuse_unsupported(text)
    _require(cls, text)
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    fields = {
        field.name: text[field.name]
        for field in dataclasses.fields(cls)
        if field.name in text and field.name not in _NOT_FROM_FILE
    }
    if "tie_word_embeddings" in config:
      fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    fields["full_attention_interval"] = _interval(text)
    fields["rope"] = _rope(rope, text)
    if "num_experts" in text:
      fields.pop("intermediate_size", None)
      fields["moe"] = _read(MoeConfig, text)
    return cls(**(fields | changes))

  def to_hf(self) -> dict[str, Any]:
    """Returns the `config.json` of a text-only checkpoint.

    `from_hf` gives back this configuration, but for `dtype`, `param_dtype` and
    `lora`, which it does not read from a file. The context window is not a
    field here: it is written as the family's 262,144, or what YaRN makes of its
    original one. Token ids are left to `generation_config.json`.

    Raises:
      ValueError: if `rope.inv_freq` is given, which no such file can hold.
    """
    if self.rope.inv_freq is not None:
      raise ValueError(
          "rope.inv_freq has no place in config.json, and transformers makes"
          " its own table: export with rope.inv_freq=None"
      )
    same = {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
        if field.name not in (*_NOT_FROM_FILE, "intermediate_size")
    }
    family = "Qwen3_5" if self.moe is None else "Qwen3_5Moe"
    feed_forward = {"intermediate_size": self.intermediate_size}
    if self.moe is not None:
      feed_forward = dataclasses.asdict(self.moe)
    linear = ["linear_attention"] * (self.full_attention_interval - 1)
    rope = {
        "rope_type": "default",
        "rope_theta": self.rope.rope_theta,
        "partial_rotary_factor": self.rope.partial_rotary_factor,
    }
    window = 262144
    if self.rope.yarn is not None:
      rope |= {"rope_type": "yarn", **dataclasses.asdict(self.rope.yarn)}
      window = round(
          self.rope.yarn.factor
          * self.rope.yarn.original_max_position_embeddings
      )
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": (
            "qwen3_5_text" if self.moe is None else "qwen3_5_moe_text"
        ),
        "dtype": self.param_dtype,
        **same,
        **feed_forward,
        "layer_types": [*linear, "full_attention"] * self.num_blocks,
        "max_position_embeddings": window,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }


_NOT_FROM_FILE = ("dtype", "param_dtype", "lora", "moe", "rope")

# What the model takes for granted; a file that says otherwise is refused.
_REQUIRED = {
    "model_type": (
        "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    ),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu", None),
    "mamba_ssm_dtype": ("float32",),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
}  # fmt: skip


def _refuse_unsupported(text):
  for name, allowed in _REQUIRED.items():
    if name in text and text[name] not in allowed:
      wanted = " or ".join(repr(value) for value in allowed)
      raise ValueError(
          f"config.json: {name}={text[name]!r} is not supported; want {wanted}"
      )


def _require(cls, source):
  """Refuses a file that lacks a field of `cls` without a default."""
  missing = [
      field.name
      for field in dataclasses.fields(cls)
      if field.default is dataclasses.MISSING and field.name not in source
  ]
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}")


def _read(cls, source):
  """Makes a `cls` of the entries of `source` that are named like its fields."""
  _require(cls, source)
  names = [field.name for field in dataclasses.fields(cls)]
  return cls(**{name: source[name] for name in names if name in source})


def _interval(text):
  """Length of the repeated run of layers: n - 1 linear, then 1 full."""
  layers = text["num_hidden_layers"]
  types = text.get("layer_types")
  if types is None:
    return text.get("full_attention_interval", 4)
  interval = next(
      (i + 1 for i, kind in enumerate(types) if kind == "full_attention"), 0
  )
  pattern = ["linear_attention"] * (interval - 1) + ["full_attention"]
  if interval == 0 or pattern * (layers // interval) != list(types):
    raise ValueError(
        f"config.json: layer_types={types} is not supported; want a repeated"
        " run of linear_attention layers closed by one full_attention layer"
    )
  return interval


def _rope(rope, text):
  kind = rope.get("rope_type", rope.get("type", "default"))
  yarn = None
  if kind == "yarn":
    known = {f.name for f in dataclasses.fields(YarnConfig)}
    ignored = {
        "rope_type", "type", "rope_theta", "partial_rotary_factor",
        "mrope_section", "mrope_interleaved",
    }  # fmt: skip
    unknown = set(rope) - known - ignored
    if unknown:
      raise ValueError(
          f"config.json: rope_parameters {sorted(unknown)} are not supported"
      )
    yarn = _read(YarnConfig, rope)
  elif kind != "default":
    raise ValueError(
        f"config.json: rope_type={kind!r} is not supported; want 'default' or"
        " 'yarn'"
    )
  return RopeConfig(
      rope_theta=rope.get("rope_theta", text.get("rope_theta", 1e4)),
      partial_rotary_factor=rope.get(
          "partial_rotary_factor", text.get("partial_rotary_factor", 0.25)
      ),
      yarn=yarn,
  )

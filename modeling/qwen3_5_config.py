"""Configuration of Qwen3.5/3.6 decoders, with the checkpoint's own names."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from modeling.decoder_config import (
    DecoderConfig,
    RopeConfig,
    YarnConfig,
    read_fields,
    refuse_other_values,
    require_fields,
)
from modeling.layer_state import DeltaState, KvState
from pallas_kernels.shapes import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
  """Mixture of experts in place of the dense feed-forward."""

  num_experts: int
  num_experts_per_tok: int
  moe_intermediate_size: int
  shared_expert_intermediate_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(DecoderConfig):
  """Shape and precision of a model."""

  ADAPTED_NAMES: ClassVar[tuple[str, ...]] = (
      "q_proj", "k_proj", "v_proj", "o_proj",
      "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
      "gate_proj", "up_proj", "down_proj",
  )  # fmt: skip
  LINEAR_NAMES: ClassVar[tuple[str, ...]] = (
      *ADAPTED_NAMES,
      "experts",
      "shared_expert_gate",
      "lm_head",
  )

  intermediate_size: int | None = None
  full_attention_interval: int = 4
  num_key_value_heads: int
  head_dim: int = 256
  linear_num_key_heads: int
  linear_num_value_heads: int
  linear_key_head_dim: int = 128
  linear_value_head_dim: int = 128
  linear_conv_kernel_dim: int = 4
  moe: MoeConfig | None = None

  def __post_init__(self):
    super().__post_init__()
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

  def slot_shapes(self, *, batch: int, slots: int) -> KvState:
    """Returns the shapes of keys and values, [L,B,S,N,K]."""
    sizes = (self.num_key_value_heads, self.head_dim)
    shape: Any = jax.ShapeDtypeStruct(
        (self.num_blocks, batch, slots, *sizes), self.activation_dtype
    )
    return KvState(k=shape, v=shape)

  def recurrent_shapes(self, *, batch: int) -> DeltaState:
    """Returns the shapes of the Gated DeltaNet states of so many rows."""
    layers = (self.num_blocks, self.full_attention_interval - 1, batch)
    window = self.linear_conv_kernel_dim - 1
    keys = (self.linear_num_key_heads, self.linear_key_head_dim)
    values = (self.linear_num_value_heads, self.linear_value_head_dim)
    matrix = (values[0], keys[1], values[1])
    dtype = self.activation_dtype

    def shape(*sizes, dtype=dtype) -> Any:
      return jax.ShapeDtypeStruct((*layers, *sizes), dtype)

    return DeltaState(
        recurrent=shape(*matrix, dtype=wide_dtype(dtype)),
        conv_q=shape(window, *keys),
        conv_k=shape(window, *keys),
        conv_v=shape(window, *values),
    )

  def recurrent_axes(self, mesh: Mesh) -> DeltaState:
    """Returns the logical axes of each leaf of these."""
    stacked, heads = ("layers", "layers", "batch"), self.delta_heads(mesh)
    recurrent: Any = (*stacked, heads, None, None)
    conv: Any = (*stacked, None, heads, None)
    return DeltaState(
        recurrent=recurrent, conv_q=conv, conv_k=conv, conv_v=conv
    )

  def delta_heads(self, mesh: Mesh) -> str:
    """Returns the logical name of the heads of a Gated DeltaNet state.

    Where `tensor` x `context` divides them they lie over both ("spread_heads").
    Elsewhere they lie over `tensor` ("linear_heads"), and each shard of
    `context` has the same state.

    Raises:
      ValueError: if `tensor` does not divide the heads.
    """
    heads, tensor = self.linear_num_key_heads, mesh.shape["tensor"]
    # A value head lies where its key head does; there are a multiple of them.
    if heads % tensor:
      raise ValueError(
          f"mesh.tensor={tensor}: want a divisor of"
          f" linear_num_key_heads={heads}, since a device holds whole heads"
      )
    spread = heads % (tensor * mesh.shape["context"]) == 0
    return "spread_heads" if spread else "linear_heads"

  def check_tensor(self, tensor: int) -> None:
    """Raises ValueError if some head would be cut."""
    names = (
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
    )
    heads = {name: getattr(self, name) for name in names}
    wrong = [f"{name}={n}" for name, n in heads.items() if n % tensor]
    if wrong:
      raise ValueError(
          f"mesh.tensor={tensor}: want a divisor of"
          f" {math.gcd(*heads.values())}, so that no head is cut; it does not"
          f" divide {', '.join(wrong)}"
      )

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
    refuse_other_values(text, _REQUIRED)
    require_fields(cls, text)
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
      fields["moe"] = MoeConfig(**read_fields(MoeConfig, text))
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
    same = self.same_in_file(*_NOT_FROM_FILE, "intermediate_size")
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
    yarn = YarnConfig(**read_fields(YarnConfig, rope))
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

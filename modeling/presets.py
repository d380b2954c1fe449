"""Model configurations by name: real sizes and tiny ones for tests and demos.

Sources: the config.json of Qwen3.6-27B, Qwen3.5-4B, Qwen3.5-0.8B and
Qwen3.5-35B-A3B; that of GLM-5.2, and for GLM-5 the defaults of transformers.
"""

import difflib
from typing import Any

from modeling.decoder_config import DecoderConfig, RopeConfig
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.qwen3_5_config import MoeConfig, Qwen3_5Config

_TINY: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    dtype="float32",
    param_dtype="float32",
)

_GLM_5: dict[str, Any] = dict(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=78,
    num_attention_heads=64,
    n_routed_experts=256,
    num_experts_per_tok=8,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
)

PRESETS: dict[str, DecoderConfig] = {
    "qwen3.6-27b": Qwen3_5Config(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
    ),
    "qwen3.5-4b": Qwen3_5Config(
        vocab_size=248320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3.5-0.8b": Qwen3_5Config(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3.6-35b-a3b": Qwen3_5Config(
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe=MoeConfig(
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
    ),
    "glm-5.2": GlmMoeDsaConfig(
        **_GLM_5,
        indexer_types=("full", "full") + ("full", *["shared"] * 3) * 19,
        rope=RopeConfig(rope_theta=8e6, partial_rotary_factor=1.0),
    ),
    "glm-5": GlmMoeDsaConfig(
        **_GLM_5,
        indexer_types=("full",) * 78,
        rope=RopeConfig(rope_theta=1e6, partial_rotary_factor=1.0),
    ),
    "tiny": Qwen3_5Config(**_TINY, intermediate_size=128),
    "tiny-moe": Qwen3_5Config(
        **_TINY,
        moe=MoeConfig(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    "tiny-glm": GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        indexer_types=("full", "full") + ("full", "shared", "shared") * 2,
        mlp_layer_types=("dense",) * 2 + ("sparse",) * 6,
        dtype="float32",
        param_dtype="float32",
    ),
}


def preset(name: str) -> DecoderConfig:
  """Returns the configuration called `name`.

  Raises:
    ValueError: for an unknown name, with the nearest and all known ones.
  """
  if name in PRESETS:
    return PRESETS[name]
  near = difflib.get_close_matches(name, PRESETS, n=1)
  hint = f"; did you mean {near[0]!r}?" if near else ""
  raise ValueError(
      f"model={name!r} is unknown: want one of {', '.join(PRESETS)}{hint}"
  )

"""Configuration of GLM-5 decoders, with the checkpoint's own names."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import (
    DecoderConfig,
    RopeConfig,
    refuse_other_values,
    require_fields,
)
from modeling.layer_state import LatentState
from modeling.parameter import IndexerParam

_ROPE = RopeConfig(rope_theta=8e6, partial_rotary_factor=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Consecutive runs of like shape, whose weights are stacked.

  A run is a full layer, which chooses for itself, and the layers after it that
  share its choice: its sharers. Of these, neighbours with the same kind of
  feed-forward are stacked too: layer i of `sharers[s]` in run r is layer
  `first_layer + r * layers_per_run + sharer_offsets[s] + i` of the model.
  """

  first_layer: int
  runs: int
  full: str  # "dense" or "sparse": feed-forward of the full layers
  sharers: tuple[tuple[str, int], ...]  # kinds and how many layers, in order

  @property
  def layers_per_run(self) -> int:
    """A full layer and its sharers."""
    return 1 + sum(count for _, count in self.sharers)

  @property
  def sparse_per_run(self) -> int:
    """Those of them that have experts."""
    kinds = [(self.full, 1), *self.sharers]
    return sum(count for kind, count in kinds if kind == "sparse")

  @property
  def sharer_offsets(self) -> tuple[int, ...]:
    """How many layers of a run stand before each stack of its sharers."""
    counts = [count for _, count in self.sharers]
    return tuple(itertools.accumulate(counts, initial=1))[:-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DecoderConfig):
  """Shape and precision of a model.

  A layer attends to the tokens that an indexer chooses: its own, if its entry
  in `indexer_types` is "full", or that of the last such layer before it, if it
  is "shared". `latent_norm_eps` is that of the norms of both latents: 1e-6 in
  transformers, 1e-5 in vLLM and SGLang; no file tells it. `train_indexers`
  trains the indexers alone, by a loss of their own, and keeps their weights in
  float32 or wider.
  """

  ADAPTED_NAMES: ClassVar[tuple[str, ...]] = (
      "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
      "gate_proj", "up_proj", "down_proj", "experts", "lm_head",
  )  # fmt: skip
  LINEAR_NAMES: ClassVar[tuple[str, ...]] = ADAPTED_NAMES

  intermediate_size: int
  moe_intermediate_size: int
  n_routed_experts: int
  num_experts_per_tok: int
  n_shared_experts: int = 1
  routed_scaling_factor: float = 2.5
  q_lora_rank: int
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  index_n_heads: int
  index_head_dim: int
  index_topk: int
  indexer_types: tuple[str, ...]  # "full" or "shared", of each layer
  mlp_layer_types: tuple[str, ...]  # "dense" or "sparse", of each layer
  rms_norm_eps: float = 1e-5
  latent_norm_eps: float = 1e-6
  train_indexers: bool = False
  rope: RopeConfig = _ROPE

  def __post_init__(self):
    super().__post_init__()
    if self.rope.partial_rotary_factor != 1.0 or self.rope.yarn is not None:
      raise ValueError(
          f"rope={self.rope}: want partial_rotary_factor=1.0, of the"
          f" qk_rope_head_dim={self.qk_rope_head_dim} that are rotated, and"
          " yarn=None"
      )
    for name, known in (
        ("indexer_types", ("full", "shared")),
        ("mlp_layer_types", ("dense", "sparse")),
    ):
      kinds = getattr(self, name)
      if len(kinds) != self.num_hidden_layers or set(kinds) - set(known):
        raise ValueError(
            f"{name}={kinds}: want {' or '.join(known)} for each of"
            f" num_hidden_layers={self.num_hidden_layers}"
        )
    if self.tie_word_embeddings:
      raise ValueError("tie_word_embeddings=True: want False; the head is one")
    if self.train_indexers and self.lora is not None:
      raise ValueError(
          f"lora={self.lora}: want None with train_indexers=True, which trains"
          " no adapter"
      )
    if self.indexer_types[0] != "full":
      raise ValueError(
          f"indexer_types={self.indexer_types}: want 'full' for the first"
          " layer, which has no other's choice to share"
      )

  @property
  def trained(self) -> type[nnx.Variable]:
    """The kind of the weights that are trained."""
    return IndexerParam if self.train_indexers else super().trained

  @property
  def qk_head_dim(self) -> int:
    """Size of a head's query and, expanded, of its key."""
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def latent_dim(self) -> int:
    """Size of what is stored of a token in a layer: latent and rope key."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  @property
  def num_indexers(self) -> int:
    """Layers that choose for themselves."""
    return self.indexer_types.count("full")

  @property
  def groups(self) -> tuple[Group, ...]:
    """All layers, in order, cut into runs of which like ones are stacked."""
    starts = [i for i, kind in enumerate(self.indexer_types) if kind == "full"]
    shapes = []
    for start, end in itertools.pairwise([*starts, self.num_hidden_layers]):
      full, *rest = self.mlp_layer_types[start:end]
      sharers = ((kind, len(list(x))) for kind, x in itertools.groupby(rest))
      shapes.append((full, tuple(sharers)))
    groups, first = [], 0
    for (full, sharers), like in itertools.groupby(shapes):
      group = Group(
          first_layer=first,
          runs=len(list(like)),
          full=full,
          sharers=sharers,
      )
      groups.append(group)
      first += group.runs * group.layers_per_run
    return tuple(groups)

  def slot_shapes(self, *, batch: int, slots: int) -> LatentState:
    """Returns the shapes of latents [L,B,S,576] and index keys [l,B,S,128]."""

    def shape(layers, size) -> Any:
      return jax.ShapeDtypeStruct(
          (layers, batch, slots, size), self.activation_dtype
      )

    return LatentState(
        latent=shape(self.num_hidden_layers, self.latent_dim),
        index_key=shape(self.num_indexers, self.index_head_dim),
    )

  def recurrent_shapes(self, *, batch: int) -> None:
    """There are none."""

  def recurrent_axes(self, mesh: Mesh) -> None:
    """There are none."""

  def check_tensor(self, tensor: int) -> None:
    """Raises ValueError unless each device computes whole layers."""
    if tensor > 1:
      raise ValueError(
          f"mesh.tensor={tensor}: want 1, since all heads of a layer attend to"
          " one latent, which each device of tensor would have to keep; give"
          " these devices to mesh.context"
      )

  @classmethod
  def from_hf(cls, config: Mapping[str, Any], **changes: Any) -> Self:
    """Reads a Hugging Face `config.json`.

    Its `head_dim` is not read: it is 192 in the file of GLM-5.2 and 64 in that
    of GLM-5, whose heads are alike.

    Args:
      config: the parsed file.
      **changes: fields of this class that the file does not hold (`dtype`,
        `lora`, `latent_norm_eps`, ...).

    Raises:
      ValueError: for a value that the model would have to honour and does not,
        and for a missing key, by name.
    """
    refuse_other_values(config, _REQUIRED)
    _check_layer_types(config.get("layer_types") or ())
    _check_quantisation(config.get("quantization_config"))
    require_fields(cls, dict.fromkeys(_SCHEDULES) | dict(config))
    fields = {
        field.name: config[field.name]
        for field in dataclasses.fields(cls)
        if field.name in config and field.name not in _NOT_FROM_FILE
    }
    fields |= {
        "indexer_types": _indexer_types(config),
        "mlp_layer_types": _mlp_layer_types(config),
        "rope": _rope(config),
    }
    read = cls(**(fields | changes))
    refuse_other_values(config, read._implied())
    return read

  def to_hf(self) -> dict[str, Any]:
    """Returns the `config.json` of a checkpoint.

    `from_hf` gives back this configuration, but for `dtype`, `param_dtype`,
    `lora`, `latent_norm_eps` and `train_indexers`, which it does not read from
    a file. The context window is not a field here: it is written as the
    1,048,576 of GLM-5.2. Token ids are left to `generation_config.json`.

    Raises:
      ValueError: if `rope.inv_freq` is given, which no such file can hold.
    """
    same = self.same_in_file(*_NOT_FROM_FILE)
    assumed = {name: values[0] for name, values in _REQUIRED.items()}
    implied = {name: values[0] for name, values in self._implied().items()}
    dense = itertools.takewhile("dense".__eq__, self.mlp_layer_types)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "dtype": self.param_dtype,
        **same,
        **assumed,
        **implied,
        "indexer_types": list(self.indexer_types),
        "mlp_layer_types": list(self.mlp_layer_types),
        # The same for readers that know no lists.
        "index_topk_pattern": "".join(x[0].upper() for x in self.indexer_types),
        "first_k_dense_replace": len(list(dense)),
        "head_dim": self.qk_rope_head_dim,  # as transformers writes it
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": self.rope.rope_theta,
        },
    }

  def _implied(self) -> dict[str, tuple[int, ...]]:
    """What a file tells again, and must tell alike."""
    return {
        "num_key_value_heads": (self.num_attention_heads,),
        "qk_head_dim": (self.qk_head_dim,),
    }


_NOT_FROM_FILE = (
    "dtype", "param_dtype", "lora", "rope", "latent_norm_eps", "train_indexers",
)  # fmt: skip
_SCHEDULES = ("indexer_types", "mlp_layer_types")

# What the model takes for granted; a file that says otherwise is refused.
_REQUIRED = {
    "model_type": ("glm_moe_dsa",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "n_group": (1,),
    "topk_group": (1,),
    "norm_topk_prob": (True,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
}
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
# Loading multiplies such weights with their scales.
_FP8 = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "weight_block_size": ([128, 128],),
}


def _check_layer_types(types):
  for kind in types:
    refuse_other_values({"layer_types": kind}, {"layer_types": _LAYER_TYPES})


def _check_quantisation(config):
  if config is not None:
    # Without a block size there is one scale for all of a weight.
    refuse_other_values({"weight_block_size": None, **config}, _FP8)


def _indexer_types(config):
  """The schedule: listed, as a pattern of F and S, or by its period."""
  if config.get("indexer_types") is not None:
    return tuple(config["indexer_types"])
  pattern = config.get("index_topk_pattern")
  if pattern is not None:
    kinds = {"F": "full", "S": "shared"}
    return tuple(kinds.get(letter, letter) for letter in pattern)
  period = config.get("index_topk_freq", 1)
  offset = config.get("index_skip_topk_offset", 2)
  return tuple(
      "shared" if max(layer - offset + 1, 0) % period else "full"
      for layer in range(config["num_hidden_layers"])
  )


def _mlp_layer_types(config):
  if config.get("mlp_layer_types") is not None:
    return tuple(config["mlp_layer_types"])
  if "first_k_dense_replace" not in config:
    raise ValueError(
        "config.json lacks mlp_layer_types, and first_k_dense_replace too"
    )
  layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
  return tuple("dense" if i < dense else "sparse" for i in range(layers))


def _rope(config):
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  rope = {**config, **rope}  # older files have the rest at the top
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind != "default":
    raise ValueError(
        f"config.json: rope_type={kind!r} is not supported; want 'default'"
    )
  refuse_other_values(rope, {"partial_rotary_factor": (1.0,)})
  if "rope_theta" not in rope:
    raise ValueError("config.json lacks rope_theta")
  return RopeConfig(rope_theta=rope["rope_theta"], partial_rotary_factor=1.0)

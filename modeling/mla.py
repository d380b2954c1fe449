"""Multi-head latent attention to what an indexer chose.

One latent and one rope key of a token are all that is stored of it, for all
heads. With the up-projection of keys applied to the query instead, and that of
values to the output, attention runs on the latents as they are (absorbed):

    score = (W_k^T q_nope) . c + q_rope . k_rope,     out = W_v sum_s p_s c_s

Over a mesh this is pass-Q, as in `attention.py`: each shard of `context` has
all queries of the segment attend to the chosen latents that it owns.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.indexer import Choice, Indexer, choice_specs
from modeling.layer_state import Prefix
from modeling.linear import Linear
from modeling.norm import RMSNorm
from modeling.rope import Rotation, rotate_interleaved
from modeling.sharding import spec
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.prefix_attention import merge, merge_shards
from pallas_kernels.shapes import wide

_OWN = ("batch", "time", None)


class MLA(nnx.Module):
  """o_proj(attention of q_b_proj(norm(q_a_proj x)) to the chosen latents).

  Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
  """

  def __init__(
      self,
      config: GlmMoeDsaConfig,
      *,
      indexed: bool,
      mesh: Mesh,
      rngs: nnx.Rngs,
  ):
    self.config = config
    self.mesh = mesh
    hidden, heads = config.hidden_size, config.num_attention_heads
    linear = partial(Linear, config=config, mesh=mesh, rngs=rngs)
    norm = partial(
        RMSNorm, eps=config.latent_norm_eps, dtype=config.param_dtype
    )
    self.q_a_proj = linear(
        "q_a_proj", hidden, config.q_lora_rank, axes=("embed", None)
    )
    self.q_a_layernorm = norm(config.q_lora_rank)
    self.q_b_proj = linear(
        "q_b_proj",
        config.q_lora_rank,
        heads * config.qk_head_dim,
        axes=("embed", "heads"),
    )
    self.kv_a_proj_with_mqa = linear(
        "kv_a_proj_with_mqa", hidden, config.latent_dim, axes=("embed", None)
    )
    self.kv_a_layernorm = norm(config.kv_lora_rank)
    self.kv_b_proj = linear(
        "kv_b_proj",
        config.kv_lora_rank,
        heads * (config.qk_nope_head_dim + config.v_head_dim),
        axes=("embed", "heads"),
    )
    self.o_proj = linear(
        "o_proj", heads * config.v_head_dim, hidden, axes=("heads", "embed")
    )
    self.indexer = nnx.data(
        Indexer(config, mesh=mesh, rngs=rngs) if indexed else None
    )

  def query_latent(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the normed latent of the queries, which the indexer reads too."""
    return self.q_a_layernorm(self.q_a_proj(x_BTD))

  def __call__(
      self,
      x_BTD: jax.Array,
      query_latent_BTZ: jax.Array,
      *,
      rotation: Rotation,
      prefixes: Sequence[Prefix],
      layer: jax.Array,
      choice: Choice,
  ) -> tuple[jax.Array, jax.Array, tuple[jax.Array | None, ...]]:
    """Returns the output [B,T,D], the segment's latents, and their sinks.

    Args:
      x_BTD: the layer's input, normed.
      query_latent_BTZ: that of its queries.
      rotation: rope at the segment's positions.
      prefixes: what the segment follows.
      layer: [] int32, number of this layer.
      choice: what each token attends to.
    """
    latent = self.latents(x_BTD, rotation)
    query = self.absorbed_query(query_latent_BTZ, rotation)
    out, sinks = self._attend(query, latent, tuple(prefixes), layer, choice)
    return self._output(out.astype(x_BTD.dtype)), latent, sinks

  def latents(self, x_BTD: jax.Array, rotation: Rotation) -> jax.Array:
    """Returns [latent after its norm | rope key], what is stored of a token."""
    rank = self.config.kv_lora_rank
    both = self.kv_a_proj_with_mqa(x_BTD)
    rope_key = rotate_interleaved(both[:, :, None, rank:], rotation)[:, :, 0]
    latent = self.kv_a_layernorm(both[..., :rank])
    return jnp.concatenate([latent, rope_key], -1)

  def absorbed_query(
      self, query_latent_BTZ: jax.Array, rotation: Rotation
  ) -> jax.Array:
    """Returns [B,T,H,Z+K], which meets latents and rope keys as they are."""
    nope, _ = self._key_sizes
    shape = (*query_latent_BTZ.shape[:2], -1, self.config.qk_head_dim)
    q = self.q_b_proj(query_latent_BTZ).reshape(shape)
    q, q_rope = q[..., :nope], rotate_interleaved(q[..., nope:], rotation)
    kernel, adapter = self._up(slice(nope), q.dtype)
    absorbed = jnp.einsum("bthn,zhn->bthz", q, kernel)
    if adapter is not None:
      a, b = adapter
      low = jnp.einsum("bthn,rhn->bthr", q, b)
      absorbed += self.kv_b_proj.lora_scale * jnp.einsum(
          "bthr,zr->bthz", low, a
      )
    return jnp.concatenate([absorbed, q_rope], -1)

  def _output(self, out_BTHZ):
    nope, values = self._key_sizes
    kernel, adapter = self._up(slice(nope, nope + values), out_BTHZ.dtype)
    out = jnp.einsum("bthz,zhv->bthv", out_BTHZ, kernel)
    if adapter is not None:
      a, b = adapter
      low = jnp.einsum("bthz,zr->bthr", out_BTHZ, a)
      out += self.kv_b_proj.lora_scale * jnp.einsum("bthr,rhv->bthv", low, b)
    return self.o_proj(out.reshape(*out.shape[:2], -1))

  @property
  def _key_sizes(self):
    """Sizes of a head's part of kv_b_proj: keys, then values."""
    return self.config.qk_nope_head_dim, self.config.v_head_dim

  def _up(self, part, dtype):
    """Returns a part of every head of kv_b_proj [Z,H,...], and its adapter."""
    heads = self.config.num_attention_heads
    cut = lambda w: w.reshape(w.shape[0], heads, -1)[..., part]
    adapter = self.kv_b_proj.used_adapter(dtype)
    if adapter is not None:
      a, b = adapter
      adapter = a, cut(b)
    return cut(self.kv_b_proj.used_kernel(dtype)), adapter

  def _attend(self, q_BTHK, own_BTK, prefixes, layer, choice):
    """Passes the queries around; latents stay with the shard that owns them."""
    queries = spec(("batch", "time", None, None))
    attend = partial(
        latent_attention,
        scale=self.config.qk_head_dim**-0.5,
        value_dim=self.config.kv_lora_rank,
    )

    stored = tuple(prefix.specs for prefix in prefixes)

    @partial(
        jax.shard_map,
        mesh=self.mesh,
        in_specs=(queries, spec(_OWN), stored, spec(()), choice_specs()),
        out_specs=(queries, tuple(specs.sink for specs in stored)),
    )
    def on_shard(q, own, prefixes, layer, choice):
      q = jax.lax.all_gather(q, "context", axis=1, tiled=True)
      # The sum over queries of its gradient is wide, as those of prefixes are.
      sources = [(own[None], wide(own)[None], jnp.zeros_like(layer))]
      for prefix in prefixes:
        sink = prefix.sink and prefix.sink.latent
        sources.append((prefix.slots.latent, sink, layer))
      parts, sinks = [], []
      for (latents, sink, index), slots, counts in zip(
          sources, choice.slots, choice.counts, strict=True
      ):
        part, sink = attend(
            q,
            latents,
            sink,
            layer=index,
            slots=slots[0],
            counts=counts[0, ..., 0],
        )
        parts.append(part)
        sinks.append(sink)
      out = merge_shards(merge(parts), axis_name="context")
      return out, tuple(sinks[1:])

    return on_shard(q_BTHK, own_BTK, prefixes, layer, choice)

"""The indexer of DeepSeek Sparse Attention: which tokens a token attends to.

A layer that has one scores every stored key for every query and keeps the best
`index_topk`, over all shards of `context`: a choice. The layers after it that
have none are handed the same choice. Of it nothing is ever differentiated: an
indexer learns from a loss of its own, see `indexer_loss.py`.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from modeling.glm_moe_dsa_config import GlmMoeDsaConfig
from modeling.layer_state import POSITION_AXES, Prefix
from modeling.linear import Linear
from modeling.norm import LayerNorm
from modeling.parameter import IndexerParam
from modeling.rope import Rotation, rotate_interleaved
from modeling.sharding import spec
from pallas_kernels.constant import constant
from pallas_kernels.index_topk import choose, index_topk, look_up
from pallas_kernels.shapes import wide, wide_dtype

CHOICE = "choice"  # what jax.checkpoint is told to keep, not to choose again

_NORM_EPS = 1e-6
_QUERIES = ("batch", "time", None, None)
_WEIGHTS = ("batch", "time", None)
_ON_SHARD = ("shards", "batch", None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
  """What queries attend to, as each shard of `context` stores it.

  One entry of each tuple for a source of keys: the segment itself, then each
  of its prefixes.
  """

  slots: tuple[jax.Array, ...]  # [n, B, T, J] int32, the chosen ones first
  counts: tuple[jax.Array, ...]  # [n, B, T, 1] int32: how many are chosen


class Chosen(NamedTuple):
  """A choice, and the positions of what was chosen, over all shards."""

  choice: Choice
  positions: jax.Array  # [B, T, J] int32 by rank, -1 where there are fewer


class Indexer(nnx.Module):
  """sum_i w_i relu(q_i . k / sqrt(K)): the score of a key for a query.

  q_i are I small heads made of the query's latent, k is one head made of the
  layer's input, w_i = (x W)_i / sqrt(I) may be negative. Rope turns the first
  dims of q and k, which are rope's here, unlike in the attention itself.

  Source: DeepSeek-V3.2-Exp; without its Hadamard rotation, which changes no
  product and serves FP8 alone.
  """

  def __init__(self, config: GlmMoeDsaConfig, *, mesh: Mesh, rngs: nnx.Rngs):
    self.mesh = mesh
    self.heads, self.size = config.index_n_heads, config.index_head_dim
    self.topk = config.index_topk
    hidden, latent = config.hidden_size, config.q_lora_rank
    if config.train_indexers:
      dtype = wide_dtype(config.param_dtype)
      config = config.replace(param_dtype=str(dtype))
    linear = partial(
        Linear,
        axes=("embed", None),
        kind=IndexerParam,
        config=config,
        mesh=mesh,
        rngs=rngs,
    )
    self.wq_b = linear("wq_b", latent, self.heads * self.size)
    self.wk = linear("wk", hidden, self.size)
    self.weights_proj = linear("weights_proj", hidden, self.heads)
    self.k_norm = LayerNorm(
        self.size, eps=_NORM_EPS, dtype=config.param_dtype, kind=IndexerParam
    )

  def keys(self, x_BTD: jax.Array, rotation: Rotation) -> jax.Array:
    """Returns the index keys [B,T,K] of a layer's normed input."""
    key_BTHK = self.k_norm(self.wk(x_BTD))[:, :, None]
    return rotate_interleaved(key_BTHK, rotation)[:, :, 0]

  def queries(
      self, x_BTD: jax.Array, latent_BTZ: jax.Array, rotation: Rotation
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the heads' queries [B,T,I,K], and weights [B,T,I] float32."""
    q = self.wq_b(latent_BTZ).reshape(*x_BTD.shape[:2], self.heads, self.size)
    weights = self.heads**-0.5 * wide(self.weights_proj(x_BTD))
    return rotate_interleaved(q, rotation), weights

  def __call__(
      self,
      x_BTD: jax.Array,
      latent_BTZ: jax.Array,
      key_BTK: jax.Array,
      *,
      positions_BT: jax.Array,
      rotation: Rotation,
      prefixes: Sequence[Prefix],
      index: jax.Array,
  ) -> Chosen:
    """Chooses for a segment, among itself and its prefixes.

    Args:
      x_BTD: the layer's input, normed.
      latent_BTZ: the latents of its queries, normed.
      key_BTK: its own index keys.
      positions_BT: its positions; -1 is padding.
      rotation: rope at these positions.
      prefixes: what it follows.
      index: [] int32, number of this layer among those with an indexer.
    """
    q, weights = self.queries(x_BTD, latent_BTZ, rotation)

    def on_shard(q, weights, positions, key, prefixes, index):
      q, weights, asked = map(_of_all_shards, (q, weights, positions))
      found = [
          index_topk(
              q,
              weights,
              keys,
              layer=layer,
              q_positions=asked,
              k_positions=stored,
              k=self.topk,
              scale=self.size**-0.5,
          )
          for keys, layer, stored in [
              (key[None], jnp.zeros_like(index), positions),
              *((x.slots.index_key, index, x.positions) for x in prefixes),
          ]
      ]
      counts, chosen = choose(found, k=self.topk, axis_name="context")
      return _choice([x.slots for x in found], counts), chosen

    stored = tuple(prefixes)
    chosen = jax.shard_map(
        on_shard,
        mesh=self.mesh,
        in_specs=(
            *map(spec, (_QUERIES, _WEIGHTS, ("batch", "time"), _WEIGHTS)),
            tuple(x.specs for x in stored),
            spec(()),
        ),
        out_specs=(spec(_ON_SHARD), spec(_WEIGHTS)),
    )
    with jax.named_scope("indexer"):
      found = constant(chosen)(q, weights, positions_BT, key_BTK, stored, index)
      return Chosen(*checkpoint_name(found, CHOICE))


def recall(
    selections_BTJ: jax.Array,
    *,
    positions_BT: jax.Array,
    prefixes: Sequence[Prefix],
    mesh: Mesh,
) -> Chosen:
  """Returns a recorded choice.

  Args:
    selections_BTJ: the positions chosen for each token; below 0 are none, and
      so are those that a token does not see.
    positions_BT: of the tokens; -1 is padding.
    prefixes: what they follow.
    mesh: that all this lies on.
  """

  def on_shard(selections, positions, prefixes):
    asked, wanted = map(_of_all_shards, (positions, selections))
    found = [
        look_up(wanted, q_positions=asked, k_positions=stored)
        for stored in [positions, *(x.positions for x in prefixes)]
    ]
    slots, counts = zip(*found, strict=True)
    return _choice(slots, counts)

  stored = tuple(prefixes)
  recalled = jax.shard_map(
      on_shard,
      mesh=mesh,
      in_specs=(
          spec(_WEIGHTS),
          spec(POSITION_AXES),
          tuple(x.specs for x in stored),
      ),
      out_specs=spec(_ON_SHARD),
  )
  with jax.named_scope("recall"):
    choice = constant(recalled)(selections_BTJ, positions_BT, stored)
    return Chosen(checkpoint_name(choice, CHOICE), selections_BTJ)


def choice_specs() -> Any:
  """Returns the mesh axes of a choice, of all its leaves."""
  return spec(_ON_SHARD)


def _choice(slots, counts) -> Choice:
  return Choice(
      slots=tuple(x[None] for x in slots),
      counts=tuple(x[None, ..., None] for x in counts),
  )


def _of_all_shards(x_BT):
  return jax.lax.all_gather(x_BT, "context", axis=1, tiled=True)

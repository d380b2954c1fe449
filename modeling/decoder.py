"""What all decoders have in common: a table of embeddings, and a head."""

import jax
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder_config import DecoderConfig
from modeling.embedding import look_up
from modeling.linear import Linear, wide_product
from modeling.parameter import normal, param
from modeling.sharding import gather, make_mesh

_TABLE = ("vocab", "vocab_embed")  # axes of the embedding


class Decoder(nnx.Module):
  """The two ends of a decoder; its layers, and last norm, are a subclass's.

  It knows its mesh, by default one device, and all that is computed with it is
  laid out on that mesh. Where embeddings are tied, the table is the head.
  """

  def __init__(
      self, config: DecoderConfig, *, rngs: nnx.Rngs, mesh: Mesh | None
  ):
    """Draws the table. A subclass draws its layers, and then the head."""
    self.mesh = make_mesh() if mesh is None else mesh
    self.embed_tokens = param(
        normal(
            rngs,
            (config.vocab_size, config.hidden_size),
            std=config.initializer_range,
            dtype=config.param_dtype,
        ),
        _TABLE,
    )
    self.lm_head = nnx.data(None)

  def draw_head(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
    """Makes the head, if it is not the table."""
    if config.tie_word_embeddings:
      return
    self.lm_head = Linear(
        "lm_head",
        config.hidden_size,
        config.vocab_size,
        axes=("vocab_embed", "vocab"),
        config=config,
        mesh=self.mesh,
        rngs=rngs,
    )

  def embed(self, tokens_BT: jax.Array, *, dtype: jax.typing.DTypeLike):
    """Returns the embeddings [B,T,D] of tokens."""
    return look_up(self._table(dtype), tokens_BT, mesh=self.mesh)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Returns the head's output [..., vocab] in float32 or wider."""
    with jax.named_scope("lm_head"):
      if self.lm_head is None:
        return wide_product(hidden, self._table(hidden.dtype).T)
      return self.lm_head.wide_product(hidden)

  def _table(self, dtype):
    return gather(self.embed_tokens[...].astype(dtype), self.mesh, _TABLE)

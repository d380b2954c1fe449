"""GLM-5 decoder: latent attention to what an indexer chose, and experts.

Layers come in runs: one with an indexer, then those that share its choice. Runs
of like shape are stacked and scanned, so that 78 layers trace one of each kind.

A choice is a value that goes from layer to layer, never a state. A backward
pass uses that of the forward, which is kept, and does not choose again. No
weight or state is ever written in a forward.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from modeling.decoder import Decoder
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig, Group
from modeling.indexer import CHOICE, Choice, Chosen, recall
from modeling.indexer_loss import indexer_loss
from modeling.layer_state import (
    NOTHING_RECORDED,
    LatentState,
    Prefix,
    Record,
    Recurrent,
    SegmentDelta,
    Slots,
    with_sink,
)
from modeling.mla import MLA
from modeling.mlp import MLP
from modeling.moe import SigmoidMoE
from modeling.norm import RMSNorm
from modeling.parameter import stack
from modeling.rope import Rotation, rotation
from modeling.sharding import constrain

Sinks = tuple[Slots | None, ...]


class Segment(NamedTuple):
  """What every layer is told of a segment."""

  positions: jax.Array  # [B, T] int32
  rotation: Rotation
  prefixes: tuple[Prefix, ...]
  indexer_loss: bool  # is it wanted?

  def handing(self, sinks: Sinks) -> "Segment":
    """Returns the segment with the sinks that a layer hands through."""
    return self._replace(prefixes=tuple(map(with_sink, self.prefixes, sinks)))


class LayerOutput(NamedTuple):
  """What a layer makes of a segment."""

  x: jax.Array  # [B, T, D]
  sinks: Sinks
  latent: jax.Array  # [B, T, Z + K]
  experts: jax.Array | None  # [B, T, A] int32, if the layer has any


class DecoderLayer(nnx.Module):
  """x += attention(norm(x)); x += feed_forward(norm(x))."""

  def __init__(
      self,
      config: GlmMoeDsaConfig,
      *,
      indexed: bool,
      feed_forward: str,
      mesh: Mesh,
      rngs: nnx.Rngs,
  ):
    self.mesh = mesh
    norm = partial(
        RMSNorm,
        config.hidden_size,
        eps=config.rms_norm_eps,
        dtype=config.param_dtype,
    )
    self.input_layernorm = norm()
    self.post_attention_layernorm = norm()
    self.self_attn = MLA(config, indexed=indexed, mesh=mesh, rngs=rngs)
    if feed_forward == "dense":
      self.mlp = MLP(
          config.intermediate_size, config=config, mesh=mesh, rngs=rngs
      )
    else:
      self.mlp = SigmoidMoE(config, mesh=mesh, rngs=rngs)

  def mix(
      self,
      x_BTD: jax.Array,
      normed_BTD: jax.Array,
      query_latent_BTZ: jax.Array,
      *,
      segment: Segment,
      number: jax.Array,
      choice: Choice,
      experts: jax.Array | None,
  ) -> LayerOutput:
    """Runs the layer from where it is known what each token attends to."""
    with jax.named_scope("mla"):
      mixed, latent, latent_sinks = self.self_attn(
          normed_BTD,
          query_latent_BTZ,
          rotation=segment.rotation,
          prefixes=segment.prefixes,
          layer=number,
          choice=choice,
      )
    x_BTD += mixed
    normed_BTD = self.post_attention_layernorm(x_BTD)
    with jax.named_scope("mlp"):
      if isinstance(self.mlp, MLP):
        fed, chosen = self.mlp(normed_BTD), None
      else:
        fed, chosen = self.mlp(normed_BTD, experts)
    x_BTD = constrain(x_BTD + fed, self.mesh, ("batch", "time", None))
    sinks = _handed(segment.prefixes, latent=latent_sinks)
    return LayerOutput(x_BTD, sinks, latent, chosen)


class SharedLayer(DecoderLayer):
  """A layer that attends to what another one chose."""

  @jax.named_scope("shared_layer")
  def __call__(
      self,
      x_BTD: jax.Array,
      *,
      segment: Segment,
      number: jax.Array,
      choice: Choice,
      experts: jax.Array | None,
  ) -> LayerOutput:
    """Runs the layer."""
    normed = self.input_layernorm(x_BTD)
    return self.mix(
        x_BTD,
        normed,
        self.self_attn.query_latent(normed),
        segment=segment,
        number=number,
        choice=choice,
        experts=experts,
    )


class FullLayer(DecoderLayer):
  """A layer that chooses what it attends to."""

  @jax.named_scope("full_layer")
  def __call__(
      self,
      x_BTD: jax.Array,
      *,
      segment: Segment,
      number: jax.Array,
      index: jax.Array,
      selection: jax.Array | None,
      experts: jax.Array | None,
  ) -> tuple[LayerOutput, jax.Array, Chosen, jax.Array | None]:
    """Returns also index keys [B,T,K], choice, and indexer's loss [B,T].

    Args:
      x_BTD: the segment.
      segment: what it is and follows.
      number: [] int32, of the layer.
      index: [] int32, of the layer among those with an indexer.
      selection: positions to attend to, [B,T,J]; None chooses.
      experts: to send tokens to, [B,T,A]; None chooses.
    """
    normed = self.input_layernorm(x_BTD)
    query_latent = self.self_attn.query_latent(normed)
    indexer = self.self_attn.indexer
    assert indexer is not None, "made with one"
    key = indexer.keys(jax.lax.stop_gradient(normed), segment.rotation)
    if selection is None:
      chosen = indexer(
          normed,
          query_latent,
          key,
          positions_BT=segment.positions,
          rotation=segment.rotation,
          prefixes=segment.prefixes,
          index=index,
      )
    else:
      chosen = recall(
          selection,
          positions_BT=segment.positions,
          prefixes=segment.prefixes,
          mesh=self.mesh,
      )
    output = self.mix(
        x_BTD,
        normed,
        query_latent,
        segment=segment,
        number=number,
        choice=chosen.choice,
        experts=experts,
    )
    if not segment.indexer_loss:
      return output, key, chosen, None
    loss, key_sinks = indexer_loss(
        self.self_attn,
        normed,
        query_latent,
        key,
        rotation=segment.rotation,
        prefixes=segment.prefixes,
        layer=number,
        index=index,
        choice=chosen.choice,
    )
    sinks = _handed(segment.handing(output.sinks).prefixes, index_key=key_sinks)
    return output._replace(sinks=sinks), key, chosen, loss


class Run(nnx.Module):
  """A layer with an indexer and those that share its choice, stacked."""

  def __init__(
      self, config: GlmMoeDsaConfig, group: Group, *, mesh: Mesh, rngs: nnx.Rngs
  ):
    make = partial(SharedLayer, config, indexed=False, mesh=mesh)

    def sharers(kind, count):
      layer = lambda rngs: make(feed_forward=kind, rngs=rngs)
      return stack(layer, count, rngs=rngs)

    self.full_layer = FullLayer(
        config, indexed=True, feed_forward=group.full, mesh=mesh, rngs=rngs
    )
    self.sharers = nnx.List(sharers(*like) for like in group.sharers)


class RunOutput(NamedTuple):
  """What the layers of a run leave of a segment; stacked over runs, of all."""

  latent: jax.Array  # [L, B, T, Z + K]
  index_key: jax.Array  # [B, T, K]
  selection: jax.Array  # [B, T, J] int32
  indexer_loss: jax.Array | None  # [B, T], if it is wanted
  experts: jax.Array | None  # [l, B, T, A] int32, of its layers with experts


class GlmMoeDsa(Decoder):
  """The whole decoder, without multi-token prediction."""

  def __init__(
      self,
      config: GlmMoeDsaConfig,
      *,
      rngs: nnx.Rngs,
      mesh: Mesh | None = None,
  ):
    super().__init__(config, rngs=rngs, mesh=mesh)
    self.config = config

    def runs(group):
      run = lambda rngs: Run(config, group, mesh=self.mesh, rngs=rngs)
      return stack(run, group.runs, rngs=rngs)

    self.runs = nnx.List(map(runs, config.groups))
    self.norm = RMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, dtype=config.param_dtype
    )
    self.draw_head(config, rngs=rngs)

  def __call__(
      self,
      tokens_BT: jax.Array,
      *,
      positions_BT: jax.Array,
      prefixes: tuple[Prefix, ...],
      recurrent: Recurrent,
      record: Record = NOTHING_RECORDED,
      indexer_loss: bool = False,
  ) -> tuple[jax.Array, SegmentDelta]:
    """Runs a segment that follows a state.

    Activations are rematerialised layer by layer in a backward pass.

    Args:
      tokens_BT: token ids, int32; padding on either side, any id.
      positions_BT: int32 position of each token, -1 = padding.
      prefixes: stored latents and index keys that the segment may attend to. A
        prefix of M rows serves B / M rows of the segment each.
      recurrent: None: there is no such state.
      record: what to choose, of an earlier forward or of another engine; by
        default the model chooses.
      indexer_loss: also compute what trains the indexers.

    Returns:
      The hidden states [B,T,D] after the last norm, and what the segment adds,
      with what was chosen.
    """
    assert recurrent is None, "the architecture has no recurrent state"
    x_BTD = self.embed(tokens_BT, dtype=self.config.activation_dtype)
    by = rotation(
        positions_BT,
        config=self.config.rope,
        head_dim=self.config.qk_rope_head_dim,
        dtype=x_BTD.dtype,
    )
    segment = Segment(positions_BT, by, prefixes, indexer_loss)
    sinks = tuple(prefix.sink for prefix in prefixes)
    outputs, index, sparse = [], 0, 0
    for group, runs in zip(self.config.groups, self.runs, strict=True):
      wanted = _of_group(record, group, index, sparse)
      x_BTD, sinks, output = _run_group(
          runs, group, x_BTD, sinks, segment, wanted, index
      )
      outputs.append(output)
      index += group.runs
      sparse += group.runs * group.sparse_per_run
    join = lambda parts: jnp.concatenate(list(parts))
    experts = [x.experts for x in outputs if x.experts is not None]
    losses = [x.indexer_loss for x in outputs if x.indexer_loss is not None]
    delta = SegmentDelta(
        slots=LatentState(
            latent=join(x.latent for x in outputs),
            index_key=join(x.index_key for x in outputs),
        ),
        recurrent=None,
        sinks=sinks,
        record=Record(
            selections=join(x.selection for x in outputs),
            experts=join(experts) if experts else None,
        ),
        indexer_loss=join(losses).sum(0) if losses else None,
    )
    return self.norm(x_BTD), delta


def _run_group(
    runs: Run,
    group: Group,
    x_BTD: jax.Array,
    sinks: Sinks,
    segment: Segment,
    wanted: Record,
    first_index: int,
) -> tuple[jax.Array, Sinks, RunOutput]:
  """Scans the runs of a group; leaves of its output are of all its layers."""
  keep = jax.checkpoint_policies.save_only_these_names(CHOICE)

  @partial(jax.checkpoint, prevent_cse=False, policy=keep)
  def full_step(x_BTD, sinks, layer, number, index, wanted):
    experts = None if wanted.experts is None else wanted.experts[0]
    return layer(
        x_BTD,
        segment=segment.handing(sinks),
        number=number,
        index=index,
        selection=wanted.selections,
        experts=experts if group.full == "sparse" else None,
    )

  @partial(jax.checkpoint, prevent_cse=False)
  def shared_step(x_BTD, sinks, layer, number, choice, experts):
    return layer(
        x_BTD,
        segment=segment.handing(sinks),
        number=number,
        choice=choice,
        experts=experts,
    )

  def run_step(carry, inputs):
    (x_BTD, sinks), (run, number, index, wanted) = carry, inputs
    output, index_key, chosen, loss = full_step(
        x_BTD, sinks, run.full_layer, number, index, wanted
    )
    carry = output.x, output.sinks
    latents, experts = [output.latent[None]], []
    if output.experts is not None:
      experts.append(output.experts[None])

    def sharer_step(carry, inputs):
      layer, number, experts = inputs
      output = shared_step(*carry, layer, number, chosen.choice, experts)
      return (output.x, output.sinks), (output.latent, output.experts)

    taken = len(experts)
    for (kind, count), offset, layers in zip(
        group.sharers, group.sharer_offsets, run.sharers, strict=True
    ):
      sent = None
      if kind == "sparse":
        sent = _cut(wanted.experts, taken, taken + count)
        taken += count
      numbers = number + offset + jnp.arange(count, dtype=jnp.int32)
      carry, (latent, chosen_experts) = jax.lax.scan(
          sharer_step, carry, (layers, numbers, sent)
      )
      latents.append(latent)
      if chosen_experts is not None:
        experts.append(chosen_experts)
    return carry, RunOutput(
        latent=jnp.concatenate(latents),
        index_key=index_key,
        selection=chosen.positions,
        indexer_loss=loss,
        experts=jnp.concatenate(experts) if experts else None,
    )

  count = jnp.arange(group.runs, dtype=jnp.int32)
  numbers = group.first_layer + group.layers_per_run * count
  carry, output = jax.lax.scan(
      run_step, (x_BTD, sinks), (runs, numbers, first_index + count, wanted)
  )
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  return *carry, output._replace(
      latent=flat(output.latent),
      experts=None if output.experts is None else flat(output.experts),
  )


def _handed(
    prefixes: tuple[Prefix, ...], **sinks: tuple[jax.Array | None, ...]
) -> Sinks:
  """Returns the sinks of prefixes with a leaf as a layer hands it on."""
  ((name, leaves),) = sinks.items()
  return tuple(
      prefix.sink and dataclasses.replace(prefix.sink, **{name: leaf})
      for prefix, leaf in zip(prefixes, leaves, strict=True)
  )


def _of_group(record: Record, group: Group, index: int, sparse: int) -> Record:
  """Returns the part of a record for the runs of a group, by run."""
  experts = _cut(
      record.experts, sparse, sparse + group.runs * group.sparse_per_run
  )
  if experts is not None:
    experts = experts.reshape(group.runs, -1, *experts.shape[1:])
  return Record(_cut(record.selections, index, index + group.runs), experts)


def _cut(x, start, stop):
  return None if x is None else x[start:stop]

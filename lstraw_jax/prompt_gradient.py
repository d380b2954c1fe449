"""The exact gradient: one reverse sweep over the chunks of the prompts.

    dL/dw  =  sum_i dl_i/dw at a constant state z   +   (sum_i dl_i/dz) dz/dw

Replay gives the first term, and the cotangent dl/dz summed over all branches.
The sweep adds the second, once for a group, whatever its size:

1. Take the chunks from the last to the first. The state that enters a chunk is
   on the tape, or computed again from the last one that is.
2. Rebuild the graph of the chunk, layer by layer, and pull back the cotangents
   of the keys and values that it wrote, which are complete by then, since only
   later tokens see them, and that of the recurrent state it handed on.
3. That gives parameter gradients; what falls on earlier keys and values is
   added to their cotangents in place; the recurrent one goes to the chunk
   before.

A loss on the prompt's own tokens enters in step 2. With nothing else this is
exact supervised training on long sequences.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lstraw_jax.capture import (
    Progress,
    PromptTape,
    frame_positions,
    in_memory,
)
from lstraw_jax.log_probs import token_log_probs
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.segment_gradient import pull_back_segment
from lstraw_jax.state_cotangent import StateCotangent
from lstraw_jax.stripes import read_frame
from modeling.layer_state import Prefix, Recurrent
from modeling.parameter import IndexerParam
from modeling.sharding import replicate, to_mesh
from pallas_kernels.shapes import wide_dtype


class PromptLoss(NamedTuple):
  """A loss on the prompts' own tokens: - sum_t weight_t log_prob_t.

  That of indexers, for a policy that trains them: the sum over layers of what
  `modeling/indexer_loss.py` gives, with the weight of the token that is next.
  """

  weights: Sequence[np.ndarray]  # of each prompt, [P]; x_1 has none: 0
  head_chunk_tokens: int


class Labels(NamedTuple):
  """What a chunk's own loss needs."""

  targets: Any  # [B, C] int32
  weights: Any  # [B, C] float32 or wider


def add_prompt_gradient(
    policy: Policy,
    prompt: PromptState,
    tape: PromptTape,
    gradients: nnx.State,
    cotangent: StateCotangent,
    *,
    policy_step: int,
    loss: PromptLoss | None = None,
    progress: Progress | None = None,
) -> tuple[nnx.State, jax.Array]:
  """Adds the gradient that reaches the weights through the prompt state.

  Args:
    policy: the weights that captured the state.
    prompt: the state; never written.
    tape: of the same capture.
    gradients: sums so far, consumed.
    cotangent: of the loss of all branches by the state, consumed; zeros if
      there are none.
    policy_step: optimizer steps that the weights have seen.
    loss: on the prompts' own tokens.
    progress: called after each chunk.

  Returns:
    The gradients, and the unnormalised loss [] on the prompts' own tokens.

  Raises:
    ValueError: if other weights captured the state, or the tape or `loss` is
      not one of these prompts.
  """
  _check(prompt, tape, policy_step)
  size, every = prompt.chunk_tokens, tape.boundary_every
  frames = tape.tokens.shape[1] // size
  dtype = wide_dtype(policy.config.dtype)
  labels = None if loss is None else _labels(prompt, tape, loss, dtype)
  total = to_mesh(np.zeros((), dtype), policy.mesh)

  def of_frame(arrays, frame):
    cut = [x[:, frame * size : (frame + 1) * size] for x in arrays]
    return to_mesh(cut, policy.mesh)

  for first in reversed(range(0, frames, every)):
    chunks = [
        (*of_frame([tape.tokens], frame), to_mesh(np.int32(frame), policy.mesh))
        for frame in range(first, min(first + every, frames))
    ]
    entering = [in_memory(tape.boundaries[first // every], "device")]
    for chunk in chunks[:-1]:
      entering.append(advance_chunk(policy, prompt, entering[-1], *chunk))
    while chunks:
      frame = first + len(chunks) - 1
      gradients, cotangent, total = pull_back_chunk(
          policy,
          prompt,
          entering.pop(),
          *chunks.pop(),
          None if labels is None else Labels(*of_frame(labels, frame)),
          gradients,
          cotangent,
          total,
          head_chunk_tokens=0 if loss is None else loss.head_chunk_tokens,
      )
      if progress is not None:
        total.block_until_ready()
        progress("prompt gradient", frames - frame, frames)
  return gradients, total


@jax.jit
def advance_chunk(
    policy: Policy,
    prompt: PromptState,
    recurrent: Recurrent,
    tokens: jax.Array,
    frame: jax.Array,
) -> Recurrent:
  """Returns the recurrent state behind a chunk [B,C] that was captured."""
  _, delta = jax.lax.stop_gradient(policy).model(
      tokens,
      positions_BT=_positions(prompt, frame),
      prefixes=(_before(prompt, frame),),
      recurrent=recurrent,
  )
  return delta.recurrent


@partial(
    jax.jit,
    static_argnames="head_chunk_tokens",
    donate_argnames=("gradients", "cotangent", "total"),
)
def pull_back_chunk(
    policy: Policy,
    prompt: PromptState,
    recurrent: Recurrent,
    tokens: jax.Array,
    frame: jax.Array,
    labels: Labels | None,
    gradients: nnx.State,
    cotangent: StateCotangent,
    total: jax.Array,
    *,
    head_chunk_tokens: int,
) -> tuple[nnx.State, StateCotangent, jax.Array]:
  """Pulls the cotangent of the state behind a chunk back to that before it."""
  mesh = policy.mesh
  of_indexers = policy.config.trained is IndexerParam

  def segment(model, prefixes, recurrent):
    run = partial(model, indexer_loss=True) if of_indexers else model
    hidden, delta = run(
        tokens,
        positions_BT=_positions(prompt, frame),
        prefixes=prefixes,
        recurrent=recurrent,
    )
    if labels is None:
      return jnp.zeros_like(total), delta, None
    if of_indexers:
      return (labels.weights * delta.indexer_loss).sum(), delta, None
    scores = token_log_probs(
        model,
        hidden,
        labels.targets,
        labels.weights != 0,
        temperature=1.0,
        chunk_tokens=head_chunk_tokens,
    )
    return -(labels.weights * scores.log_probs).sum(), delta, None

  with jax.named_scope("prompt_gradient"):
    pulled = pull_back_segment(
        policy,
        segment,
        gradients,
        prefixes=(_before(prompt, frame),),
        sums=(cotangent.slots,),
        recurrent=recurrent,
        d_slots=read_frame(
            cotangent.slots,
            frame=frame,
            frame_tokens=prompt.chunk_tokens,
            mesh=mesh,
        ),
        d_recurrent=cotangent.recurrent,
    )
  (slots,) = pulled.sums
  d_recurrent = jax.tree.map(
      lambda x, y: x.astype(y.dtype), pulled.d_recurrent, cotangent.recurrent
  )
  earlier = StateCotangent(slots=slots, recurrent=d_recurrent)
  return pulled.gradients, earlier, replicate(total + pulled.loss, mesh)


def _positions(prompt, frame):
  starts = jnp.zeros_like(prompt.length)
  return frame_positions(prompt, frame, starts=starts, ends=prompt.length)


def _before(prompt, frame) -> Prefix:
  """Returns the slots that were filled before a frame."""
  seen = prompt.positions < frame * prompt.chunk_tokens
  return dataclasses.replace(
      prompt.prefix, positions=jnp.where(seen, prompt.positions, -1)
  )


def _labels(prompt, tape, loss: PromptLoss, dtype) -> Labels:
  """Returns what each evaluated token predicts, and its weight, [B, n C]."""
  lengths, held_back = np.asarray(prompt.length), np.asarray(prompt.next_token)
  if len(loss.weights) != len(lengths):
    raise ValueError(
        f"loss.weights: got {len(loss.weights)} rows, want {len(lengths)}, one"
        " for each prompt"
    )
  targets = np.zeros_like(tape.tokens)
  weights = np.zeros(tape.tokens.shape, np.float64)
  for b, (row, length) in enumerate(zip(loss.weights, lengths, strict=True)):
    row = np.asarray(row)
    if row.shape != (length + 1,) or not np.isfinite(row).all() or row[0]:
      raise ValueError(
          f"loss.weights[{b}]: want {length + 1} finite numbers, one for each"
          f" token, the first of them 0, since nothing predicts it; got shape"
          f" {row.shape}, first {row.flat[:1]}"
      )
    following = np.append(tape.tokens[b, 1:length], held_back[b])
    targets[b, :length] = following[:length]
    weights[b, :length] = row[1:]
  return Labels(targets, weights.astype(dtype))


def _check(prompt, tape, policy_step):
  captured = int(prompt.policy_step)
  if captured != policy_step:
    raise ValueError(
        f"prompt_gradient='exact': the prompt state was captured at step"
        f" {captured} but the weights are those of step {policy_step}; the"
        " gradient through a stale state is that of no loss. Capture again, or"
        " drop the gradient through the prompt"
    )
  batch, tokens = tape.tokens.shape
  lengths = np.asarray(prompt.length)
  frames = -(-lengths.max() // prompt.chunk_tokens)
  boundaries = -(-frames // tape.boundary_every)
  got = (batch, tokens, len(tape.boundaries))
  want = (len(lengths), frames * prompt.chunk_tokens, boundaries)
  if got != want:
    raise ValueError(
        f"tape: got (rows, tokens, boundaries) = {got}, want {want}; is it that"
        " of another capture, or was the state extended since?"
    )

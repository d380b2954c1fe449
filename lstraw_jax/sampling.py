"""Sampling: all responses to each of some captured prompts, token by token.

Every step runs one token of each response as a row of one batch. The rows of a
group share their prompt's slots and have slots of their own; a row that has
stopped is fed padding, which leaves its state as it is.

Over a mesh the token stands in a frame of as many tokens as `context` has
shards, all others padding: its keys fall to each shard in turn.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import (
    BranchState,
    PromptState,
    append_to_branch,
    fork,
    next_positions,
)
from lstraw_jax.rollouts import Rollout
from modeling.layer_state import Record, SegmentDelta
from modeling.sharding import replicate
from pallas_kernels.shapes import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How responses are drawn.

  `temperature` divides the logits; 0 takes the likeliest token. `top_p` draws
  from the smallest set of tokens whose probability reaches it. A response ends
  with the first token of `stop_tokens`, which belongs to it, or after
  `max_tokens`. `record` names what else is kept of each token, so that replay
  chooses as the sampler did: "experts", "selections".
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  stop_tokens: tuple[int, ...] = ()
  record: tuple[str, ...] = ()

  def __post_init__(self):
    if set(self.record) - set(Record._fields):
      raise ValueError(
          f"record={self.record}: want some of {', '.join(Record._fields)}"
      )
    if self.max_tokens < 1:
      raise ValueError(f"max_tokens={self.max_tokens}: want at least 1")
    if not 0 <= self.temperature < float("inf"):
      raise ValueError(
          f"temperature={self.temperature}: want a finite number >= 0"
      )
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p}: want a number in (0, 1]")

  def check_trainable(self) -> None:
    """Refuses what would make the sampler's distribution not the scored one."""
    if self.temperature == 0 or self.top_p < 1:
      raise ValueError(
          f"temperature={self.temperature}, top_p={self.top_p}: responses for"
          " training must be drawn from the distribution that is scored; want"
          " temperature > 0 and top_p=1 (a truncated distribution is"
          " renormalised, which would bias every ratio)"
      )


class Samples(NamedTuple):
  """Sampled responses, padded with zeros."""

  tokens: jax.Array  # [B, G, R] int32
  log_probs: jax.Array  # [B, G, R] at the temperature, before top_p
  lengths: jax.Array  # [B, G] int32
  stopped: jax.Array  # [B, G] bool: ended by a stop token
  record: Record  # [B, G, R, l, ...] int32 of what was to be kept


class _Loop(NamedTuple):
  """What one step hands to the next; rows are those of all prompts, B G."""

  branch: BranchState
  tokens: jax.Array  # [B G] int32: what is fed next
  active: jax.Array  # [B G] bool
  samples: Samples  # leaves [B G, ...]


@partial(jax.jit, static_argnames=("group_size", "config"))
def sample(
    policy: Policy,
    prompt: PromptState,
    keys: jax.Array,
    *,
    group_size: int,
    config: SamplingConfig,
) -> Samples:
  """Draws `group_size` responses to each captured prompt.

  Response i depends on its prompt's key and on i alone, not on the group's
  size or the other prompts.

  Args:
    policy: the weights.
    prompt: the captured prompts; never written.
    keys: random keys [B], one a prompt.
    group_size: number of responses G.
    config: settings.
  """
  model = policy.model
  prompts, rows = keys.shape[0], keys.shape[0] * group_size
  frame_tokens = policy.mesh.shape["context"]
  of_group = jax.vmap(jax.random.fold_in, (None, 0))
  keys = jax.vmap(of_group, (0, None))(keys, jnp.arange(group_size))
  keys = keys.reshape(rows)
  stops = jnp.asarray(config.stop_tokens, jnp.int32)

  def forward(branch, tokens, active):
    """Returns a token's hidden state, what was chosen for it, and the rest."""
    place = branch.used % frame_tokens
    here = (jnp.arange(frame_tokens, dtype=jnp.int32) == place)[None]
    positions = next_positions(prompt, branch, valid_BT=here & active[:, None])
    hidden, delta = model(
        jnp.where(here, tokens[:, None], 0),
        positions_BT=positions,
        prefixes=(prompt.prefix, branch.prefix),
        recurrent=branch.recurrent,
    )
    hidden = jax.lax.dynamic_index_in_dim(hidden, place, 1, keepdims=False)
    return hidden, _chosen(delta, place, config), (delta, positions)

  def step(loop: _Loop) -> _Loop:
    index = loop.branch.used
    hidden, chosen, (delta, positions) = forward(
        loop.branch, loop.tokens, loop.active
    )
    tokens, log_probs = _draw(
        model.logits(hidden),
        jax.vmap(jax.random.fold_in, (0, None))(keys, index),
        config,
    )
    stopped = loop.active & (tokens[:, None] == stops[None]).any(1)

    def put(into, x):
      active = jnp.expand_dims(loop.active, range(1, x.ndim))
      return into.at[:, index].set(jnp.where(active, x, jnp.zeros_like(x)))

    samples = Samples(
        tokens=put(loop.samples.tokens, tokens),
        log_probs=put(loop.samples.log_probs, log_probs),
        lengths=loop.samples.lengths + loop.active.astype(jnp.int32),
        stopped=loop.samples.stopped | stopped,
        record=jax.tree.map(put, loop.samples.record, chosen),
    )
    branch = append_to_branch(
        loop.branch, delta, positions_BT=positions, steps=1
    )
    return _Loop(branch, tokens, loop.active & ~stopped, samples)

  frames = -(-config.max_tokens // frame_tokens)
  first = (
      fork(prompt, branches=group_size, slots=frames * frame_tokens),
      jnp.repeat(prompt.next_token, group_size),
      jnp.ones((rows,), bool),
  )
  _, chosen, _ = jax.eval_shape(forward, *first)
  start = _Loop(*first, _no_samples(rows, config.max_tokens, chosen, policy))
  goes_on = lambda loop: loop.active.any() & (
      loop.branch.used < config.max_tokens
  )
  with jax.named_scope("sample"):
    samples = jax.lax.while_loop(goes_on, step, start).samples
  samples = jax.tree.map(
      lambda x: x.reshape(prompts, group_size, *x.shape[1:]), samples
  )
  return replicate(samples, policy.mesh)


def to_rollouts(
    samples: Samples, rewards: Sequence[float]
) -> tuple[Rollout, ...]:
  """Pairs the samples of one prompt, leaves [G, ...], with their rewards."""
  host: Any = jax.device_get(samples)
  rollouts = []
  for index, (length, reward) in enumerate(
      zip(host.lengths, rewards, strict=True)
  ):
    row = jax.tree.map(lambda x, i=index, n=length: x[i, :n], host.record)
    rollouts.append(
        Rollout(
            tokens=host.tokens[index, :length],
            reward=float(reward),
            log_probs=host.log_probs[index, :length],
            loss_mask=np.ones((length,), bool),
            record=row,
        )
    )
  return tuple(rollouts)


def _chosen(delta: SegmentDelta, place, config: SamplingConfig) -> Record:
  """Returns what is to be kept of the choices for a token, [B G, l, ...]."""
  if config.record and not jax.tree.leaves(delta.record):
    raise ValueError(
        f"record={config.record}: want (), since this model chooses nothing"
        " that could be recorded"
    )

  def of_token(x):
    x = jax.lax.dynamic_index_in_dim(x, place, 2, keepdims=False)
    return jnp.moveaxis(x, 0, 1)

  made = {name: getattr(delta.record, name) for name in config.record}
  return Record(**jax.tree.map(of_token, made))


def _no_samples(rows, max_tokens, chosen: Record, policy) -> Samples:
  dtype = wide_dtype(policy.config.dtype)
  return Samples(
      tokens=jnp.zeros((rows, max_tokens), jnp.int32),
      log_probs=jnp.zeros((rows, max_tokens), dtype),
      lengths=jnp.zeros((rows,), jnp.int32),
      stopped=jnp.zeros((rows,), bool),
      record=jax.tree.map(
          lambda x: jnp.zeros((rows, max_tokens, *x.shape[1:]), x.dtype),
          chosen,
      ),
  )


def _draw(logits_GV, keys, config: SamplingConfig):
  """Returns a token of each row and its log-prob before truncation."""
  if config.temperature == 0:
    tokens = jnp.argmax(logits_GV, axis=-1).astype(jnp.int32)
  else:
    logits_GV = logits_GV / config.temperature
    kept = _truncate(logits_GV, config.top_p) if config.top_p < 1 else logits_GV
    tokens = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
  log_probs = jax.nn.log_softmax(logits_GV, axis=-1)
  picked = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens, picked


def _truncate(logits_GV, top_p):
  """Sets to -inf every token outside the smallest set that reaches top_p."""
  order = jnp.argsort(-logits_GV, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits_GV, order, axis=-1)
  shares = jax.nn.softmax(ranked, axis=-1)
  # The mass before a token decides, so that the likeliest always stays.
  outside = jnp.cumsum(shares, axis=-1) - shares >= top_p
  ranked = jnp.where(outside, -jnp.inf, ranked)
  return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)

"""Sampling: all responses of a group from one captured prompt, token by token.

Every step runs one token of each response as a row of one batch. The rows share
the prompt's slots and have slots of their own; a row that has stopped is fed
padding, which leaves its state as it is.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

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
from pallas_kernels.shapes import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How responses are drawn.

  `temperature` divides the logits; 0 takes the likeliest token. `top_p` draws
  from the smallest set of tokens whose probability reaches it. A response ends
  with the first token of `stop_tokens`, which belongs to it, or after
  `max_tokens`.
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  stop_tokens: tuple[int, ...] = ()

  def __post_init__(self):
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

  tokens: jax.Array  # [G, R] int32
  log_probs: jax.Array  # [G, R] at the temperature, before top_p
  lengths: jax.Array  # [G] int32
  stopped: jax.Array  # [G] bool: ended by a stop token


class _Loop(NamedTuple):
  """What one step hands to the next."""

  branch: BranchState
  tokens: jax.Array  # [G] int32: what is fed next
  active: jax.Array  # [G] bool
  samples: Samples


@partial(jax.jit, static_argnames=("group_size", "config"))
def sample(
    policy: Policy,
    prompt: PromptState,
    key: jax.Array,
    *,
    group_size: int,
    config: SamplingConfig,
) -> Samples:
  """Draws `group_size` responses to a captured prompt.

  Response i depends on the key and on i alone, not on the group's size.

  Args:
    policy: the weights.
    prompt: the captured prompt, of one row; never written.
    key: random key.
    group_size: number of responses G.
    config: settings.
  """
  model = policy.model
  keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(group_size))
  stops = jnp.asarray(config.stop_tokens, jnp.int32)

  def step(loop: _Loop) -> _Loop:
    active = loop.active[:, None]
    positions = next_positions(prompt, loop.branch, valid_BT=active)
    hidden, delta = model(
        loop.tokens[:, None],
        positions_BT=positions,
        prefixes=(prompt.prefix, loop.branch.prefix),
        recurrent=loop.branch.recurrent,
    )
    index = loop.branch.used
    tokens, log_probs = _draw(
        model.logits(hidden[:, 0]),
        jax.vmap(jax.random.fold_in, (0, None))(keys, index),
        config,
    )
    stopped = loop.active & (tokens[:, None] == stops[None]).any(1)
    put = lambda into, x: into.at[:, index].set(
        jnp.where(loop.active, x, jnp.zeros_like(x))
    )
    samples = Samples(
        tokens=put(loop.samples.tokens, tokens),
        log_probs=put(loop.samples.log_probs, log_probs),
        lengths=loop.samples.lengths + loop.active.astype(jnp.int32),
        stopped=loop.samples.stopped | stopped,
    )
    branch = append_to_branch(loop.branch, delta, positions_BT=positions)
    return _Loop(branch, tokens, loop.active & ~stopped, samples)

  start = _Loop(
      branch=fork(prompt, branches=group_size, slots=config.max_tokens),
      tokens=jnp.repeat(prompt.next_token, group_size),
      active=jnp.ones((group_size,), bool),
      samples=_no_samples(group_size, config.max_tokens, policy),
  )
  goes_on = lambda loop: loop.active.any() & (
      loop.branch.used < config.max_tokens
  )
  with jax.named_scope("sample"):
    return jax.lax.while_loop(goes_on, step, start).samples


def to_rollouts(
    samples: Samples, rewards: Sequence[float]
) -> tuple[Rollout, ...]:
  """Moves samples to the host and pairs each with its reward."""
  tokens, log_probs, lengths, _ = jax.device_get(samples)
  return tuple(
      Rollout(
          tokens=row[:length],
          reward=float(reward),
          log_probs=scores[:length],
          loss_mask=np.ones((length,), bool),
      )
      for row, scores, length, reward in zip(
          tokens, log_probs, lengths, rewards, strict=True
      )
  )


def _no_samples(group_size, max_tokens, policy) -> Samples:
  dtype = wide_dtype(policy.config.dtype)
  return Samples(
      tokens=jnp.zeros((group_size, max_tokens), jnp.int32),
      log_probs=jnp.zeros((group_size, max_tokens), dtype),
      lengths=jnp.zeros((group_size,), jnp.int32),
      stopped=jnp.zeros((group_size,), bool),
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

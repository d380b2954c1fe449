"""The GRPO objective: clipped surrogate, KL penalty and token weights.

One update minimises

    L = sum_{i,t} w_{i,t} l_{i,t} / denominator,
    l = -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + kl_coef kl

with the numerator summed over all groups of the step, branch by branch, and
divided once at the end. No intermediate mean exists, so that the loss does not
depend on how the responses were split into branches, groups or devices.
"""

import dataclasses
import typing
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import shapes

Aggregation = Literal["response_mean", "token_mean"]
KlEstimator = Literal["k1", "k3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
  """Settings of the objective.

  The defaults are DAPO's asymmetric clip, no KL term, and the paper's mean
  over each response followed by the mean over responses.

  Attributes:
    clip_eps_low: the ratio is clipped below at 1 - clip_eps_low; in [0, 1],
      where 1 never clips.
    clip_eps_high: the ratio is clipped above at 1 + clip_eps_high; at least
      0, where infinity never clips.
    kl_coef: factor on the KL penalty; finite, at least 0.
    kl_estimator: "k1" or "k3", see `kl_penalty`.
    aggregation: "response_mean" or "token_mean", see `token_weights`.
  """

  clip_eps_low: float = 0.2
  clip_eps_high: float = 0.28
  kl_coef: float = 0.0
  kl_estimator: KlEstimator = "k3"
  aggregation: Aggregation = "response_mean"

  def __post_init__(self):
    if not 0 <= self.clip_eps_low <= 1:
      raise _out_of_range("clip_eps_low", self.clip_eps_low, "in [0, 1]")
    if not self.clip_eps_high >= 0:
      raise _out_of_range("clip_eps_high", self.clip_eps_high, ">= 0")
    if not 0 <= self.kl_coef < float("inf"):
      raise _out_of_range("kl_coef", self.kl_coef, "finite and >= 0")
    _check_name("kl_estimator", self.kl_estimator, KlEstimator)
    _check_name("aggregation", self.aggregation, Aggregation)


class Surrogate(NamedTuple):
  """The clipped surrogate of each token; only `loss` carries a gradient."""

  loss: jax.Array  # [..., R] float32 or wider
  ratio: jax.Array  # [..., R] same dtype
  clipped: jax.Array  # [..., R] bool: the clip takes the gradient away


class TokenLosses(NamedTuple):
  """The objective of each token; outside the loss mask 0, 1, False and 0."""

  loss: jax.Array  # [..., R] float32 or wider
  ratio: jax.Array  # [..., R] same dtype
  clipped: jax.Array  # [..., R] bool
  kl: jax.Array  # [..., R] same dtype as loss; zeros without a reference


@shapes.typed
def grpo_token_losses(
    log_probs: Float[Array, "*B R"],
    old_log_probs: Float[Array, "*B R"],
    ref_log_probs: Float[Array, "*B R"] | None,
    *,
    advantages: Float[Array, "*B"],
    loss_mask: Bool[Array, "*B R"],
    config: ObjectiveConfig,
) -> TokenLosses:
  """Returns the surrogate plus `kl_coef` times the KL penalty, per token.

  Whatever stands outside `loss_mask`, NaN included, reaches neither the
  values nor the gradient with respect to `log_probs`.

  Args:
    log_probs: the policy's, in nats; the only input with a gradient.
    old_log_probs: those of the policy that sampled the responses.
    ref_log_probs: the reference policy's; None if none was scored.
    advantages: one number per response.
    loss_mask: True on the tokens that are trained on.
    config: settings of the objective.

  Raises:
    ValueError: if `config.kl_coef` is positive and there is no reference.
  """
  if ref_log_probs is None and config.kl_coef > 0:
    raise ValueError(
        f"kl_coef={config.kl_coef}: got ref_log_probs=None, wanted the"
        " reference's log-probs. Fix: score a reference, or set kl_coef=0"
    )

  # Inputs are masked and not only the result: a zero cotangent times an
  # infinite derivative would still be NaN.
  def keep(x):
    return jnp.where(loss_mask, x, 0.0)

  loss, ratio, clipped = clipped_surrogate(
      keep(log_probs),
      keep(old_log_probs),
      advantages=advantages,
      clip_eps_low=config.clip_eps_low,
      clip_eps_high=config.clip_eps_high,
  )
  kl = jnp.zeros_like(loss)
  if ref_log_probs is not None:
    kl = kl_penalty(
        keep(log_probs), keep(ref_log_probs), estimator=config.kl_estimator
    )
  if config.kl_coef > 0:  # an infinite KL times 0 would be NaN
    loss = loss + config.kl_coef * kl
  return TokenLosses(keep(loss), ratio, clipped, kl)


@shapes.typed
def clipped_surrogate(
    log_probs: Float[Array, "*B R"],
    old_log_probs: Float[Array, "*B R"],
    *,
    advantages: Float[Array, "*B"],
    clip_eps_low: float,
    clip_eps_high: float,
) -> Surrogate:
  """Returns PPO's pessimistic surrogate of each token.

      ratio = exp(log_probs - old_log_probs)
      loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)

  `old_log_probs` is a constant, also where the caller passes `log_probs`
  twice: the ratio is then exactly 1 and the gradient -A. A clipped token has
  gradient exactly 0 even if its ratio overflows. Where the ratio is exactly
  on a bound the token is not clipped (`jnp.minimum` would halve the gradient).

  Args:
    log_probs: the policy's, in nats.
    old_log_probs: those of the policy that sampled the responses.
    advantages: A, one number per response.
    clip_eps_low: how far below 1 the ratio counts; in [0, 1].
    clip_eps_high: how far above 1 the ratio counts; at least 0.

  Source: Schulman et al., arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv
    2503.14476, eq. 10.
  """
  dtype = shapes.wide_dtype(log_probs.dtype)
  log_ratio = log_probs.astype(dtype) - jax.lax.stop_gradient(
      old_log_probs.astype(dtype)
  )
  ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
  lower, upper = 1.0 - clip_eps_low, 1.0 + clip_eps_high
  advantages = advantages.astype(dtype)[..., None]
  clipped = ((advantages > 0) & (ratio > upper)) | (
      (advantages < 0) & (ratio < lower)
  )
  # Where the loss is flat the exponential must not be in the graph: if it
  # overflows, its derivative times a zero cotangent is NaN.
  flat = clipped | (advantages == 0)
  live = jnp.exp(jnp.where(flat, 0.0, log_ratio))
  effective = jnp.where(clipped, jnp.clip(ratio, lower, upper), live)
  return Surrogate(-effective * advantages, ratio, clipped)


@shapes.typed
def kl_penalty(
    log_probs: Float[Array, "*B R"],
    ref_log_probs: Float[Array, "*B R"],
    *,
    estimator: KlEstimator,
) -> Float[Array, "*B R"]:
  """Returns the per-token estimate of KL(policy || reference), in nats.

      k1 = log_probs - ref            unbiased, of either sign
      k3 = exp(-k1) + k1 - 1          unbiased, never negative

  As a loss term k1 is a trap: its gradient is that of log_probs alone, which
  has mean zero over the policy's own samples and pulls nowhere.

  Args:
    log_probs: the policy's, in nats.
    ref_log_probs: the reference policy's; a constant.
    estimator: "k1" or "k3".

  Source: J. Schulman, "Approximating KL divergence" (2020); k3 is GRPO's,
    arXiv 2402.03300, eq. 4. It is computed as expm1(-k1) + k1, since
    exp(-k1) - 1 cancels near the reference.
  """
  dtype = shapes.wide_dtype(log_probs.dtype)
  k1 = log_probs.astype(dtype) - jax.lax.stop_gradient(
      ref_log_probs.astype(dtype)
  )
  return k1 if estimator == "k1" else jnp.expm1(-k1) + k1


@shapes.typed
def token_weights(
    loss_mask: Bool[Array, "*B R"],
    *,
    aggregation: Aggregation,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "*B R"]:
  """Returns the weight of each token in the step's unnormalised sum.

  "response_mean" gives 1 / R_i to each of the R_i kept tokens of response i,
  "token_mean" gives 1; other tokens get 0. The sum of weights over any set of
  responses equals their `denominator`.

  Args:
    loss_mask: True on the tokens that are trained on.
    aggregation: "response_mean" or "token_mean".
    dtype: dtype of the weights: that of the losses they multiply.
  """
  kept = loss_mask.astype(dtype)
  if aggregation == "token_mean":
    return kept
  return kept / jnp.maximum(kept.sum(-1, keepdims=True), 1)


@shapes.typed
def denominator(
    loss_mask: Bool[Array, "*B R"], *, aggregation: Aggregation
) -> Int[Array, ""]:
  """Returns what the step's sum is divided by, once, after all groups.

  The number of responses that keep at least one token ("response_mean") or
  of kept tokens ("token_mean"): an int32, so that adding up groups in any
  order is exact.

  Args:
    loss_mask: True on the tokens that are trained on.
    aggregation: "response_mean" or "token_mean".
  """
  kept = loss_mask.any(-1) if aggregation == "response_mean" else loss_mask
  return kept.sum(dtype=jnp.int32)


def _out_of_range(name: str, value: float, wanted: str) -> ValueError:
  return ValueError(f"{name}={value}: wanted a number {wanted}")


def _check_name(name: str, value: str, allowed: object) -> None:
  """Refuses a `value` that is not among the names of a Literal type."""
  names = typing.get_args(allowed)
  if value not in names:
    raise ValueError(f"{name}={value!r}: wanted one of {', '.join(names)}")

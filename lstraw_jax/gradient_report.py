"""How far the dropped gradient is from the exact one, by family of weights.

    dropped = sum_i dl_i/dw at a constant prompt state      (replay)
    exact   = dropped + the term through the prompt state   (reverse sweep)

1. One replay of the captured state gives the dropped gradient and the cotangent
   of the state; one sweep, from zero, the term through the state.
2. Sums of squares and products of each leaf are taken where its parts lie; the
   host adds those of a family.
3. A second replay and sweep of the same state, now with sums over slots in
   bfloat16, give that term again: its difference is the error of these sums.

At most two gradients and one cotangent of the state exist at a time.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lstraw_jax.capture import Progress, PromptTape
from lstraw_jax.gradient_families import by_family
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.objectives import denominator
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.replay import ReplayConfig, Replayed, replay
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.state_cotangent import (
    CotangentDtype,
    StateCotangent,
    zero_cotangent,
)
from modeling.sharding import replicate

ALL = "all"  # the row of all weights

_COMPARED: CotangentDtype = "bfloat16"  # whose error against float32 is told


class FamilyReport(NamedTuple):
  """Dropped against exact gradient of the weights of one family.

  None stands for what is not defined: a ratio to a gradient that is zero.
  """

  family: str
  parameters: int
  cosine: float | None  # of the angle between dropped and exact
  relative_l2: float | None  # |dropped - exact| / |exact|
  norm_ratio: float | None  # |dropped| / |exact|
  exact_norm: float  # |exact|, divided by the denominator as in an update
  bfloat16_relative_l2: float | None  # |exact, bfloat16 sums - exact| / |exact|


def gradient_report(
    policy: Policy,
    prompt: PromptState,
    tape: PromptTape,
    branches: BranchBatch,
    *,
    config: ReplayConfig,
    policy_step: int = 0,
    progress: Progress | None = None,
) -> tuple[FamilyReport, ...]:
  """Compares the dropped gradient of some groups with their exact one.

  Args:
    policy: the weights that captured the state.
    prompt: the state; never written.
    tape: of the same capture.
    branches: the responses, as for an update.
    config: of both replays.
    policy_step: optimizer steps that the weights have seen.
    progress: called after each branch and each chunk, of both passes.

  Returns:
    A row for each family that has trained weights, and one of all.

  Raises:
    ValueError: for a weight of no family, or a state of other weights.
    FloatingPointError: if a gradient is not finite.
  """
  families = by_family(named_leaves(policy.trainable))
  families[ALL] = [name for names in families.values() for name in names]

  def replayed(dtype: CotangentDtype) -> Replayed:
    return replay(
        policy,
        prompt,
        branches,
        zero_gradients(policy),
        zero_cotangent(policy, prompt, dtype=dtype),
        config=config,
        progress=progress,
    )

  def through_state(cotangent: StateCotangent | None) -> nnx.State:
    assert cotangent is not None, "replay returns what it is given"
    term, _ = add_prompt_gradient(
        policy,
        prompt,
        tape,
        zero_gradients(policy),
        cotangent,
        policy_step=policy_step,
        progress=progress,
    )
    return term

  dropped, cotangent, *_ = replayed("float32")
  term = through_state(cotangent)
  squares = jax.device_get(_squares(dropped, term, mesh=policy.mesh))
  del dropped, cotangent  # the former before there is a third gradient
  compared = through_state(replayed(_COMPARED).cotangent)
  errors = jax.device_get(_errors(compared, term, mesh=policy.mesh))

  count = int(
      denominator(branches.loss_mask, aggregation=config.objective.aggregation)
  )
  sizes = {k: x.size for k, x in named_leaves(policy.trainable).items()}
  return tuple(
      _row(
          family,
          sum(sizes[name] for name in names),
          [squares[name] for name in names],
          [errors[name] for name in names],
          count,
      )
      for family, names in families.items()
  )


class _Squares(NamedTuple):
  """Of a leaf, arrays [] in float32 or wider; of a family, floats."""

  dropped: Any  # |dropped|^2
  exact: Any  # |exact|^2
  product: Any  # <dropped, exact>
  difference: Any  # |exact - dropped|^2


@partial(jax.jit, static_argnames="mesh")
def _squares(dropped: nnx.State, term: nnx.State, *, mesh: Mesh):
  """Returns the sums of each leaf, by name, whole on every device."""

  def of_leaf(dropped, term):
    exact = dropped + term
    pairs = (dropped, dropped), (exact, exact), (dropped, exact), (term, term)
    return _Squares(*[(x * y).sum() for x, y in pairs])

  terms = named_leaves(term)
  found = {k: of_leaf(x, terms[k]) for k, x in named_leaves(dropped).items()}
  return replicate(found, mesh)


@partial(jax.jit, static_argnames="mesh")
def _errors(got: nnx.State, wanted: nnx.State, *, mesh: Mesh):
  """Returns |got - wanted|^2 of each leaf, by name."""
  wanteds = named_leaves(wanted)
  found = {
      k: ((x - wanteds[k]) ** 2).sum() for k, x in named_leaves(got).items()
  }
  return replicate(found, mesh)


def _row(
    family: str,
    parameters: int,
    squares: Sequence[_Squares],
    errors: Sequence[np.ndarray],
    count: int,
) -> FamilyReport:
  """Adds up the leaves of a family."""
  sums = _Squares(
      *[math.fsum(map(float, x)) for x in zip(*squares, strict=True)]
  )
  error = math.fsum(map(float, errors))
  if not all(map(math.isfinite, (*sums, error))):
    raise FloatingPointError(
        f"the gradient of {family!r} is not finite: sums of squares {sums},"
        f" of the error of {_COMPARED} sums {error}"
    )
  dropped, exact = math.sqrt(sums.dropped), math.sqrt(sums.exact)
  return FamilyReport(
      family=family,
      parameters=parameters,
      cosine=_ratio(sums.product, dropped * exact),
      relative_l2=_ratio(math.sqrt(sums.difference), exact),
      norm_ratio=_ratio(dropped, exact),
      exact_norm=exact / count,
      bfloat16_relative_l2=_ratio(math.sqrt(error), exact),
  )


def _ratio(value: float, unit: float) -> float | None:
  return value / unit if unit else None

"""Group-relative advantages: a response measured against its siblings."""

from collections.abc import Sequence

import numpy as np

from lstraw_jax.rollouts import RolloutGroup


def advantages_of(
    groups: Sequence[RolloutGroup], *, normalize_std: bool
) -> list[np.ndarray]:
  """Returns the advantages of each group, see `group_relative_advantages`."""
  rewards = [np.array([r.reward for r in g.rollouts]) for g in groups]
  return [
      group_relative_advantages(row, normalize_std=normalize_std)
      for row in rewards
  ]


def group_relative_advantages(
    rewards: Sequence[float] | np.ndarray,
    *,
    normalize_std: bool,
    eps: float = 1e-6,
) -> np.ndarray:
  """Returns the advantage of each response of one group, on the host.

      A_i = (r_i - mean(r)) / (std(r) + eps)     with normalize_std
      A_i = r_i - mean(r)                        without

  Rewards are a handful of host numbers, so this is numpy: bad ones are
  refused before anything is on a device. The group is always whole, which
  makes the advantages the same on every mesh. Equal rewards give exactly 0.

  Args:
    rewards: r, [G] finite numbers, G >= 2.
    normalize_std: whether to divide by the group's standard deviation.
    eps: added to the deviation, in units of reward; positive.

  Returns:
    [G] float64, or float32 if `rewards` is an array of float32.

  Raises:
    ValueError: if the group is not a vector of at least two finite rewards,
      or `eps` is not positive.

  Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2, which leaves the kind
    of deviation open; this is the sample deviation (divisor G - 1), as
    `torch.std` in TRL and verl. Without normalize_std: Dr. GRPO, arXiv
    2503.20783.
  """
  _check(rewards, eps)
  values = np.asarray(rewards, np.float64)
  # Shifted first: the mean of equal numbers may differ from them by rounding.
  values = values - values[0]
  advantages = values - values.mean()
  if normalize_std:
    advantages = advantages / (values.std(ddof=1) + eps)
  return advantages.astype(np.result_type(np.asarray(rewards), np.float32))


def _check(rewards: Sequence[float] | np.ndarray, eps: float) -> None:
  """Refuses anything but a vector of at least two finite rewards."""
  if not 0 < eps < float("inf"):
    raise ValueError(f"eps={eps}: wanted a finite number > 0")
  shape = np.shape(rewards)
  if len(shape) != 1 or shape[0] < 2:
    raise ValueError(
        f"rewards={rewards}: got shape {shape}, wanted [G] with G >= 2."
        " Fix: sample at least two responses per prompt; alone, each has"
        " advantage 0"
    )
  bad = np.flatnonzero(~np.isfinite(np.asarray(rewards, np.float64)))
  if bad.size:
    raise ValueError(
        f"rewards[{bad[0]}]={rewards[bad[0]]}: wanted a finite number. Fix:"
        " drop the response or give it a reward; one NaN poisons its group"
    )

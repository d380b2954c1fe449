"""Groups of sampled responses: host types, and the batch on the device.

`to_branch_batch` pads the responses of one group to a bucketed length, so that
the number of compiled programs is bounded, and moves them to the device.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
  """One sampled response, on the host."""

  tokens: np.ndarray  # [R] int32
  reward: float
  log_probs: np.ndarray | None  # [R] float32, nats, of the sampling policy
  loss_mask: np.ndarray  # [R] bool, False on tokens a tool or user wrote

  def __post_init__(self):
    arrays = {"log_probs": self.log_probs, "loss_mask": self.loss_mask}
    for name, array in arrays.items():
      if array is not None and array.shape != self.tokens.shape:
        raise ValueError(
            f"{name}.shape={array.shape}: wanted {self.tokens.shape}, one"
            " element per token"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGroup:
  """The responses sampled for one prompt, on the host."""

  group_id: str
  prompt_tokens: np.ndarray  # [P] int32
  rollouts: tuple[Rollout, ...]

  def __post_init__(self):
    if not self.prompt_tokens.size or not self.rollouts:
      raise ValueError(
          f"group_id={self.group_id!r}: got {self.prompt_tokens.size} prompt"
          f" tokens and {len(self.rollouts)} rollouts, wanted at least one of"
          " each"
      )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BranchBatch:
  """The responses of one group, padded to a common length R.

  The last prompt token x_P is not in the captured prompt state; it starts
  every branch, so that each response token has an input that predicts it:

      inputs   x_P  y_1  ...  y_{R-1}
      targets  y_1  y_2  ...  y_R
  """

  inputs: jax.Array  # [G, R] int32: the token fed at each step
  targets: jax.Array  # [G, R] int32: the token predicted from it
  valid: jax.Array  # [G, R] bool: False on padding
  loss_mask: jax.Array  # [G, R] bool: target is trained on; False on padding
  old_log_probs: jax.Array | None  # [G, R] float32, of targets; 0 on padding
  ref_log_probs: jax.Array | None  # [G, R] float32, of targets
  advantages: jax.Array  # [G] float32


def to_branch_batch(
    group: RolloutGroup,
    *,
    advantages: np.ndarray,
    multiple: int,
    old_log_probs_from_rollouts: bool,
) -> BranchBatch:
  """Pads a group's responses to one bucketed length and moves them to device.

  Args:
    group: the responses of one prompt, of any lengths.
    advantages: [G], one number per response.
    multiple: R is `bucket(longest response, multiple=multiple)`.
    old_log_probs_from_rollouts: True takes the sampler's log-probs as the old
      policy's; False leaves `old_log_probs` None, to be scored.

  Raises:
    ValueError: if `advantages` does not hold one finite number per response,
      or the sampler's log-probs are asked for and not there.
  """
  rollouts = group.rollouts
  _check_advantages(advantages, len(rollouts))
  old_log_probs = _log_probs(group) if old_log_probs_from_rollouts else None
  lengths = np.array([rollout.tokens.size for rollout in rollouts])
  length = bucket(int(lengths.max()), multiple=multiple)
  valid = np.arange(length)[None] < lengths[:, None]
  targets = _pad([rollout.tokens for rollout in rollouts], length)
  first = np.full((len(rollouts), 1), group.prompt_tokens[-1])
  inputs = np.concatenate([first, targets[:, :-1]], axis=1)
  return BranchBatch(
      inputs=jnp.asarray(np.where(valid, inputs, 0), jnp.int32),
      targets=jnp.asarray(targets, jnp.int32),
      valid=jnp.asarray(valid),
      loss_mask=jnp.asarray(_pad([r.loss_mask for r in rollouts], length)),
      old_log_probs=None
      if old_log_probs is None
      else jnp.asarray(_pad(old_log_probs, length), jnp.float32),
      ref_log_probs=None,
      advantages=jnp.asarray(advantages, jnp.float32),
  )


def bucket(n: int, *, multiple: int) -> int:
  """Returns the smallest length >= n of a ladder with few steps.

  The ladder holds m * multiple for every m >= 1 that is zero below its three
  leading bits: 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, 28, 32, ... Hence there
  are at most four lengths per octave, which bounds the number of compiled
  programs, and padding beyond the next multiple of `multiple` is less than a
  quarter of it: with u = multiple * ceil(n / multiple), u <= bucket < 5/4 u.

  Args:
    n: tokens to hold; at least 1.
    multiple: unit of the ladder in tokens; at least 1.

  Raises:
    ValueError: if `n` or `multiple` is below 1.
  """
  for name, value in (("n", n), ("multiple", multiple)):
    if value < 1:
      raise ValueError(f"{name}={value}: wanted an integer >= 1")
  units = -(-n // multiple)
  shift = max(units.bit_length() - 3, 0)
  return (-(-units >> shift) << shift) * multiple


def _log_probs(group: RolloutGroup) -> list[np.ndarray]:
  """Returns the sampler's log-probs of every response, or refuses."""
  rows = [r.log_probs for r in group.rollouts if r.log_probs is not None]
  if len(rows) < len(group.rollouts):
    raise ValueError(
        f"old_log_probs_from_rollouts=True: got log_probs on {len(rows)} of"
        f" {len(group.rollouts)} rollouts in group_id={group.group_id!r},"
        " wanted them on all. Fix: store them when sampling, or pass False and"
        " score the old policy"
    )
  return rows


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
  """Stacks rows, each filled up with zeros to `length`."""
  return np.stack([np.pad(row, (0, length - row.size)) for row in rows])


def _check_advantages(advantages: np.ndarray, group_size: int) -> None:
  """Refuses anything but one finite advantage per response."""
  if np.shape(advantages) != (group_size,):
    raise ValueError(
        f"advantages={advantages}: got shape {np.shape(advantages)}, wanted"
        f" ({group_size},), one per response of the group"
    )
  if not np.isfinite(advantages).all():
    raise ValueError(f"advantages={advantages}: wanted finite numbers")

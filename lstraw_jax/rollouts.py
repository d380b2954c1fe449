"""Groups of sampled responses: host types, and the batch on the device.

`to_branch_batch` pads the responses of some groups to a bucketed length, so
that the number of compiled programs is bounded, and moves them to the device.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from modeling.layer_state import NOTHING_RECORDED, Record
from modeling.sharding import to_mesh


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
  """One sampled response, on the host."""

  tokens: np.ndarray  # [R] int32
  reward: float
  log_probs: np.ndarray | None  # [R] float32, nats, of the sampling policy
  loss_mask: np.ndarray  # [R] bool, False on tokens a tool or user wrote
  # What the sampler chose where it drew each token, [R, l, ...] int32: to be
  # chosen again instead of anew, so that trainer and sampler agree.
  record: Record = NOTHING_RECORDED

  def __post_init__(self):
    arrays = {"log_probs": self.log_probs, "loss_mask": self.loss_mask}
    for name, array in arrays.items():
      if array is not None and array.shape != self.tokens.shape:
        raise ValueError(
            f"{name}.shape={array.shape}: wanted {self.tokens.shape}, one"
            " element per token"
        )
    for name, array in self.record._asdict().items():
      if array is not None and (
          array.ndim != 3 or len(array) != self.tokens.size
      ):
        raise ValueError(
            f"record.{name}.shape={array.shape}: wanted [R, layers, choices],"
            f" with R={self.tokens.size} tokens"
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
  """The responses of some groups, one a row, padded to G responses of R tokens.

  The last prompt token x_P is not in the captured prompt state; it starts
  every branch, so that each response token has an input that predicts it:

      inputs   x_P  y_1  ...  y_{R-1}
      targets  y_1  y_2  ...  y_R

  A group of fewer than G has branches at its end in which nothing is valid:
  they carry no loss and count in no denominator.
  """

  inputs: jax.Array  # [B, G, R] int32: the token fed at each step
  targets: jax.Array  # [B, G, R] int32: the token predicted from it
  valid: jax.Array  # [B, G, R] bool: False on padding
  loss_mask: jax.Array  # [B, G, R] bool: target is trained on; not padding
  old_log_probs: jax.Array | None  # [B, G, R] float32, of targets; 0 on padding
  ref_log_probs: jax.Array | None  # [B, G, R] float32, of targets
  advantages: jax.Array  # [B, G] float32
  record: Record = NOTHING_RECORDED  # [B, G, R, l, ...] int32, of inputs


def to_branch_batch(
    groups: Sequence[RolloutGroup],
    *,
    advantages: Sequence[np.ndarray],
    multiple: int,
    old_log_probs_from_rollouts: bool,
    mesh: Mesh,
) -> BranchBatch:
  """Pads the responses of groups to one bucketed length, for the device.

  Args:
    groups: the responses of each prompt, any number and of any lengths.
    advantages: for each group, one number per response.
    multiple: R is `bucket(longest response, multiple=multiple)`.
    old_log_probs_from_rollouts: True takes the sampler's log-probs as the old
      policy's; False leaves `old_log_probs` None, to be scored.
    mesh: where the batch goes.

  Raises:
    ValueError: if `advantages` does not hold one finite number per response,
      the sampler's log-probs are asked for and not there, or only some of the
      responses have a record of what was chosen.
  """
  for group, numbers in zip(groups, advantages, strict=True):
    _check_advantages(numbers, len(group.rollouts))
  longest = max(r.tokens.size for group in groups for r in group.rollouts)
  length = bucket(longest, multiple=multiple)
  most = max(len(group.rollouts) for group in groups)

  def padded(rows_of, dtype):
    rows = [rows_of(group) for group in groups]
    table = np.zeros((len(groups), most, length, *rows[0][0].shape[1:]), dtype)
    for b, of_group in enumerate(rows):
      for g, row in enumerate(of_group):
        table[b, g, : len(row)] = row
    return table

  of_each = lambda name: lambda group: [
      getattr(r, name) for r in group.rollouts
  ]
  targets = padded(of_each("tokens"), np.int32)
  valid = padded(lambda g: [np.ones(r.tokens.size) for r in g.rollouts], bool)
  first = [group.prompt_tokens[-1] for group in groups]
  first = np.broadcast_to(np.reshape(first, (-1, 1, 1)), (len(groups), most, 1))
  inputs = np.concatenate([first, targets[..., :-1]], axis=-1)
  old_log_probs = None
  if old_log_probs_from_rollouts:
    old_log_probs = padded(_log_probs, np.float32)
  put = partial(to_mesh, mesh=mesh)
  return BranchBatch(
      inputs=put(np.where(valid, inputs, 0).astype(np.int32)),
      targets=put(targets),
      valid=put(valid),
      loss_mask=put(padded(of_each("loss_mask"), bool)),
      old_log_probs=put(old_log_probs),
      ref_log_probs=None,
      advantages=put(_pad(advantages, most)),
      record=put(_record(groups, padded)),
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


def _record(groups, padded) -> Record:
  """Returns what was chosen for the responses, if it was recorded."""
  records = [r.record for group in groups for r in group.rollouts]
  found = {}
  for name in Record._fields:
    has = [getattr(record, name) is not None for record in records]
    if any(has) and not all(has):
      raise ValueError(
          f"record.{name}: got it on {sum(has)} of {len(has)} responses, wanted"
          " it on all or none: the others would be chosen anew"
      )
    if all(has):
      of_group = lambda group, name=name: [
          getattr(r.record, name) for r in group.rollouts
      ]
      found[name] = padded(of_group, np.int32)
  return Record(**found)


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
  """Stacks rows as float32, each filled up with zeros to `length`."""
  filled = [np.pad(row, (0, length - len(row))) for row in rows]
  return np.stack(filled).astype(np.float32)


def _check_advantages(advantages: np.ndarray, group_size: int) -> None:
  """Refuses anything but one finite advantage per response."""
  if np.shape(advantages) != (group_size,):
    raise ValueError(
        f"advantages={advantages}: got shape {np.shape(advantages)}, wanted"
        f" ({group_size},), one per response of the group"
    )
  if not np.isfinite(advantages).all():
    raise ValueError(f"advantages={advantages}: wanted finite numbers")

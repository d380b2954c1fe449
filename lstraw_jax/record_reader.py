"""Reads what a sampler chose for a response, refusing all that is wrong."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lstraw_jax.jsonl import invalid, map_file
from modeling.layer_state import Record


class ChoiceLimits(NamedTuple):
  """What the choices of a model are like."""

  layers: int  # that choose
  entries: int  # that each chooses
  count: int | None  # to choose from; None: the tokens up to one's own


def read_record(
    response: dict[str, object],
    field: str,
    *,
    folder: pathlib.Path,
    prompt_tokens: int,
    response_tokens: int,
    limits: Mapping[str, ChoiceLimits],
) -> Record:
  """Reads the files named `selections_file` and `experts_file`, if there are.

  Args:
    response: that may name them, relative to `folder`.
    field: its name, for errors.
    folder: that of the JSONL.
    prompt_tokens: P of its prompt.
    response_tokens: its own R.
    limits: of each kind of choices that the model makes.

  Returns:
    Arrays [R, layers, entries] int32, None for what is not there.

  Raises:
    ValueError: as `read_rollout_groups`.
  """
  found = {}
  for kind in Record._fields:
    name = f"{kind}_file"
    if name in response:
      found[kind] = _read(
          response[name],
          f"{field}.{name}",
          folder,
          # The token that is fed where y_1 is drawn stands at P - 1.
          np.arange(response_tokens) + prompt_tokens - 1,
          limits.get(kind),
      )
  return Record(**found)


def _read(name, field, folder, positions, limits: ChoiceLimits | None):
  fix = "leave it out"
  if limits is None:
    wanted, got = "no record of choices", "one"
    fix = f"{fix}: this model makes no such choice"
    raise invalid(field, name, wanted, fix, got=got)
  shape = (len(positions), limits.layers, limits.entries)
  wanted = f"a .npy of integers, {shape}: tokens, layers, entries"
  array = map_file(name, field, folder, wanted=wanted)
  if array.shape != shape:
    fix = "store a row where each token of the response was drawn"
    raise invalid(field, name, wanted, fix, got=f"shape {array.shape}")
  array = np.array(array, np.int64)
  if limits.count is None:
    low, high, what = -1, positions[:, None, None], "its token's position"
  else:
    low, high, what = 0, limits.count - 1, str(limits.count - 1)
  bad = np.argwhere((array < low) | (array > high))
  if bad.size:
    at = tuple(bad[0].tolist())
    wanted = f"{low} to {what}"
    fix = "store what the sampler chose where it drew the token"
    got = f"{len(bad)} such entries"
    raise invalid(f"{field}{list(at)}", int(array[at]), wanted, fix, got=got)
  ordered = np.sort(array, axis=-1)
  twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
  if twice.any():
    at = np.argwhere(twice.any(-1))[0].tolist()
    fix = "store what the sampler chose"
    row = array[tuple(at)].tolist()
    got = "one twice"
    raise invalid(f"{field}{at}", row, "different entries", fix, got=got)
  return array.astype(np.int32)

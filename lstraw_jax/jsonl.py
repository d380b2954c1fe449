"""Reads JSONL of token lists, refusing by file, line and field what is wrong.

Nothing is on a device while it reads: a bad line costs neither memory nor time.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import reprlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLimits:
  """Which ids may stand in a list of tokens, and how many of them."""

  vocab_size: int  # ids are in [0, vocab_size)
  least: int = 1
  most: int
  most_name: str  # what to change where more are wanted

  def __post_init__(self):
    for name, value, least in (
        ("vocab_size", self.vocab_size, 1),
        (self.most_name, self.most, self.least),
    ):
      if value < least:
        raise ValueError(f"{name}={value}: wanted an integer >= {least}")


def read_jsonl(
    path: str | os.PathLike[str],
    parse: Callable[[dict[str, object]], _T],
    *,
    what: str,
) -> list[_T]:
  """Parses a file of objects, one a line; blank lines are skipped.

  Args:
    path: the file.
    parse: makes something of a line's object, or raises `invalid`.
    what: the lines are, in plural.

  Raises:
    ValueError: names the file and line of the first thing that is wrong.
  """
  path = pathlib.Path(path)
  found, number = [], 0
  with path.open("rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        found.append(parse(_parse_object(line)))
      except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from error
  if not found:
    raise ValueError(
        f"{path}:{max(number, 1)}: line='': got a file without {what}, wanted"
        " at least one. Fix: write one JSON object per line"
    )
  return found


def check_keys(
    record: dict[str, object],
    prefix: str,
    *,
    required: tuple[str, ...],
    optional: tuple[str, ...],
) -> None:
  """Refuses unknown keys, with a suggestion, and missing ones."""
  known = required + optional
  for key, value in record.items():
    if key not in known:
      close = difflib.get_close_matches(key, known, n=1)
      fix = f"did you mean {close[0]!r}?" if close else "remove it"
      wanted = f"one of {', '.join(known)}"
      raise invalid(prefix + key, value, wanted, fix, got="an unknown key")
  for key in required:
    if key not in record:
      raise invalid(prefix + key, None, "a value", "add it", got="no such key")


def parse_tokens(
    record: dict[str, object],
    *,
    inline: str,
    file: str,
    folder: pathlib.Path,
    limits: TokenLimits,
) -> np.ndarray:
  """Returns token ids given under the key `inline`, or `file` as a .npy.

  The .npy is one-dimensional, of integers; its name is relative to `folder`.
  """
  if (inline in record) == (file in record):
    raise invalid(
        inline,
        record.get(inline),
        f"exactly one of {inline} and {file}",
        "inline a short list, put a long one in a .npy file",
        got="both" if file in record else "neither",
    )
  if file in record:
    wanted = "the name of a .npy of integers, one-dimensional"
    tokens = map_file(record[file], file, folder, wanted=wanted)
    if tokens.ndim != 1:
      fix, got = "np.save a list of token ids", f"shape {tokens.shape}"
      raise invalid(file, record[file], wanted, fix, got=got)
    return check_tokens(tokens, file, limits)
  values = parse_list(record[inline], inline, (int,), "token ids")
  return check_tokens(values, inline, limits)


def map_file(
    name: object, field: str, folder: pathlib.Path, *, wanted: str
) -> np.ndarray:
  """Maps a .npy of integers, so that its shape is checked before it is read."""
  fix = "np.save it in the folder of the JSONL"
  if not isinstance(name, str):
    raise invalid(field, name, wanted, fix)
  try:
    array = np.lib.format.open_memmap(folder / name, mode="r")
  except (OSError, ValueError) as error:
    got = f"an unreadable file ({error})"
    raise invalid(field, name, wanted, fix, got=got) from error
  if array.dtype.kind not in "iu":
    got = f"shape {array.shape} of {array.dtype}"
    raise invalid(field, name, wanted, fix, got=got)
  return array


def check_tokens(
    tokens: np.ndarray, field: str, limits: TokenLimits
) -> np.ndarray:
  """Refuses a bad length and ids outside the vocabulary; returns int32."""
  if not limits.least <= tokens.size <= limits.most:
    wanted = f"{limits.least} to {limits.most_name}={limits.most}"
    fix = f"change the data, or {limits.most_name} to what memory allows"
    got = f"{tokens.size} tokens"
    # Seven are more than are printed: a mapped file is not read to the end.
    raise invalid(field, tokens[:7].tolist(), wanted, fix, got=got)
  wanted = f"token ids in [0, vocab_size={limits.vocab_size})"
  fix = "use the tokenizer of the model"
  check_range(tokens, field, 0, limits.vocab_size - 1, wanted, fix)
  # A copy: a live memory map holds a file descriptor, and files change.
  return np.array(tokens, np.int32)


def parse_loss_mask(mask: object, field: str, length: int) -> np.ndarray:
  """Returns a mask of 0, 1, false or true, with at least one that is set."""
  wanted = "0, 1, false or true"
  values = parse_list(mask, field, (int, bool), wanted)
  check_one_per_token(values, field, length)
  check_range(values, field, 0, 1, wanted, "use 1 to keep a token")
  if not values.any():
    fix = "drop this line's entry: it has no token to train on"
    raise invalid(field, values.tolist(), "a 1", fix, got="only zeros")
  return values.astype(bool)


def parse_list(
    values: object, field: str, types: tuple[type, ...], wanted: str
) -> np.ndarray:
  """Returns a JSON list, of checked types, as an array of Python objects.

  Objects, because JSON integers have no bounds, and numpy would silently turn
  a bool among integers into an integer.
  """
  fix = f"write a list of {wanted}"
  if not isinstance(values, list):
    raise invalid(field, values, f"a list of {wanted}", fix)
  if not set(map(type, values)) <= set(types):
    index = [type(value) in types for value in values].index(False)
    raise invalid(f"{field}[{index}]", values[index], wanted, fix)
  return np.array(values, object)


def check_one_per_token(values: np.ndarray, field: str, length: int) -> None:
  """Refuses a list that does not run along the tokens."""
  if values.size != length:
    wanted, fix = f"{length}", "write one element per token"
    got = f"{values.size} elements"
    raise invalid(field, values.tolist(), wanted, fix, got=got)


def check_range(
    values: np.ndarray,
    field: str,
    low: float,
    high: float,
    wanted: str,
    fix: str,
) -> None:
  """Refuses the first value outside [low, high]; NaN is outside."""
  with np.errstate(invalid="ignore"):  # a NaN among Python objects warns
    bad = np.flatnonzero(~((values >= low) & (values <= high)))
  if bad.size:
    index = int(bad[0])
    got = f"{bad.size} such values of {values.size}"
    value = values.item(index)
    raise invalid(f"{field}[{index}]", value, wanted, fix, got=got)


def invalid(
    field: str, value: object, wanted: str, fix: str, *, got: str | None = None
) -> ValueError:
  """Returns the error for one field; the value's type is what was got."""
  got = got or type(value).__name__
  return ValueError(
      f"{field}={reprlib.repr(value)}: got {got}, wanted {wanted}. Fix: {fix}"
  )


def _parse_object(line: bytes) -> dict[str, object]:
  """Parses one line as a JSON object without repeated keys."""
  wanted, fix = "one JSON object", "write each line with json.dumps"
  try:
    record = json.loads(line, object_pairs_hook=_unique_keys)
  except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
    got = f"no JSON ({error})"
    raise invalid("line", line, wanted, fix, got=got) from error
  if not isinstance(record, dict):
    raise invalid("line", record, wanted, fix)
  return record


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
  """Builds an object; of a repeated key json would keep the last, silently."""
  record = dict(pairs)
  if len(record) < len(pairs):
    keys = [key for key, _ in pairs]
    key = max(keys, key=keys.count)
    got = f"this key {keys.count(key)} times"
    raise invalid(key, record[key], "it once", "drop the others", got=got)
  return record

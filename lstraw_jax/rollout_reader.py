"""Reads groups of responses from JSONL, refusing all that is wrong with them.

Nothing is on a device while it reads: a bad line costs neither memory nor time.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import reprlib

import numpy as np

from lstraw_jax.rollouts import Rollout, RolloutGroup

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def read_rollout_groups(
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> tuple[RolloutGroup, ...]:
  """Reads a JSONL file of groups, one object a line; blank lines are skipped.

      {"group_id": "a", "prompt_tokens": [1, 2] or "prompt_file": "x.npy",
       "responses": [{"tokens": [3, 4], "reward": 0.5,
                      "log_probs": [-0.1, -2.0], "loss_mask": [1, 0]}, ...]}

  `prompt_file` is a one-dimensional .npy of integers, relative to the folder
  of the JSONL. `log_probs` (nats) may be absent from all responses of a
  group; `loss_mask` (0, 1, false or true) keeps every token when absent.

  Args:
    path: the JSONL file.
    vocab_size: token ids must be in [0, vocab_size).
    max_prompt_tokens: longest prompt allowed.
    max_response_tokens: longest response allowed.

  Returns:
    The groups, in the order of the file.

  Raises:
    ValueError: names the file, line and field of the first thing that is
      wrong, with what was got, what is wanted and the fix.
  """
  limits = _Limits(
      vocab_size=vocab_size,
      max_prompt_tokens=max_prompt_tokens,
      max_response_tokens=max_response_tokens,
  )
  path = pathlib.Path(path)
  groups: dict[str, RolloutGroup] = {}
  number = 0
  with path.open("rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        group = _parse_group(line, path.parent, limits)
        _check_new(group.group_id, groups)
      except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from error
      groups[group.group_id] = group
  if not groups:
    raise ValueError(
        f"{path}:{max(number, 1)}: line='': got a file without groups, wanted"
        " at least one. Fix: write one JSON object per line"
    )
  return tuple(groups.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Limits:
  """What the model and the memory plan allow."""

  vocab_size: int
  max_prompt_tokens: int
  max_response_tokens: int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 1:
        raise ValueError(f"{field.name}={value}: wanted an integer >= 1")


def _parse_group(
    line: bytes, folder: pathlib.Path, limits: _Limits
) -> RolloutGroup:
  """Parses one line, checking everything."""
  record = _parse_object(line)
  _check_keys(
      record,
      "",
      required=("group_id", "responses"),
      optional=("prompt_tokens", "prompt_file"),
  )
  group_id = record["group_id"]
  if not isinstance(group_id, str) or not group_id:
    raise _invalid("group_id", group_id, "a non-empty string", "name the group")
  return RolloutGroup(
      group_id=group_id,
      prompt_tokens=_parse_prompt(record, folder, limits),
      rollouts=_parse_responses(record["responses"], limits),
  )


def _parse_object(line: bytes) -> dict[str, object]:
  """Parses one line as a JSON object without repeated keys."""
  wanted, fix = "one JSON object", "write each group with json.dumps"
  try:
    record = json.loads(line, object_pairs_hook=_unique_keys)
  except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
    got = f"no JSON ({error})"
    raise _invalid("line", line, wanted, fix, got=got) from error
  if not isinstance(record, dict):
    raise _invalid("line", record, wanted, fix)
  return record


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
  """Builds an object; of a repeated key json would keep the last, silently."""
  record = dict(pairs)
  if len(record) < len(pairs):
    keys = [key for key, _ in pairs]
    key = max(keys, key=keys.count)
    got = f"this key {keys.count(key)} times"
    raise _invalid(key, record[key], "it once", "drop the others", got=got)
  return record


def _check_keys(
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
      raise _invalid(prefix + key, value, wanted, fix, got="an unknown key")
  for key in required:
    if key not in record:
      raise _invalid(prefix + key, None, "a value", "add it", got="no such key")


def _parse_prompt(
    record: dict[str, object], folder: pathlib.Path, limits: _Limits
) -> np.ndarray:
  """Returns the prompt, given inline or as a .npy file."""
  inline, file = record.get("prompt_tokens"), record.get("prompt_file")
  if ("prompt_tokens" in record) == ("prompt_file" in record):
    raise _invalid(
        "prompt_tokens",
        inline,
        "exactly one of prompt_tokens and prompt_file",
        "inline a short prompt, put a long one in a .npy file",
        got="both" if "prompt_file" in record else "neither",
    )
  if "prompt_file" in record:
    field, tokens = "prompt_file", _open_prompt(file, folder)
  else:
    field = "prompt_tokens"
    tokens = _parse_list(inline, field, (int,), "token ids")
  return _checked_tokens(
      tokens,
      field,
      limits.vocab_size,
      limit=limits.max_prompt_tokens,
      limit_name="max_prompt_tokens",
  )


def _open_prompt(name: object, folder: pathlib.Path) -> np.ndarray:
  """Maps a prompt file, so that its length is checked before it is read."""
  field, fix = "prompt_file", "np.save it in the folder of the JSONL"
  wanted = "the name of a .npy of integers, one-dimensional"
  if not isinstance(name, str):
    raise _invalid(field, name, wanted, fix)
  try:
    tokens = np.lib.format.open_memmap(folder / name, mode="r")
  except (OSError, ValueError) as error:
    got = f"an unreadable file ({error})"
    raise _invalid(field, name, wanted, fix, got=got) from error
  if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
    got = f"shape {tokens.shape} of {tokens.dtype}"
    raise _invalid(field, name, wanted, fix, got=got)
  return tokens


def _parse_responses(responses: object, limits: _Limits) -> tuple[Rollout, ...]:
  """Parses the responses of one group."""
  if not isinstance(responses, list) or len(responses) < 2:
    fix = "sample more per prompt; alone, a response has advantage 0"
    raise _invalid("responses", responses, "a list of two or more", fix)
  rollouts = tuple(
      _parse_response(response, f"responses[{i}]", limits)
      for i, response in enumerate(responses)
  )
  missing = [rollout.log_probs is None for rollout in rollouts]
  if any(missing) and not all(missing):
    raise _invalid(
        f"responses[{missing.index(True)}].log_probs",
        None,
        "log_probs on all responses of a group or on none",
        "store them for every response",
        got=f"log_probs on {missing.count(False)} of {len(missing)}",
    )
  return rollouts


def _parse_response(response: object, field: str, limits: _Limits) -> Rollout:
  """Parses one response."""
  if not isinstance(response, dict):
    fix = 'write {"tokens": [...], "reward": ...}'
    raise _invalid(field, response, "a JSON object", fix)
  _check_keys(
      response,
      f"{field}.",
      required=("tokens", "reward"),
      optional=("log_probs", "loss_mask"),
  )
  name = f"{field}.tokens"
  tokens = _checked_tokens(
      _parse_list(response["tokens"], name, (int,), "token ids"),
      name,
      limits.vocab_size,
      limit=limits.max_response_tokens,
      limit_name="max_response_tokens",
  )
  return Rollout(
      tokens=tokens,
      reward=_parse_reward(response["reward"], f"{field}.reward"),
      log_probs=_parse_log_probs(response, field, tokens.size),
      loss_mask=_parse_loss_mask(response, field, tokens.size),
  )


def _parse_reward(reward: object, field: str) -> float:
  """Returns a reward that float32 can hold."""
  wanted, fix = "a finite number", "score the response, or drop it"
  if isinstance(reward, bool) or not isinstance(reward, int | float):
    raise _invalid(field, reward, wanted, fix)
  # Compared before it is converted: float() of a huge int overflows.
  if not -_FLOAT32_MAX <= reward <= _FLOAT32_MAX:
    raise _invalid(field, reward, wanted, fix)
  return float(reward)


def _parse_log_probs(
    response: dict[str, object], field: str, length: int
) -> np.ndarray | None:
  """Returns the sampler's log-probs, or None where it stored none."""
  if "log_probs" not in response:
    return None
  field, wanted = f"{field}.log_probs", "finite numbers <= 0, in nats"
  values = _parse_list(response["log_probs"], field, (int, float), wanted)
  _check_one_per_token(values, field, length)
  fix = "store a float32 log-softmax"
  _check_range(values, field, -_FLOAT32_MAX, 0, wanted, fix)
  return values.astype(np.float32)


def _parse_loss_mask(
    response: dict[str, object], field: str, length: int
) -> np.ndarray:
  """Returns the mask; all True where the response has none."""
  if "loss_mask" not in response:
    return np.ones(length, bool)
  field, wanted = f"{field}.loss_mask", "0, 1, false or true"
  mask = _parse_list(response["loss_mask"], field, (int, bool), wanted)
  _check_one_per_token(mask, field, length)
  _check_range(mask, field, 0, 1, wanted, "use 1 to keep a token")
  if not mask.any():
    fix = "drop the response: it has no token to train on"
    raise _invalid(field, mask.tolist(), "a 1", fix, got="only zeros")
  return mask.astype(bool)


def _parse_list(
    values: object, field: str, types: tuple[type, ...], wanted: str
) -> np.ndarray:
  """Returns a JSON list, of checked types, as an array of Python objects.

  Objects, because JSON integers have no bounds, and numpy would silently turn
  a bool among integers into an integer.
  """
  fix = f"write a list of {wanted}"
  if not isinstance(values, list):
    raise _invalid(field, values, f"a list of {wanted}", fix)
  if not set(map(type, values)) <= set(types):
    index = [type(value) in types for value in values].index(False)
    raise _invalid(f"{field}[{index}]", values[index], wanted, fix)
  return np.array(values, object)


def _check_one_per_token(values: np.ndarray, field: str, length: int) -> None:
  """Refuses a list that does not run along the tokens."""
  if values.size != length:
    wanted, fix = f"{length}", "write one element per token"
    got = f"{values.size} elements"
    raise _invalid(field, values.tolist(), wanted, fix, got=got)


def _checked_tokens(
    tokens: np.ndarray,
    field: str,
    vocab_size: int,
    *,
    limit: int,
    limit_name: str,
) -> np.ndarray:
  """Refuses a bad length and ids outside the vocabulary; returns int32."""
  if not 1 <= tokens.size <= limit:
    wanted, got = f"1 to {limit_name}={limit}", f"{tokens.size} tokens"
    fix = f"change the data, or {limit_name} to what memory allows"
    # Seven are more than are printed: a mapped file is not read to the end.
    raise _invalid(field, tokens[:7].tolist(), wanted, fix, got=got)
  wanted = f"token ids in [0, vocab_size={vocab_size})"
  fix = "use the tokenizer of the model"
  _check_range(tokens, field, 0, vocab_size - 1, wanted, fix)
  # A copy: a live memory map holds a file descriptor, and files change.
  return np.array(tokens, np.int32)


def _check_range(
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
    raise _invalid(f"{field}[{index}]", value, wanted, fix, got=got)


def _check_new(group_id: str, groups: dict[str, RolloutGroup]) -> None:
  """Refuses the second group of a name."""
  if group_id in groups:
    fix = "keep the responses of a group on one line, or rename it"
    got = "the id of an earlier line"
    raise _invalid("group_id", group_id, "a new id", fix, got=got)


def _invalid(
    field: str, value: object, wanted: str, fix: str, *, got: str | None = None
) -> ValueError:
  """Returns the error for one field; the value's type is what was got."""
  got = got or type(value).__name__
  return ValueError(
      f"{field}={reprlib.repr(value)}: got {got}, wanted {wanted}. Fix: {fix}"
  )

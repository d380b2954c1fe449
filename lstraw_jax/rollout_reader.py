"""Reads groups of responses from JSONL, refusing all that is wrong."""

import os
import pathlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from lstraw_jax.jsonl import (
    TokenLimits,
    check_keys,
    check_one_per_token,
    check_range,
    check_tokens,
    invalid,
    parse_list,
    parse_loss_mask,
    parse_tokens,
    read_jsonl,
)
from lstraw_jax.record_reader import ChoiceLimits, read_record
from lstraw_jax.rollouts import Rollout, RolloutGroup
from modeling.layer_state import Record

ParseRecord = Callable[..., Record]  # as `read_record`, for one prompt

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def read_rollout_groups(
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    choices: Mapping[str, ChoiceLimits] | None = None,
) -> tuple[RolloutGroup, ...]:
  """Reads a JSONL file of groups, one object a line; blank lines are skipped.

      {"group_id": "a", "prompt_tokens": [1, 2] or "prompt_file": "x.npy",
       "responses": [{"tokens": [3, 4], "reward": 0.5,
                      "log_probs": [-0.1, -2.0], "loss_mask": [1, 0],
                      "experts_file": "e.npy", "selections_file": "s.npy"},
                     ...]}

  `prompt_file` is a one-dimensional .npy of integers, relative to the folder
  of the JSONL. `log_probs` (nats) may be absent from all responses of a
  group; `loss_mask` (0, 1, false or true) keeps every token when absent. Where
  the sampler recorded what it chose, for replay to choose the same, the two
  files hold it: [R, layers, entries] where each token was drawn, of experts
  their ids, of selections positions, -1 where there are fewer.

  Args:
    path: the JSONL file.
    vocab_size: token ids must be in [0, vocab_size).
    max_prompt_tokens: longest prompt allowed.
    max_response_tokens: longest response allowed.
    choices: what those of each kind are like that the model makes, by the names
      of `Record`; None: it makes none.

  Returns:
    The groups, in the order of the file.

  Raises:
    ValueError: names the file, line and field of the first thing that is
      wrong, with what was got, what is wanted and the fix.
  """
  of_prompts = TokenLimits(
      vocab_size=vocab_size,
      most=max_prompt_tokens,
      most_name="max_prompt_tokens",
  )
  of_responses = TokenLimits(
      vocab_size=vocab_size,
      most=max_response_tokens,
      most_name="max_response_tokens",
  )
  folder = pathlib.Path(path).parent
  seen: set[str] = set()

  def parse(record: dict[str, object]) -> RolloutGroup:
    check_keys(
        record,
        "",
        required=("group_id", "responses"),
        optional=("prompt_tokens", "prompt_file"),
    )
    group_id = _parse_group_id(record["group_id"], seen)
    prompt_tokens = parse_tokens(
        record,
        inline="prompt_tokens",
        file="prompt_file",
        folder=folder,
        limits=of_prompts,
    )
    parse_record = partial(
        read_record,
        folder=folder,
        prompt_tokens=prompt_tokens.size,
        limits=choices or {},
    )
    return RolloutGroup(
        group_id=group_id,
        prompt_tokens=prompt_tokens,
        rollouts=_parse_responses(
            record["responses"], of_responses, parse_record
        ),
    )

  return tuple(read_jsonl(path, parse, what="groups"))


def _parse_group_id(group_id: object, seen: set[str]) -> str:
  """Returns the name of a group and adds it to those seen."""
  if not isinstance(group_id, str) or not group_id:
    raise invalid("group_id", group_id, "a non-empty string", "name the group")
  if group_id in seen:
    fix = "keep the responses of a group on one line, or rename it"
    got = "the id of an earlier line"
    raise invalid("group_id", group_id, "a new id", fix, got=got)
  seen.add(group_id)
  return group_id


def _parse_responses(
    responses: object, limits: TokenLimits, parse_record: ParseRecord
) -> tuple[Rollout, ...]:
  """Parses the responses of one group."""
  if not isinstance(responses, list) or len(responses) < 2:
    fix = "sample more per prompt; alone, a response has advantage 0"
    raise invalid("responses", responses, "a list of two or more", fix)
  rollouts = tuple(
      _parse_response(response, f"responses[{i}]", limits, parse_record)
      for i, response in enumerate(responses)
  )
  missing = [rollout.log_probs is None for rollout in rollouts]
  if any(missing) and not all(missing):
    raise invalid(
        f"responses[{missing.index(True)}].log_probs",
        None,
        "log_probs on all responses of a group or on none",
        "store them for every response",
        got=f"log_probs on {missing.count(False)} of {len(missing)}",
    )
  return rollouts


def _parse_response(
    response: object,
    field: str,
    limits: TokenLimits,
    parse_record: ParseRecord,
) -> Rollout:
  """Parses one response."""
  if not isinstance(response, dict):
    fix = 'write {"tokens": [...], "reward": ...}'
    raise invalid(field, response, "a JSON object", fix)
  check_keys(
      response,
      f"{field}.",
      required=("tokens", "reward"),
      optional=("log_probs", "loss_mask", "experts_file", "selections_file"),
  )
  name = f"{field}.tokens"
  values = parse_list(response["tokens"], name, (int,), "token ids")
  tokens = check_tokens(values, name, limits)
  mask = np.ones(tokens.size, bool)
  if "loss_mask" in response:
    mask = parse_loss_mask(
        response["loss_mask"], f"{field}.loss_mask", tokens.size
    )
  return Rollout(
      tokens=tokens,
      reward=_parse_reward(response["reward"], f"{field}.reward"),
      log_probs=_parse_log_probs(response, field, tokens.size),
      loss_mask=mask,
      record=parse_record(response, field, response_tokens=tokens.size),
  )


def _parse_reward(reward: object, field: str) -> float:
  """Returns a reward that float32 can hold."""
  wanted, fix = "a finite number", "score the response, or drop it"
  if isinstance(reward, bool) or not isinstance(reward, int | float):
    raise invalid(field, reward, wanted, fix)
  # Compared before it is converted: float() of a huge int overflows.
  if not -_FLOAT32_MAX <= reward <= _FLOAT32_MAX:
    raise invalid(field, reward, wanted, fix)
  return float(reward)


def _parse_log_probs(
    response: dict[str, object], field: str, length: int
) -> np.ndarray | None:
  """Returns the sampler's log-probs, or None where it stored none."""
  if "log_probs" not in response:
    return None
  field, wanted = f"{field}.log_probs", "finite numbers <= 0, in nats"
  values = parse_list(response["log_probs"], field, (int, float), wanted)
  check_one_per_token(values, field, length)
  fix = "store a float32 log-softmax"
  check_range(values, field, -_FLOAT32_MAX, 0, wanted, fix)
  return values.astype(np.float32)

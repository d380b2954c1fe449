"""Reads sequences for supervised training from JSONL."""

import os
import pathlib

import numpy as np

from lstraw_jax.jsonl import (
    TokenLimits,
    check_keys,
    invalid,
    parse_loss_mask,
    parse_tokens,
    read_jsonl,
)
from lstraw_jax.sequences import TokenSequence, with_loss_everywhere


def read_sequences(
    path: str | os.PathLike[str], *, vocab_size: int, max_prompt_tokens: int
) -> tuple[TokenSequence, ...]:
  """Reads a JSONL file of sequences, one object a line; skips blank lines.

      {"tokens": [1, 2, 3] or "tokens_file": "x.npy", "loss_mask": [0, 0, 1]}

  `tokens_file` is a one-dimensional .npy of integers, relative to the folder
  of the JSONL. `loss_mask` (0, 1, false or true) says which tokens are to be
  predicted; when absent, every token but the first, which nothing predicts.

  Args:
    path: the JSONL file.
    vocab_size: token ids must be in [0, vocab_size).
    max_prompt_tokens: longest sequence allowed, 2 at least.

  Returns:
    The sequences, in the order of the file.

  Raises:
    ValueError: names the file, line and field of the first thing that is
      wrong, with what was got, what is wanted and the fix.
  """
  limits = TokenLimits(
      vocab_size=vocab_size,
      least=2,
      most=max_prompt_tokens,
      most_name="max_prompt_tokens",
  )
  folder = pathlib.Path(path).parent

  def parse(record: dict[str, object]) -> TokenSequence:
    check_keys(
        record,
        "",
        required=(),
        optional=("tokens", "tokens_file", "loss_mask"),
    )
    tokens = parse_tokens(
        record,
        inline="tokens",
        file="tokens_file",
        folder=folder,
        limits=limits,
    )
    if "loss_mask" not in record:
      return with_loss_everywhere(tokens)
    mask = _parse_mask(record["loss_mask"], tokens.size)
    return TokenSequence(tokens=tokens, loss_mask=mask)

  return tuple(read_jsonl(path, parse, what="sequences"))


def _parse_mask(mask: object, length: int) -> np.ndarray:
  """Returns a mask that leaves the first token out."""
  parsed = parse_loss_mask(mask, "loss_mask", length)
  if parsed[0]:
    raise invalid(
        "loss_mask[0]",
        1,
        "0, since nothing predicts the first token",
        "set it to 0, or begin the sequence with a token to predict it from",
        got="a loss on the first token",
    )
  return parsed

"""A GRPO task on real text: say what the prompt says.

Prompts are windows of the English reference text that ships with Python. The
reward is verifiable: the share of distinct n-grams of the response that occur
in the prompt, averaged over n = 1 and 2. Random bytes score about 0.1, and
repeating one good byte scores little, because only distinct n-grams count.
"""

import pathlib
import pydoc_data.topics
from typing import Protocol

import grain
import jax
import numpy as np
import tokenizers

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.rollouts import RolloutGroup
from lstraw_jax.sampling import SamplingConfig, sample, to_rollouts
from lstraw_jax.train_step import Request

_NGRAMS = (1, 2)


class Tokenizer(Protocol):
  """Text to ids and back."""

  def encode(self, text: str) -> np.ndarray:
    """Returns the token ids of a text."""
    ...

  def decode(self, tokens: np.ndarray) -> bytes:
    """Returns the text of some token ids, as bytes."""
    ...


class ByteTokenizer:
  """Every byte is a token. An id above 255 decodes to nothing."""

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, tokens: np.ndarray) -> bytes:
    return bytes(token for token in tokens.tolist() if token < 256)


class FileTokenizer:
  """The tokenizer of a checkpoint, from its `tokenizer.json`."""

  def __init__(self, path: pathlib.Path):
    self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

  def encode(self, text: str) -> np.ndarray:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, tokens: np.ndarray) -> bytes:
    return self._tokenizer.decode(tokens.tolist()).encode()


def load_tokenizer(checkpoint: str) -> Tokenizer:
  """Returns the checkpoint's tokenizer, or bytes where it has none."""
  path = pathlib.Path(checkpoint, "tokenizer.json")
  if checkpoint and path.exists():
    return FileTokenizer(path)
  return ByteTokenizer()


def prompts(
    tokenizer: Tokenizer, *, prompt_tokens: int, vocab_size: int, seed: int
) -> grain.MapDataset:
  """Returns an endless, shuffled, random-access sequence of prompts [P].

  Raises:
    ValueError: if the text is shorter than a prompt, or has ids that the model
      does not know.
  """
  topics = pydoc_data.topics.topics
  text = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
  if not 0 < prompt_tokens < len(text):
    raise ValueError(
        f"data.prompt_tokens={prompt_tokens}: want 1..{len(text) - 1}, the"
        " length of the text in tokens"
    )
  if text.max() >= vocab_size:
    raise ValueError(
        f"model: the vocabulary has {vocab_size} ids, the text needs"
        f" {text.max() + 1}. Put the model's tokenizer.json beside its weights"
    )
  starts = grain.MapDataset.range(len(text) - prompt_tokens)
  windows = starts.shuffle(seed=seed).map(
      lambda start: text[start : start + prompt_tokens]
  )
  return windows.repeat()


def overlap_reward(prompt: bytes, response: bytes) -> float:
  """Returns the share of distinct n-grams that the prompt holds, in [0, 1]."""
  shares = []
  for n in _NGRAMS:
    count = max(len(response) - n + 1, 1)
    shares.append(len(_ngrams(response, n) & _ngrams(prompt, n)) / count)
  return float(np.mean(shares))


def request(
    prompt: np.ndarray,
    *,
    group_id: str,
    tokenizer: Tokenizer,
    group_size: int,
    sampling: SamplingConfig,
) -> Request:
  """Returns a prompt whose responses are sampled and scored online."""

  def respond(
      policy: Policy, state: PromptState, key: jax.Array
  ) -> RolloutGroup:
    samples = sample(policy, state, key, group_size=group_size, config=sampling)
    text = tokenizer.decode(prompt)
    tokens, lengths = jax.device_get((samples.tokens, samples.lengths))
    rewards = [
        overlap_reward(text, tokenizer.decode(row[:length]))
        for row, length in zip(tokens, lengths, strict=True)
    ]
    return RolloutGroup(
        group_id=group_id,
        prompt_tokens=prompt,
        rollouts=to_rollouts(samples, rewards),
    )

  return Request(prompt, respond)


def _ngrams(text: bytes, n: int) -> set[bytes]:
  return {text[i : i + n] for i in range(len(text) - n + 1)}

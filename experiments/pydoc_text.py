"""A GRPO task on real text: say what the prompt says.

Prompts are windows of the English reference text that ships with Python. The
reward is verifiable: the share of distinct n-grams of the response that occur
in the prompt, averaged over n = 1 and 2. Random bytes score about 0.1, and
repeating one good byte scores little, because only distinct n-grams count.
"""

import pydoc_data.topics
from collections.abc import Sequence

import grain
import jax
import numpy as np

from experiments.tokenizer import Tokenizer
from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import PromptState
from lstraw_jax.rollouts import RolloutGroup
from lstraw_jax.sampling import (
    Samples,
    SamplingConfig,
    sample,
    to_rollouts,
)
from lstraw_jax.train_step import Request

_NGRAMS = (1, 2)


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
    prompts: Sequence[np.ndarray],
    *,
    group_ids: Sequence[str],
    tokenizer: Tokenizer,
    group_size: int,
    sampling: SamplingConfig,
) -> Request:
  """Returns prompts whose responses are sampled and scored online."""

  def respond(
      policy: Policy, state: PromptState, keys: jax.Array
  ) -> list[RolloutGroup]:
    samples = jax.device_get(
        sample(policy, state, keys, group_size=group_size, config=sampling)
    )
    return [
        group(
            prompt, group_id, jax.tree.map(lambda x, row=row: x[row], samples)
        )
        for row, (prompt, group_id) in enumerate(
            zip(prompts, group_ids, strict=True)
        )
    ]

  def group(prompt: np.ndarray, group_id: str, samples: Samples):
    text = tokenizer.decode(prompt)
    rewards = [
        overlap_reward(text, tokenizer.decode(row[:length]))
        for row, length in zip(samples.tokens, samples.lengths, strict=True)
    ]
    return RolloutGroup(
        group_id=group_id,
        prompt_tokens=prompt,
        rollouts=to_rollouts(samples, rewards),
    )

  return Request(tuple(prompts), respond)


def _ngrams(text: bytes, n: int) -> set[bytes]:
  return {text[i : i + n] for i in range(len(text) - n + 1)}

"""The sequences of each step: from a file, or windows of text."""

from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np

from experiments import pydoc_text
from experiments.fit_check import Extent
from experiments.run_settings import RunSettings
from experiments.tokenizer import load_tokenizer
from experiments.turns import turns
from lstraw_jax.sequence_reader import read_sequences
from lstraw_jax.sequences import TokenSequence, with_loss_everywhere


class Sequences(NamedTuple):
  """The turns of each step."""

  at: Callable[[int], list[list[TokenSequence]]]  # data position -> one step's
  extent: Extent  # of the longest

  def __call__(self, position: int) -> list[list[TokenSequence]]:
    return self.at(position)


def make_sequences(config: Any, settings: RunSettings) -> Sequences:
  """Returns the sequences of each step, by position in the endless data.

  What stands at a position depends on the seed alone, so that all processes
  have the same data.
  """
  data: Any  # of grain, which allows that an element is None
  if config.data.sequences:
    found = read_sequences(
        config.data.sequences,
        vocab_size=settings.model.vocab_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    longest = max(sequence.tokens.size for sequence in found)
    data = grain.MapDataset.source(found).shuffle(seed=config.seed).repeat()
  else:
    longest = config.data.prompt_tokens
    windows = pydoc_text.prompts(
        load_tokenizer(config.model.checkpoint),
        prompt_tokens=config.data.prompt_tokens,
        vocab_size=settings.model.vocab_size,
        seed=config.seed,
    )
    data = windows.map(lambda text: with_loss_everywhere(np.asarray(text)))
  at = lambda position: [
      [data[place] for place in turn]
      for turn in turns(config, settings.mesh, position)
  ]
  return Sequences(at, Extent(longest, response_tokens=0, group_size=0))

"""Sequences with a loss on some of their tokens: the host type."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSequence:
  """A sequence to train on, on the host."""

  tokens: np.ndarray  # [T] int32, T >= 2
  loss_mask: np.ndarray  # [T] bool; False on the first: nothing predicts it

  def __post_init__(self):
    if self.tokens.ndim != 1 or self.loss_mask.shape != self.tokens.shape:
      raise ValueError(
          f"loss_mask.shape={self.loss_mask.shape}: wanted"
          f" {self.tokens.shape[:1]}, one element per token"
      )
    if self.loss_mask[:1].any() or not self.loss_mask.any():
      raise ValueError(
          f"loss_mask: got {int(self.loss_mask.sum())} tokens that carry loss,"
          " wanted at least one, and not the first, since nothing predicts it"
      )


def with_loss_everywhere(tokens: np.ndarray) -> TokenSequence:
  """Returns a sequence whose every token but the first carries loss."""
  return TokenSequence(tokens=tokens, loss_mask=np.arange(len(tokens)) > 0)

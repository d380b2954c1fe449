"""Refresh: when the prompts of a turn are captured again.

    every_step   always: no state outlives its turn
    every_n      when the state would serve its n-th step after the capture
    adaptive     when its estimated drift exceeds a limit, and at the latest as
                 under every_n

At each new capture under "adaptive" the old state's true drift is known for
the price of two scores. Its ratio to the estimate corrects the estimates that
follow, and both numbers are told.
"""

import dataclasses
import math
from typing import Literal, get_args

Rule = Literal["every_step", "every_n", "adaptive"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshConfig:
  """When to capture again, and what is kept until then."""

  rule: Rule = "every_step"
  every_n: int = 8  # steps that a state serves at most, that of its capture too
  limit_nats: float = 0.05  # of drift: mean |change of log-prob| a token
  witness_tokens: int = 2048  # of each prompt, for the estimate
  keep_prompts: int = 1  # states kept, for each replica; the oldest goes

  def __post_init__(self):
    if self.rule not in get_args(Rule):
      raise ValueError(
          f"refresh.rule={self.rule!r}: want one of {', '.join(get_args(Rule))}"
      )
    for name in ("every_n", "witness_tokens", "keep_prompts"):
      if getattr(self, name) < 1:
        raise ValueError(
            f"refresh.{name}={getattr(self, name)}: want at least 1"
        )
    if not (math.isfinite(self.limit_nats) and self.limit_nats > 0):
      raise ValueError(
          f"refresh.limit_nats={self.limit_nats}: want a finite number above 0"
      )

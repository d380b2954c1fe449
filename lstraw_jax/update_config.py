"""The settings of an update of GRPO."""

import dataclasses
from typing import Literal, get_args

from lstraw_jax.capture import TapeConfig
from lstraw_jax.prompt_state import MemoryKind
from lstraw_jax.refresh import RefreshConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.state_cotangent import CotangentDtype, check_dtype

PromptGradient = Literal["dropped", "exact"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig:
  """Settings of an update.

  `prompt_gradient` says what becomes of the gradient through the prompt state:
  "dropped" leaves it out, as the paper does; "exact" is the gradient of the
  whole sequences. It has no default.

  `old_log_probs` says whose log-probs the ratio is taken against: "policy",
  those of the policy itself at this step (the ratio is then 1), or "rollouts",
  those stored with the responses.
  """

  prompt_gradient: PromptGradient
  replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
  tape: TapeConfig = dataclasses.field(default_factory=TapeConfig)
  cotangent_dtype: CotangentDtype = "float32"  # of its sums over slots
  capture_chunk_tokens: int = 2048
  response_multiple: int = 128
  normalize_std: bool = True
  old_log_probs: Literal["policy", "rollouts"] = "policy"
  memory_kind: MemoryKind = "device"  # of the prompts' keys and values
  refresh: RefreshConfig = dataclasses.field(default_factory=RefreshConfig)

  def __post_init__(self):
    if self.prompt_gradient not in get_args(PromptGradient):
      raise ValueError(
          f"prompt_gradient={self.prompt_gradient!r}: want 'dropped' or 'exact'"
      )
    if self.prompt_gradient == "exact" and self.refresh.rule != "every_step":
      raise ValueError(
          f"refresh.rule={self.refresh.rule!r}: want 'every_step' with"
          " prompt_gradient='exact', since the gradient through a state of past"
          " weights is that of no loss. Or set prompt_gradient='dropped'"
      )
    check_dtype(self.cotangent_dtype)
    for name in ("capture_chunk_tokens", "response_multiple"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")
    if self.old_log_probs not in ("policy", "rollouts"):
      raise ValueError(
          f"old_log_probs={self.old_log_probs!r}: want 'policy' or 'rollouts'"
      )

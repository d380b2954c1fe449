"""The optimizer: AdamW on the trained weights, by optax."""

import dataclasses

import jax
import optax
from flax import nnx

from lstraw_jax.prompt_state import MemoryKind
from modeling.parameter import STACK_AXIS
from modeling.sharding import names


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Settings of AdamW with linear warm-up and global-norm clipping.

  Weight decay acts on matrices only: not on norms, gates or decay rates.
  """

  learning_rate: float
  warmup_steps: int = 0
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  memory_kind: MemoryKind = "device"  # of the moments, between steps

  def __post_init__(self):
    for name in ("learning_rate", "warmup_steps", "weight_decay"):
      value = getattr(self, name)
      if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value}: want a finite number >= 0")
    for name in ("eps", "max_grad_norm"):
      value = getattr(self, name)
      if not value > 0:
        raise ValueError(f"{name}={value}: want a number above 0")
    for name in ("beta1", "beta2"):
      value = getattr(self, name)
      if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: want a number in [0, 1)")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns the transformation from mean gradients to updates."""
  rate = config.learning_rate
  if config.warmup_steps:
    rate = optax.linear_schedule(
        rate / config.warmup_steps, rate, max(config.warmup_steps - 1, 1)
    )
  return optax.chain(
      optax.clip_by_global_norm(config.max_grad_norm),
      optax.adamw(
          rate,
          b1=config.beta1,
          b2=config.beta2,
          eps=config.eps,
          weight_decay=config.weight_decay,
          mask=_is_matrix,
      ),
  )


def _is_matrix(weights: nnx.State):
  """Tells for each weight whether it is a matrix in each layer."""

  def has_two_axes(variable: nnx.Variable) -> bool:
    return sum(axis != STACK_AXIS for axis in names(variable)) > 1

  return jax.tree.map(
      has_two_axes, weights, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )

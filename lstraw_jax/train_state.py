"""The state of training, and the optimizer step that advances it."""

import dataclasses
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lstraw_jax.policy import Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """All that an update reads and writes."""

  policy: Policy
  opt_state: optax.OptState  # of the trained weights alone
  step: jax.Array  # [] int32: optimizer steps taken
  key: jax.Array  # random key of the run; step and prompt are folded in
  reference: nnx.State | None  # trained weights of the reference, for the KL


def make_train_state(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    with_reference: bool,
) -> TrainState:
  """Returns the state before the first update.

  Args:
    policy: the weights to train.
    optimizer: of the updates to come.
    seed: of all random choices of the run.
    with_reference: keep a copy of the trained weights as they are now, for a
      KL penalty; with adapters that copy is small.
  """
  reference = None
  if with_reference:
    reference = jax.tree.map(jnp.copy, policy.trainable)
  return TrainState(
      policy=policy,
      opt_state=optimizer.init(policy.trainable),
      step=jnp.zeros((), jnp.int32),
      key=jax.random.key(seed),
      reference=reference,
  )


class Applied(NamedTuple):
  """Result of an optimizer step."""

  trainable: nnx.State
  opt_state: optax.OptState
  grad_norm: jax.Array  # [] of the mean gradient, before clipping


@partial(
    jax.jit,
    static_argnames="optimizer",
    donate_argnames=("trainable", "opt_state"),
)
def apply_gradients(
    trainable: nnx.State,
    opt_state: optax.OptState,
    gradients: nnx.State,
    denominator: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
) -> Applied:
  """Divides the summed gradients and takes one optimizer step.

  The weights and the optimizer state are consumed.
  """
  gradients = jax.tree.map(lambda g: g / denominator.astype(g.dtype), gradients)
  grad_norm = optax.tree.norm(gradients)
  gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, trainable)
  with jax.numpy_dtype_promotion("standard"):  # optax mixes steps and floats
    updates, opt_state = optimizer.update(gradients, opt_state, trainable)
  trainable = cast(nnx.State, optax.apply_updates(trainable, updates))
  return Applied(trainable, opt_state, grad_norm)

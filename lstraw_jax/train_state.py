"""The state of training, and the optimizer step that advances it."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lstraw_jax.policy import Policy
from lstraw_jax.prompt_state import MemoryKind, check_memory_kind
from modeling.sharding import shardings, to_mesh
from pallas_kernels.staging import stage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """All that an update reads and writes.

  The optimizer's moments and the reference lie on the mesh as their weights do;
  step and key are whole on every device, so that every process can read them.
  """

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
    memory_kind: MemoryKind = "device",
) -> TrainState:
  """Returns the state before the first update.

  Args:
    policy: the weights to train.
    optimizer: of the updates to come.
    seed: of all random choices of the run.
    with_reference: keep a copy of the trained weights as they are now, for a
      KL penalty; with adapters that copy is small.
    memory_kind: where the optimizer's moments lie between its steps.

  Raises:
    ValueError: if the backend has no such memory.
  """
  check_memory_kind(memory_kind, policy.mesh)

  def make(trainable: nnx.State) -> dict[str, Any]:
    return {
        "opt_state": optimizer.init(trainable),
        "step": jnp.zeros((), jnp.int32),
        "key": jax.random.key(seed),
        "reference": jax.tree.map(jnp.copy, trainable)
        if with_reference
        else None,
    }

  shapes = jax.eval_shape(make, policy.trainable)
  layout = shardings(shapes, policy.mesh)
  layout["opt_state"] = moments_in(
      memory_kind, shapes["opt_state"], layout["opt_state"]
  )
  made = jax.jit(make, out_shardings=layout)(policy.trainable)
  return TrainState(policy=policy, **made)


def moments_in(memory_kind: MemoryKind, shapes: Any, layout: Any) -> Any:
  """Returns a layout of an optimizer's state with its moments in a memory.

  Its counters stay on the device.
  """
  return jax.tree.map(
      lambda x, where: where.with_memory_kind(memory_kind) if x.ndim else where,
      shapes,
      layout,
  )


def advance(
    state: TrainState,
    gradients: nnx.State,
    denominator: int,
    *,
    optimizer: optax.GradientTransformation,
    loss: float,
) -> tuple[TrainState, float]:
  """Ends an update: takes its optimizer step.

  Args:
    state: the training state; its trained weights are consumed.
    gradients: summed over the update.
    denominator: what the sums are divided by.
    optimizer: the one that `state` was made with.
    loss: of the update, to be told if something is wrong.

  Returns:
    The state one step on, and the norm of the mean gradient before clipping.

  Raises:
    FloatingPointError: if the gradient is not finite; `state` is then lost.
  """
  policy = state.policy
  applied = apply_gradients(
      policy.trainable,
      state.opt_state,
      gradients,
      to_mesh(np.int32(denominator), policy.mesh),
      optimizer=optimizer,
  )
  grad_norm = float(applied.grad_norm)
  if not np.isfinite(grad_norm):
    raise FloatingPointError(
        f"step {int(state.step)}: the gradient norm is {grad_norm} and the loss"
        f" {loss}; nothing was saved. Resume from the last checkpoint with a"
        " smaller learning rate"
    )
  state = dataclasses.replace(
      state,
      policy=policy.replace(trainable=applied.trainable),
      opt_state=applied.opt_state,
      step=state.step + 1,
  )
  return state, grad_norm


class Applied(NamedTuple):
  """Result of an optimizer step."""

  trainable: nnx.State
  opt_state: optax.OptState
  grad_norm: jax.Array  # [] of the mean gradient, before clipping


def apply_gradients(
    trainable: nnx.State,
    opt_state: optax.OptState,
    gradients: nnx.State,
    denominator: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
) -> Applied:
  """Divides the summed gradients and takes one optimizer step.

  The weights and the optimizer state are consumed; the new ones lie where they
  lay, in the same buffers.
  """
  program = optimizer_program(optimizer, trainable, opt_state)
  return program(trainable, opt_state, gradients, denominator)


def optimizer_program(
    optimizer: optax.GradientTransformation,
    trainable: nnx.State,
    opt_state: optax.OptState,
) -> Any:
  """Returns the jitted step for weights and a state that lie where these do.

  Its arguments are those of `apply_gradients`, but the optimizer; arrays may be
  given as shapes.
  """
  consumed = trainable, opt_state
  layouts = jax.tree.map(lambda leaf: leaf.sharding, consumed)
  leaves, structure = jax.tree.flatten(layouts)
  return _program(optimizer, structure, tuple(leaves))


@functools.cache
def _program(optimizer, structure, layouts) -> Any:
  """Returns the step for this layout; left to itself, jit may change it."""
  trainable, opt_state = jax.tree.unflatten(structure, layouts)
  anywhere: Any = None
  return jax.jit(
      functools.partial(_apply_gradients, optimizer),
      donate_argnums=(0, 1),
      out_shardings=Applied(trainable, opt_state, anywhere),
  )


def _apply_gradients(
    optimizer, trainable, opt_state, gradients, denominator
) -> Applied:
  opt_state = stage(opt_state)
  gradients = jax.tree.map(lambda g: g / denominator.astype(g.dtype), gradients)
  grad_norm = optax.tree.norm(gradients)
  gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, trainable)
  with jax.numpy_dtype_promotion("standard"):  # optax mixes steps and floats
    updates, opt_state = optimizer.update(gradients, opt_state, trainable)
  trainable = cast(nnx.State, optax.apply_updates(trainable, updates))
  return Applied(trainable, opt_state, grad_norm)

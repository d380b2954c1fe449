"""The programs of an update, lowered from shapes: no array is ever made.

What comes out is the very function that training calls, on a mesh whose devices
may be absent. Layouts are those that the compiler gives to the programs which
make the arguments, so that they too are those of training.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.capture import capture_chunk
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.policy import Policy, make_policy
from lstraw_jax.prompt_gradient import Labels, pull_back_chunk
from lstraw_jax.prompt_state import PromptState, empty_prompt_state
from lstraw_jax.replay import replay
from lstraw_jax.rollouts import BranchBatch
from lstraw_jax.scoring import score
from lstraw_jax.state_cotangent import StateCotangent, zero_cotangent
from lstraw_jax.train_state import moments_in, optimizer_program
from modeling.models import abstract_model
from modeling.sharding import sharding, shardings
from pallas_kernels.shapes import wide_dtype


class StagePrograms:
  """Lowers each stage of an update for a mesh."""

  def __init__(self, workload: Workload, mesh: Mesh):
    """Lowers nothing yet.

    Args:
      workload: the sizes.
      mesh: of these sizes; its devices may be those of a topology that is not
        there.
    """
    sizes = dict(
        data=workload.data, context=workload.context, tensor=workload.tensor
    )
    assert dict(mesh.shape) == sizes, (mesh.shape, sizes)
    self.workload = workload
    self.mesh = mesh

  def lower(self, stage: str) -> jax.stages.Lowered:
    """Lowers one of `STAGES`.

    Raises:
      ValueError: for another name, or a stage that the workload has not.
    """
    check_stage(stage, self.workload)
    return _LOWER[stage](self)

  @cached_property
  def policy(self) -> Policy:
    """The weights."""
    model = abstract_model(self.workload.model, mesh=self.mesh)
    return self._laid_out(make_policy(model))

  @cached_property
  def opt_state(self) -> optax.OptState:
    """The optimizer's state."""
    config = self.workload.optimizer
    init = make_optimizer(config).init
    shapes = jax.eval_shape(init, self.policy.trainable)
    layout = shardings(shapes, self.mesh)
    where = moments_in(config.memory_kind, shapes, layout)
    return jax.tree.map(_placed, shapes, where)

  @cached_property
  def prompt(self) -> PromptState:
    """The state of a full prompt."""
    return returned_by(
        empty_prompt_state,
        self.workload.model,
        mesh=self.mesh,
        capacity=self.workload.capacity,
        chunk_tokens=self.workload.chunk_tokens,
        batch=self.workload.data,
        memory_kind=self.workload.update.memory_kind,
    )

  @cached_property
  def gradients(self) -> nnx.State:
    """The sums of gradients."""
    return returned_by(zero_gradients, self.policy)

  @cached_property
  def cotangent(self) -> StateCotangent:
    """The sums on the prompt's state."""
    return returned_by(
        zero_cotangent,
        self.policy,
        self.prompt,
        dtype=self.workload.update.cotangent_dtype,
    )

  @property
  def branches(self) -> BranchBatch:
    """A group for each replica."""
    workload = self.workload
    group = (workload.data, workload.group_size)
    tokens = partial(self._whole, (*group, workload.response_slots))
    stored = workload.update.old_log_probs == "rollouts"
    return BranchBatch(
        inputs=tokens(jnp.int32),
        targets=tokens(jnp.int32),
        valid=tokens(jnp.bool),
        loss_mask=tokens(jnp.bool),
        old_log_probs=tokens(jnp.float32) if stored else None,
        ref_log_probs=tokens(jnp.float32) if workload.with_kl else None,
        advantages=self._whole(group, jnp.float32),
    )

  def _capture(self):
    ends = self._whole((self.workload.data,), jnp.int32)
    return capture_chunk.lower(self.policy, self.prompt, *self._chunk(), ends)

  def _score(self):
    config = self.workload.update.replay
    return score.lower(
        self.policy,
        self.prompt,
        self.branches,
        temperature=config.temperature,
        block_tokens=config.block_tokens,
        head_chunk_tokens=config.head_chunk_tokens,
    )

  def _replay(self):
    return replay.lower(
        self.policy,
        self.prompt,
        self.branches,
        self.gradients,
        self.cotangent if self.workload.exact else None,
        config=self.workload.update.replay,
    )

  def _prompt_gradient(self):
    labels, head_chunk_tokens = None, 0
    wide = wide_dtype(self.workload.model.dtype)
    if self.workload.supervised:
      tokens = (self.workload.data, self.workload.chunk_tokens)
      labels = Labels(self._whole(tokens, jnp.int32), self._whole(tokens, wide))
      head_chunk_tokens = self.workload.update.replay.head_chunk_tokens
    total = self._whole((), wide)
    return pull_back_chunk.lower(
        self.policy,
        self.prompt,
        self.prompt.recurrent,
        *self._chunk(),
        labels,
        self.gradients,
        self.cotangent,
        total,
        head_chunk_tokens=head_chunk_tokens,
    )

  def _optimizer(self):
    program = optimizer_program(
        make_optimizer(self.workload.optimizer),
        self.policy.trainable,
        self.opt_state,
    )
    return program.lower(
        self.policy.trainable,
        self.opt_state,
        self.gradients,
        self._whole((), jnp.int32),
    )

  def _chunk(self):
    tokens = (self.workload.data, self.workload.chunk_tokens)
    return self._whole(tokens, jnp.int32), self._whole((), jnp.int32)

  def _whole(self, shape, dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(self.mesh, ()))

  def _laid_out(self, tree: Any) -> Any:
    return jax.tree.map(_placed, tree, shardings(tree, self.mesh))


# In the order that an update runs them.
_LOWER: Mapping[str, Callable[[StagePrograms], jax.stages.Lowered]] = {
    "capture": StagePrograms._capture,
    "score": StagePrograms._score,
    "replay": StagePrograms._replay,
    "prompt_gradient": StagePrograms._prompt_gradient,
    "optimizer": StagePrograms._optimizer,
}
STAGES = tuple(_LOWER)


def stages_of(workload: Workload) -> tuple[str, ...]:
  """Returns the stages that an update has."""
  left_out: set[str] = set()
  if not workload.exact:
    left_out.add("prompt_gradient")
  if workload.supervised:
    left_out |= {"score", "replay"}
  return tuple(stage for stage in STAGES if stage not in left_out)


def check_stage(stage: str, workload: Workload) -> None:
  """Raises ValueError for a stage that an update has not."""
  if stage not in STAGES:
    raise ValueError(f"stage={stage!r}: want one of {', '.join(STAGES)}, all")
  if stage not in stages_of(workload):
    raise ValueError(
        f"stage={stage!r}: this update has none, only"
        f" {', '.join(stages_of(workload))}"
    )


def returned_by(program: Any, *args: Any, **kwargs: Any) -> Any:
  """Returns the shapes of what a jitted function returns, and their layout."""
  lowered = program.lower(*args, **kwargs)
  where = lowered.compile().output_shardings
  return jax.tree.map(_placed, lowered.out_info, where)


def _placed(shape, where):
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

"""The conventional update: G whole sequences as one batch in one graph.

Layers are rematerialised; nothing of the prompt is shared. This is what capture
and replay are measured against.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.log_probs import token_log_probs
from lstraw_jax.objectives import grpo_token_losses, token_weights
from lstraw_jax.policy import Policy
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.rollouts import BranchBatch
from modeling.layer_state import empty_recurrent


@partial(jax.jit, static_argnames="config")
def whole_sequences(
    policy: Policy,
    prompt_tokens: jax.Array,
    branches: BranchBatch,
    *,
    config: ReplayConfig,
) -> nnx.State:
  """Returns the unnormalised gradient of a group.

  Args:
    policy: the weights.
    prompt_tokens: [P].
    branches: the responses, leaves [1, G, R].
    config: settings of the loss.
  """
  branches = jax.tree.map(lambda x: x[0], branches)
  rows, steps = branches.inputs.shape
  held = prompt_tokens.size - 1
  before = jnp.broadcast_to(prompt_tokens[:-1], (rows, held))
  tokens = jnp.concatenate([before, branches.inputs], axis=1)
  positions = jnp.arange(held + steps, dtype=jnp.int32)[None]
  valid = jnp.pad(branches.valid, ((0, 0), (held, 0)), constant_values=True)
  weights = token_weights(
      branches.loss_mask,
      aggregation=config.objective.aggregation,
      dtype=jnp.float32,
  )

  def loss(trainable):
    model = policy.replace(trainable=trainable).model
    hidden, _ = model(
        tokens,
        positions_BT=jnp.where(valid, positions, -1),
        prefixes=(),
        recurrent=empty_recurrent(policy.config, mesh=policy.mesh, batch=rows),
    )
    scores = token_log_probs(
        model,
        hidden[:, held:],
        branches.targets,
        branches.loss_mask,
        temperature=config.temperature,
        chunk_tokens=config.head_chunk_tokens,
    )
    losses = grpo_token_losses(
        scores.log_probs,
        jax.lax.stop_gradient(scores.log_probs),
        None,
        advantages=branches.advantages,
        loss_mask=branches.loss_mask,
        config=config.objective,
    )
    return (weights * losses.loss).sum()

  return jax.grad(loss)(policy.trainable)

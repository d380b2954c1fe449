"""Where the state of training lies, and that a step leaves it there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lstraw_jax.optimizer import OptimizerConfig, make_optimizer
from lstraw_jax.train_state import apply_gradients, make_train_state
from modeling.sharding import make_mesh, shardings
from tests import tiny

OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.1))
CONFIG = tiny.config("tiny-moe", dtype="float32", num_hidden_layers=3)
MESH = dict(data=2, context=2, tensor=2)


def make_state(*, memory_kind="device", **mesh):
  policy = tiny.policy(CONFIG, mesh=make_mesh(**mesh))
  return make_train_state(
      tiny.fresh(policy),
      OPTIMIZER,
      seed=3,
      with_reference=True,
      memory_kind=memory_kind,
  )


def step(state):
  """Takes a step along the same gradients on every mesh, wherever they lie."""
  mesh = state.policy.mesh
  draw = lambda w: np.random.default_rng(w.size).normal(size=w.shape)
  return apply_gradients(
      state.policy.trainable,
      state.opt_state,
      jax.tree.map(
          lambda w: jax.device_put(draw(w).astype(w.dtype), whole(mesh)),
          state.policy.trainable,
      ),
      jax.device_put(jnp.int32(2), whole(mesh)),
      optimizer=OPTIMIZER,
  )


def whole(mesh):
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def moments(opt_state) -> dict:
  """Returns Adam's two sums, each like the weights."""
  _, (adam, *_) = opt_state
  return {"mu": adam.mu, "nu": adam.nu}


def expect_layout(tree, mesh):
  for leaf, layout in zip(
      jax.tree.leaves(tree),
      jax.tree.leaves(shardings(tree, mesh)),
      strict=True,
  ):
    assert leaf.sharding == layout, (leaf.shape, leaf.sharding, layout)


def pointers(tree):
  return [
      shard.data.unsafe_buffer_pointer()
      for leaf in jax.tree.leaves(tree)
      for shard in leaf.addressable_shards
  ]


def test_the_optimizer_state_lies_as_its_weights_before_and_after_a_step():
  mesh = make_mesh(**MESH)
  state = make_state(**MESH)
  for tree in (*moments(state.opt_state).values(), state.reference):
    expect_layout(tree, mesh)
    weights = jax.tree.leaves(state.policy.trainable)
    for leaf, weight in zip(jax.tree.leaves(tree), weights, strict=True):
      assert leaf.sharding == weight.sharding
  assert state.step.sharding == state.key.sharding == whole(mesh)

  before = pointers((state.policy.trainable, moments(state.opt_state)))
  applied = step(state)
  expect_layout(applied.trainable, mesh)
  for tree in moments(applied.opt_state).values():
    expect_layout(tree, mesh)
  # Every buffer is used again: the state is never live twice.
  after = pointers((applied.trainable, moments(applied.opt_state)))
  assert set(before) == set(after)


def test_a_step_is_the_same_on_every_mesh():
  one, many = (step(make_state(**mesh)) for mesh in ({}, MESH))
  for name in ("trainable", "grad_norm"):
    got, wanted = getattr(many, name), getattr(one, name)
    assert tiny.largest_difference(got, wanted) < 1e-6


def test_no_device_holds_more_than_its_part_of_the_matrices():
  state = make_state(**MESH)
  for tree in (state.policy.trainable, *moments(state.opt_state).values()):
    whole_size = sum(leaf.size for leaf in jax.tree.leaves(tree))
    held = sum(
        leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree)
    )
    assert held < whole_size / 8 * 1.1


def test_moments_in_host_memory_give_the_same_bits_and_stay_there():
  found = {}
  for kind in ("device", "pinned_host"):
    state = make_state(memory_kind=kind, **MESH)
    applied = step(state)
    kinds = {
        x.sharding.memory_kind
        for x in jax.tree.leaves(moments(applied.opt_state))
    }
    assert kinds == {kind}
    found[kind] = jax.device_get((applied.trainable, applied.opt_state))
  for here, there in zip(*map(jax.tree.leaves, found.values()), strict=True):
    assert np.array_equal(here, there)


def test_a_memory_that_no_device_has_is_refused():
  with pytest.raises(ValueError, match=r"memory_kind='disk'.*want one of"):
    make_state(memory_kind="disk")

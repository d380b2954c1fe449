"""What is trained and what is not."""

import jax
import pytest
from flax import nnx

from lstraw_jax.policy import make_policy
from modeling.models import abstract_model, parameter_count
from tests import tiny

ADAPTED = tiny.config(dtype="float32", lora=tiny.ALL_ADAPTERS)
LORA_NAMES = {"lora_a", "lora_b"}


def names(state: nnx.State) -> set[str]:
  """Returns the last name of every weight."""
  return {path[-1] for path, _ in nnx.to_flat_state(state)}


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_without_adapters_every_weight_is_trained(name):
  policy = make_policy(abstract_model(tiny.config(name, dtype="float32")))
  assert not jax.tree.leaves(policy.frozen)
  sizes = [leaf.size for leaf in jax.tree.leaves(policy.trainable)]
  assert sum(sizes) == parameter_count(policy.config)


def test_with_adapters_these_alone_are_trained():
  policy = make_policy(abstract_model(ADAPTED))
  assert names(policy.trainable) == LORA_NAMES
  assert not names(policy.frozen) & LORA_NAMES
  sizes = [leaf.size for leaf in jax.tree.leaves(policy.frozen)]
  assert sum(sizes) == parameter_count(ADAPTED)


def test_the_model_of_a_policy_has_the_very_arrays_it_was_made_of():
  model = tiny.policy(ADAPTED).model
  policy = make_policy(model)
  ours = jax.tree.leaves(policy.model)
  assert len(ours) == len(jax.tree.leaves(model))
  assert all(a is b for a, b in zip(ours, jax.tree.leaves(model), strict=True))
  assert policy.config == model.config


def test_replace_changes_the_trained_weights_alone():
  policy = make_policy(abstract_model(ADAPTED))
  halved = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, "float16"), policy.trainable
  )
  changed = policy.replace(trainable=halved)
  assert changed.trainable is halved
  assert changed.frozen is policy.frozen
  assert changed.graphdef is policy.graphdef


def test_a_policy_crosses_a_jit_boundary_as_a_pytree():
  policy = make_policy(abstract_model(ADAPTED))
  leaves, treedef = jax.tree.flatten(policy)
  assert jax.tree.unflatten(treedef, leaves).graphdef == policy.graphdef
  hash(treedef)  # jit looks its programs up by it

"""Where arrays lie on a mesh, by the names of their axes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from modeling import sharding
from modeling.mesh_fit import check_mesh
from modeling.models import abstract_model
from modeling.parameter import param
from modeling.presets import preset
from modeling.sharding import MeshConfig, make_mesh
from tests.programs import buffers_with


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 1, 1)),
        (dict(context=8), (1, 8, 1)),
        (dict(data=2, context=2), (2, 2, 1)),  # four devices stay idle
        (dict(data=2, context="auto", tensor=2), (2, 2, 2)),
        (dict(tensor="auto"), (1, 1, 8)),
    ],
)
def test_a_mesh_has_the_sizes_asked_for(sizes, shape):
  mesh = MeshConfig(**sizes).make()
  assert mesh.axis_names == ("data", "context", "tensor")
  assert mesh.devices.shape == shape
  types = {jax.sharding.AxisType.Auto}
  assert set(mesh.axis_types) == types


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=0), "mesh.data=0: want an integer >= 1, or 'auto'"),
        (dict(tensor=2.0), "mesh.tensor=2.0"),
        (dict(context=True), "mesh.context=True"),
        (dict(context="all"), "mesh.context='all'"),
        (dict(data="auto", tensor="auto"), "only one axis can be 'auto'"),
        (dict(context=9), r"context=9 x tensor=1 is 9 devices, .* are 8;"),
        (dict(data=3, tensor="auto"), r"data=3 .* tensor=2 is 6 devices"),
        (dict(data=16, tensor="auto"), r"tensor=1 is 16 devices, .* are 8;"),
    ],
)
def test_an_impossible_mesh_is_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    MeshConfig(**sizes).make()


def test_neighbours_of_the_tensor_axis_are_neighbours():
  ids = np.vectorize(lambda device: device.id)(
      make_mesh(data=2, tensor=4).devices
  )
  assert ids.reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_names_become_mesh_axes():
  spec = sharding.spec(("layers", "batch", "time", "heads", None))
  assert spec == PartitionSpec(None, "data", "context", "tensor", None)
  weight = sharding.spec(("embed", "mlp"))
  assert weight == PartitionSpec(("data", "context"), "tensor")


def test_a_name_without_a_rule_is_refused_with_those_that_have_one():
  with pytest.raises(ValueError, match=r"'hedas' has no rule.*, heads, "):
    sharding.spec(("batch", "hedas"))
  with pytest.raises(ValueError, match="'columns' has no rule"):
    param(jnp.zeros((2, 2)), ("embed", "columns"))


@pytest.mark.parametrize(
    "axes",
    [
        ("time", "slots"),
        ("embed", "batch"),
        ("heads", "mlp"),
        ("vocab", "embed"),
    ],
)
def test_two_axes_on_one_mesh_axis_are_refused(axes):
  with pytest.raises(ValueError, match="each may be used once"):
    sharding.spec(axes)


def test_each_leaf_lies_by_its_names_and_others_are_whole():
  mesh = make_mesh(data=2, context=2, tensor=2)
  tree = {"w": param(jnp.zeros((8, 4)), ("embed", "mlp")), "step": 1}
  found = sharding.shardings(tree, mesh)
  assert found["w"].get_value().shard_shape((8, 4)) == (2, 2)
  assert found["step"].is_fully_replicated


def test_what_the_mesh_does_not_divide_is_named():
  mesh = make_mesh(context=3, tensor=2)
  tree = {
      "a": {"kernel": param(jnp.zeros((8, 5)), ("embed", "mlp"))},
      "b": param(jnp.zeros((4, 6)), ("layers", "mlp")),
  }
  with pytest.raises(ValueError) as error:
    sharding.check_fits(tree, mesh)
  assert str(error.value).splitlines() == [
      "mesh={'data': 1, 'context': 3, 'tensor': 2} does not fit the model:",
      "  a.kernel[8, 5]: its axis 'embed' of 8 does not divide over 3 devices"
      " of data x context",
      "  a.kernel[8, 5]: its axis 'mlp' of 5 does not divide over 2 devices of"
      " tensor",
      "Choose smaller mesh.data, mesh.context or mesh.tensor",
  ]
  many = {str(i): param(jnp.zeros((5,)), ("mlp",)) for i in range(9)}
  with pytest.raises(ValueError, match=r"\n  and 4 more\n"):
    sharding.check_fits(many, mesh)
  sharding.check_fits(tree, make_mesh(context=4))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "qwen3.6-27b",
            dict(tensor=8),
            "mesh.tensor=8: want a divisor of 4, so that no head is cut; it"
            " does not divide num_key_value_heads=4$",
        ),
        ("tiny-moe", dict(context=4, tensor=2), None),
        ("tiny-moe", dict(context=5), "axis 'experts' of 8 does not divide"),
        ("tiny", dict(data=3), "axis 'embed' of 64 does not divide over 3"),
        ("qwen3.6-35b-a3b", dict(data=2, context=2, tensor=2), None),
    ],
)
def test_a_mesh_fits_a_model_or_says_why_not(name, sizes, message):
  mesh = make_mesh(**sizes)
  if message is None:
    check_mesh(preset(name), mesh)
    return
  with pytest.raises(ValueError, match=message):
    check_mesh(preset(name), mesh)


def test_a_gathered_weight_s_gradient_is_cut_as_the_weight_is(x64):
  mesh = make_mesh(data=2, context=2, tensor=2)
  axes = ("embed", "mlp")
  rng = np.random.default_rng(0)
  weight = jax.device_put(
      rng.normal(size=(8, 12)), sharding.sharding(mesh, axes)
  )
  x = jax.device_put(
      rng.normal(size=(4, 6, 8)),
      sharding.sharding(mesh, ("batch", "time", None)),
  )

  @jax.jit
  def gradient(weight, x):
    loss = lambda w: (jnp.tanh(x @ sharding.gather(w, mesh, axes)) ** 2).sum()
    return jax.grad(loss)(weight)

  compiled = gradient.lower(weight, x).compile()
  (layout,) = jax.tree.leaves(compiled.output_shardings)
  assert layout.is_equivalent_to(weight.sharding, 2)
  assert "all-gather" in compiled.as_text()
  # A device holds a weight's columns while it uses it, never all of them.
  assert buffers_with(compiled, 8, 6) and not buffers_with(compiled, 8, 12)
  wanted = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(weight)
  np.testing.assert_allclose(compiled(weight, x), wanted, rtol=1e-12)


def test_arrays_are_readable_after_replicate():
  mesh = make_mesh(data=2, context=2, tensor=2)
  x = jax.device_put(jnp.arange(8.0), sharding.sharding(mesh, ("embed",)))
  assert not x.is_fully_replicated
  assert jax.jit(lambda x: sharding.replicate(x, mesh))(x).is_fully_replicated
  assert sharding.to_mesh(np.ones(3), mesh).is_fully_replicated


def test_every_large_weight_is_cut_over_every_device():
  mesh = make_mesh(data=2, context=2, tensor=2)
  state = nnx.state(abstract_model(preset("tiny-moe"), mesh=mesh))
  large = [(p, w) for p, w in nnx.to_flat_state(state) if w.size >= 4096]
  assert len(large) > 15
  for path, weight in large:
    layout = sharding.sharding(mesh, sharding.names(weight))
    part = math.prod(layout.shard_shape(weight.shape))
    assert weight.size == mesh.size * part, path

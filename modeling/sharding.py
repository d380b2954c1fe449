"""The device mesh, and where the axes of weights, states and activations lie.

Every weight and every state carries a logical name for each of its axes, and
one table says which mesh axes hold it:

    data     other prompts; each replica has its own
    context  parts of one prompt: its tokens, its slots, its experts
    tensor   parts of a layer: heads, feed-forward columns

1. At rest a weight is cut over `data` and `context` as well (ZeRO-3), and so
   are its gradient and its optimizer state. A layer gathers it when it runs.
2. Its gradient is reduced by the transpose of that gather: correct by
   construction, on every mesh.
3. Whatever does not fit the mesh is refused before anything is traced.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "context", "tensor")
Axes = tuple[str | None, ...]  # the logical name of each axis of an array

RULES: Mapping[str, tuple[str, ...]] = {
    # activations and states
    "batch": ("data",),
    "time": ("context",),
    "slots": ("context",),
    "shards": ("context",),  # of what each shard has of its own
    "spread_heads": ("tensor", "context"),  # Gated DeltaNet by heads
    # columns of weights; also the heads of an activation
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "linear_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_mlp": ("tensor",),
    "experts": ("context",),
    "vocab": ("context", "tensor"),
    # gathered when a layer runs
    "embed": ("data", "context"),
    "expert_embed": ("data",),
    "vocab_embed": ("data",),
    # whole everywhere
    "gate": (),
    "norm": (),
    "layers": (),
}
_GATHERED = ("embed", "expert_embed", "vocab_embed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Sizes of the mesh axes; one may be "auto", which takes all devices left."""

  data: int | str = 1
  context: int | str = 1
  tensor: int | str = 1

  def __post_init__(self):
    for name in AXES:
      size = getattr(self, name)
      if size != "auto" and not (type(size) is int and size >= 1):
        raise ValueError(
            f"mesh.{name}={size!r}: want an integer >= 1, or 'auto'"
        )
    if [getattr(self, name) for name in AXES].count("auto") > 1:
      raise ValueError(f"{self}: only one axis can be 'auto'")

  def make(self, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh on the first of some devices; default: all there are.

    Raises:
      ValueError: if there are too few, or "auto" would leave some unused.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: getattr(self, name) for name in AXES}
    given = math.prod(size for size in sizes.values() if size != "auto")
    filled = max(len(devices) // given, 1)
    sizes = {k: filled if size == "auto" else size for k, size in sizes.items()}
    wanted = math.prod(sizes.values())
    idle = len(devices) - wanted
    if idle < 0 or (idle and "auto" in dataclasses.astuple(self)):
      shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
      raise ValueError(
          f"mesh: {shown} is {wanted} devices, but there are {len(devices)};"
          " choose sizes that multiply to that (one may be 'auto'). On a CPU,"
          f" XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes"
          f" {wanted}"
      )
    return make_mesh(**sizes, devices=devices[:wanted])


def make_mesh(
    *,
    data: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
  """Returns a mesh of data x context x tensor devices, neighbours in tensor."""
  sizes = (data, context, tensor)
  if devices is None:
    devices = jax.devices()[: math.prod(sizes)]
  types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)


def spec(axes: Axes) -> PartitionSpec:
  """Returns the mesh axes of an array whose axes have these logical names.

  Raises:
    ValueError: for a name without a rule, or two axes on one mesh axis.
  """
  for name in axes:
    if name is not None and name not in RULES:
      raise ValueError(
          f"axes={axes}: {name!r} has no rule; add it to"
          f" modeling.sharding.RULES, or use one of {', '.join(RULES)}"
      )
  entries = [() if name is None else RULES[name] for name in axes]
  used = [axis for entry in entries for axis in entry]
  if len(used) > len(set(used)):
    raise ValueError(
        f"axes={axes} would lie on mesh axes {entries}: each may be used once."
        " Give one of the axes a name with another rule"
    )
  return PartitionSpec(*[entry or None for entry in entries])


def sharding(
    mesh: Mesh, axes: Axes, *, memory_kind: str | None = None
) -> NamedSharding:
  """Returns where an array with these logical axes lies."""
  used = list(spec(axes))
  while used and used[-1] is None:  # jit would compile once for each spelling
    used.pop()
  return NamedSharding(mesh, PartitionSpec(*used), memory_kind=memory_kind)


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Returns the sharding of each leaf: by its names, or whole everywhere.

  The names are those of `modeling.parameter.param`, which a gradient or an
  optimizer's moment has in common with its weight.
  """
  return jax.tree.map(
      lambda leaf: leaf.replace(sharding(mesh, names(leaf)))
      if isinstance(leaf, nnx.Variable)
      else NamedSharding(mesh, PartitionSpec()),
      tree,
      is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
  )


def shard_bytes(x: jax.ShapeDtypeStruct, axes: Axes, mesh: Any) -> int:
  """Returns the bytes of an array's part on each device that `axes` give it."""
  used = [axis for name in axes if name for axis in RULES[name]]
  parts = math.prod(mesh.shape[axis] for axis in used)
  return math.prod(x.shape) * x.dtype.itemsize // parts


def names(variable: nnx.Variable) -> Axes:
  """Returns the logical name of each axis of a weight."""
  return variable.get_metadata()["out_sharding"]


def constrain(x: jax.Array, mesh: Mesh, axes: Axes) -> jax.Array:
  """Has the compiler lay out an array, and its cotangent, by these names."""
  return jax.lax.with_sharding_constraint(x, sharding(mesh, axes))


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Has every device hold all of each array, so that any host can read it."""
  return jax.lax.with_sharding_constraint(
      tree, NamedSharding(mesh, PartitionSpec())
  )


def to_mesh(tree: Any, mesh: Mesh) -> Any:
  """Puts arrays of the host, the same on every process, on every device."""
  return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def gather(weight: jax.Array, mesh: Mesh, axes: Axes) -> jax.Array:
  """Returns a weight as a layer uses it: no longer cut by ZeRO-3.

  Its cotangent is reduced and cut again at once, so that no device ever holds
  the whole gradient of more than one weight.
  """

  @jax.custom_vjp
  def gathered(weight):
    return constrain(weight, mesh, _used(axes))

  gathered.defvjp(
      lambda weight: (gathered(weight), None),
      lambda _, d_weight: (constrain(d_weight, mesh, axes),),
  )
  return gathered(weight)


def check_fits(tree: Any, mesh: Mesh) -> None:
  """Refuses weights with an axis that the mesh does not divide.

  Args:
    tree: holds weights or their shapes.
    mesh: where they are to lie.

  Raises:
    ValueError: names each weight, its axis, and the mesh axes in question.
  """
  is_weight = lambda leaf: isinstance(leaf, nnx.Variable)
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_weight)
  problems = []
  for path, variable in found:
    assert is_weight(variable), f"{path} has no logical axes"
    for size, name in zip(variable.shape, names(variable), strict=True):
      parts = RULES[name] if name else ()
      count = math.prod(mesh.shape[axis] for axis in parts)
      if size % count:
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        problems.append(
            f"{where}{list(variable.shape)}: its axis {name!r} of {size} does"
            f" not divide over {count} devices of {' x '.join(parts)}"
        )
  if problems:
    raise ValueError(
        f"mesh={dict(mesh.shape)} does not fit the model:\n  "
        + "\n  ".join(problems[:_SHOWN])
        + (
            f"\n  and {len(problems) - _SHOWN} more"
            if len(problems) > _SHOWN
            else ""
        )
        + "\nChoose smaller mesh.data, mesh.context or mesh.tensor"
    )


_SHOWN = 5  # problems that an error lists


def _used(axes: Axes) -> Axes:
  return tuple(None if name in _GATHERED else name for name in axes)

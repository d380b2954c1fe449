"""Names for the leaves of a pytree, and what differs between two of them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax


def named_leaves(
    tree: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
  """Returns the leaves of a tree by their dotted path, in the tree's order."""
  named = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
    if path[-1:] == (jax.tree_util.GetAttrKey("value"),):
      path = path[:-1]  # how flax gets from a variable to its array
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    assert name not in named, f"two leaves called {name}"
    named[name] = leaf
  return named


def specs(arrays: Mapping[str, Any]) -> dict[str, str]:
  """Returns dtype and shape of arrays, as "float32[2, 3]"."""
  return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


def differences(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    *,
    names: tuple[str, str],
    but: Collection[str] = (),
) -> list[str]:
  """Says for each path at which two nested dicts are not alike what they hold.

  Args:
    one: nested dicts of what JSON can hold.
    other: the same.
    names: what the two are called.
    but: paths that may differ, as "train.steps"; "log" stands for all that is
      below it as well.
  """
  is_none = lambda value: value is None
  ones, others = (named_leaves(x, is_leaf=is_none) for x in (one, other))
  absent = object()
  show = lambda value: "absent" if value is absent else repr(value)
  lines = []
  for path in sorted(ones.keys() | others.keys()):
    values = ones.get(path, absent), others.get(path, absent)
    allowed = any(f"{path}.".startswith(f"{key}.") for key in but)
    if values[0] != values[1] and not allowed:
      texts = [f"{n} {show(x)}" for n, x in zip(names, values, strict=True)]
      lines.append(f"{path}: {', '.join(texts)}")
  return lines

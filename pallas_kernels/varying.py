"""Types inside `jax.shard_map`, so that one kernel runs inside and outside."""

import jax


def vary_like(tree, *others: jax.Array):
  """Marks values as different on every shard on which one of `others` is.

  The first carry of a scan, which is the same everywhere, needs this where its
  later values are not. Outside `jax.shard_map` nothing varies: no change.
  """
  axes = frozenset().union(*[_varying(x) for x in others])

  def mark(x):
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree)


def _varying(x) -> frozenset[str]:
  return jax.typeof(x).mat.varying

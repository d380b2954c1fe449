"""Sends tokens to the devices that hold their experts, and results back.

Inside `jax.shard_map`. Tokens and experts both lie over the mesh axis
`context`; the n shards of one group exchange with each other only.

1. A shard has a row for each token and choice. It lists them by expert, and so
   by destination.
2. In a round it sends the next c rows of each of its n lists.
3. The receiver groups what came by expert, applies the experts, and returns
   each result to the slot that its row came from.
4. The source adds weight * result to the token's sum.

No row is dropped: rounds go on until the longest list of the group is sent. c
is twice the balanced share, so most loads take one round. No device ever holds
more than one round, in the backward pass either.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import wide, wide_dtype
from pallas_kernels.varying import vary_like

_AXIS = "context"
SLACK = 2  # balanced shares that a round has room for

# (params, rows grouped by expert, rows of each expert) -> as many results. Rows
# after the last group are padding: they are zero, and their results unused.
Experts = Callable[[Any, jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
  """Where the R = tokens * choices rows of a shard go, in int32."""

  experts: jax.Array  # [R] number of the expert on its shard
  destinations: jax.Array  # [R] shard
  ranks: jax.Array  # [R] place in the list of the destination
  order: jax.Array  # [R] all lists, one after the other
  starts: jax.Array  # [n] where each list starts in `order`
  sizes: jax.Array  # [n]
  rounds: jax.Array  # [] the same on all shards of the group


def apply_experts(
    params: Any,
    x_MD: jax.Array,
    weights_MA: jax.Array,
    experts_MA: jax.Array,
    *,
    apply: Experts,
) -> jax.Array:
  """Returns sum_j weights_j expert_j(x) for the tokens of this shard.

  Args:
    params: arrays with a leading axis of the experts of this shard.
    x_MD: tokens.
    weights_MA: the weight of each choice.
    experts_MA: the chosen experts, counted over all shards, int32.
    apply: what experts do with rows.

  Returns:
    The sums [M,D], in float32 or wider. Where each shard of another axis has a
    part of every expert, its part of the sums.
  """
  leaves = jax.tree.leaves(params)
  # Cotangents are summed over the mesh where values begin to vary: here, after
  # all rounds. In a round it would hang, as other groups take fewer or more.
  floats = vary_like((params, x_MD, weights_MA), x_MD, *leaves)
  shards = jax.lax.axis_size(_AXIS)
  capacity = round_capacity(experts_MA.size, shards)
  route = _route(experts_MA, shards, len(leaves[0]), capacity)
  return _all_rounds(partial(_round, apply, capacity), floats, route)


def round_capacity(rows: int, shards: int) -> int:
  """Returns how many rows one shard can send to one shard in a round."""
  return min(-(-SLACK * rows // shards), rows)


def rounds_needed(sizes: jax.Array, capacity: int) -> jax.Array:
  """Returns the rounds that the longest list of the group takes."""
  longest = jax.lax.pmax(sizes.max(), _AXIS)
  return (longest + capacity - 1) // capacity


# Not a scan over the worst case: its transpose would add a gradient of zeros,
# the size of all experts, for every round that is not needed.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(one_round, floats, route):
  x_MD = floats[1]
  total = jnp.zeros(x_MD.shape, wide_dtype(x_MD.dtype))
  step = lambda index, total: total + one_round(index, floats, route)
  return jax.lax.fori_loop(0, route.rounds, step, vary_like(total, x_MD))


def _forward(one_round, floats, route):
  return _all_rounds(one_round, floats, route), (floats, route)


def _backward(one_round, kept, d_total):
  floats, route = kept

  def step(index, total):
    _, pull = jax.vjp(lambda floats: one_round(index, floats, route), floats)
    return jax.tree.map(jnp.add, total, pull(d_total)[0])

  zeros = vary_like(jax.tree.map(jnp.zeros_like, floats), d_total)
  return jax.lax.fori_loop(0, route.rounds, step, zeros), None


_all_rounds.defvjp(_forward, _backward)


def _route(experts_MA, shards, per_shard, capacity):
  experts = experts_MA.reshape(-1)
  destinations = experts // per_shard
  order, places = _sorted(experts)
  sizes = _counts(destinations, shards)
  starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
  rounds = jnp.int32(1)  # a constant, for which no loop is compiled
  if capacity < experts.size:
    rounds = rounds_needed(sizes, capacity)
  return Route(
      experts=experts % per_shard,
      destinations=destinations,
      ranks=places - starts[destinations],
      order=order,
      starts=starts,
      sizes=sizes,
      rounds=rounds,
  )


def _round(apply, capacity, index, floats, route: Route):
  """Returns what one round adds to each token's sum."""
  params, x_MD, weights_MA = floats
  per_shard = len(jax.tree.leaves(params)[0])
  swap = partial(
      jax.lax.all_to_all, axis_name=_AXIS, split_axis=0, concat_axis=0
  )
  first = index * capacity
  ranks_1C = first + jnp.arange(capacity, dtype=jnp.int32)[None]
  real_nC = ranks_1C < route.sizes[:, None]
  rows_nC = route.order.at[route.starts[:, None] + ranks_1C].get(mode="clip")
  x_nCD = x_MD[rows_nC // weights_MA.shape[1]]
  x_nCD = swap(jnp.where(real_nC[..., None], x_nCD, 0))
  experts_nC = swap(jnp.where(real_nC, route.experts[rows_nC], per_shard))

  order, places = _sorted(experts_nC.reshape(-1))
  counts = _counts(experts_nC.reshape(-1), per_shard)
  out = apply(params, x_nCD.reshape(-1, x_nCD.shape[-1])[order], counts)
  out_nCD = swap(out[places].reshape(x_nCD.shape))

  here = (route.ranks >= first) & (route.ranks < first + capacity)
  slots = route.destinations * capacity + route.ranks - first
  out = out_nCD.reshape(-1, x_nCD.shape[-1]).at[slots].get(mode="clip")
  out_MAD = jnp.where(here[:, None], out, 0).reshape(*weights_MA.shape, -1)
  return (wide(weights_MA)[..., None] * wide(out_MAD)).sum(1)


def _sorted(keys):
  """Returns the order that sorts some keys, and each one's place in it."""
  order = jnp.argsort(keys, stable=True)
  return order.astype(jnp.int32), jnp.argsort(order).astype(jnp.int32)


def _counts(keys, length):
  """Returns how often 0, ..., length - 1 occur."""
  return jnp.bincount(keys, length=length).astype(jnp.int32)

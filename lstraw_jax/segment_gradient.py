"""The gradient of one segment, given what later segments left on its state.

Three cotangents are pulled back: that of the segment's own loss, those of the
keys and values it wrote, and that of the recurrent state it handed on. This
gives parameter gradients, and cotangents for the segments before: of their
recurrent state, and of their keys and values, which are summed in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lstraw_jax.gradient_sums import add, lay_out
from lstraw_jax.policy import Policy
from modeling.layer_state import (
    Prefix,
    Recurrent,
    SegmentDelta,
    Slots,
    with_sink,
)
from modeling.models import Model
from pallas_kernels.staging import put_like

# (model, prefixes, recurrent) -> loss [], what it adds, anything to keep of it
Segment = Callable[
    [Model, tuple[Prefix, ...], Recurrent],
    tuple[jax.Array, SegmentDelta, Any],
]


class PulledBack(NamedTuple):
  """What the backward pass of a segment gives."""

  gradients: nnx.State  # like policy.trainable, summed
  sums: tuple[Any, ...]  # slots of each prefix, summed; or None, as given
  d_recurrent: Recurrent  # of the state that enters the segment
  loss: jax.Array  # []
  kept: Any


def pull_back_segment(
    policy: Policy,
    segment: Segment,
    gradients: nnx.State,
    *,
    prefixes: tuple[Prefix, ...],
    sums: tuple[Slots | None, ...],
    recurrent: Recurrent,
    d_slots: Slots,
    d_recurrent: Recurrent,
) -> PulledBack:
  """Rebuilds the graph of a segment and pulls cotangents back through it.

  Args:
    policy: the weights.
    segment: its forward.
    gradients: sums so far, like policy.trainable in float32 or wider.
    prefixes: what it attends to.
    sums: the cotangents of their slots so far; None where those are constants.
    recurrent: the state that enters it.
    d_slots: the complete cotangent of the slots [L,B,T,...] that it wrote.
    d_recurrent: that of the state it handed on.
  """

  def forward(trainable, sinks, recurrent):
    model = policy.replace(trainable=trainable).model
    taps = tuple(map(with_sink, prefixes, sinks))
    loss, delta, kept = segment(model, taps, recurrent)
    return (loss, delta.learned(policy.config.trained)), kept

  # Their values are never read, so that the compiler makes no such arrays.
  sinks = jax.tree.map(lambda x: put_like(jnp.zeros(x.shape, x.dtype), x), sums)
  (loss, delta), pull_back, kept = jax.vjp(
      forward, policy.trainable, sinks, recurrent, has_aux=True
  )
  d_delta = SegmentDelta(
      slots=_cast(d_slots, delta.slots),
      recurrent=_cast(d_recurrent, delta.recurrent),
      sinks=sums,
  )
  d_trainable, sums, d_recurrent = pull_back((jnp.ones_like(loss), d_delta))
  gradients = lay_out(add(gradients, d_trainable), policy)
  return PulledBack(gradients, sums, d_recurrent, loss, kept)


def _cast(tree, like):
  return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)

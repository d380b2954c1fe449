"""What the layers of one kind cost one device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.cost import StageCost, total
from lstraw_jax.roofline.products import Matrix, product_cost
from lstraw_jax.roofline.segments import Segments


class LayerKind(NamedTuple):
  """Layers, or parts of layers, that cost the same."""

  times: int  # how many a model has
  matrices: Sequence[Matrix]  # of one of them
  besides: Callable[[Segments, Workload], StageCost] | None = None

  def cost(self, segments: Segments, workload: Workload) -> StageCost:
    """Counts all of them: each device has its part of a segment's tokens."""
    costs = [
        product_cost(
            matrix,
            tokens=segments.tokens // workload.context,
            calls=segments.count,
            pulled_back=segments.pulled_back,
        )
        for matrix in self.matrices
    ]
    if self.besides is not None:
      costs.append(self.besides(segments, workload))
    return total(costs).repeated(self.times)

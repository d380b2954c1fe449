"""The weights of a gated feed-forward."""

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.products import Matrix, linear


def mlp_matrices(size: int, workload: Workload, *, last: bool) -> list[Matrix]:
  """Returns gate_proj, up_proj and down_proj.

  Args:
    size: columns of the first two.
    workload: the sizes.
    last: whether the result is only added to the layer's own, so that no
      backward pass needs it again.
  """
  hidden = workload.model.hidden_size
  return [
      *linear("gate_proj", hidden, size, workload, cut="out"),
      *linear("up_proj", hidden, size, workload, cut="out"),
      *linear("down_proj", size, hidden, workload, cut="in", again=not last),
  ]

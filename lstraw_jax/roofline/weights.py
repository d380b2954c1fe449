"""The weights of each kind of layer, as a device uses them in products."""

from lstraw_jax.capacity.targets import Target
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.experts import expert_matrices
from lstraw_jax.roofline.products import Matrix, linear


def attention_matrices(workload: Workload) -> list[Matrix]:
  """Returns those of full attention; q_proj holds queries and gates."""
  model, hidden = workload.model, workload.model.hidden_size
  queries = model.num_attention_heads * model.head_dim
  keys = model.num_key_value_heads * model.head_dim
  return [
      *linear("q_proj", hidden, 2 * queries, workload, cut="out"),
      *linear("k_proj", hidden, keys, workload, cut="out"),
      *linear("v_proj", hidden, keys, workload, cut="out"),
      *linear("o_proj", queries, hidden, workload, cut="in"),
  ]


def delta_matrices(workload: Workload) -> list[Matrix]:
  """Returns those of Gated DeltaNet."""
  model, hidden = workload.model, workload.model.hidden_size
  heads = model.linear_num_value_heads
  values = heads * model.linear_value_head_dim
  channels = model.conv_channels
  return [
      *linear("in_proj_qkv", hidden, channels, workload, cut="out"),
      *linear("in_proj_z", hidden, values, workload, cut="out"),
      *_gate("in_proj_b", heads, workload),
      *_gate("in_proj_a", heads, workload),
      *linear("out_proj", values, hidden, workload, cut="in"),
  ]


def _gate(name: str, heads: int, workload: Workload) -> list[Matrix]:
  """Whole on each device of `tensor`, which computes it for its own heads.

  A backward gathers the small cotangents of all heads, so that dx is no partial
  sum; that, and its few more products, are not counted.
  """
  found = linear(name, workload.model.hidden_size, heads, workload, cut="out")
  return [matrix._replace(cut=None) for matrix in found]


def feed_forward_matrices(workload: Workload, target: Target) -> list[Matrix]:
  """Returns those of a dense feed-forward or of a mixture of experts."""
  model = workload.model
  moe, hidden = model.moe, model.hidden_size
  if moe is None:
    assert model.intermediate_size is not None, "checked by the config"
    return _mlp(model.intermediate_size, workload, last=True)
  return [
      *linear("gate", hidden, moe.num_experts, workload),  # has no adapter
      *linear("shared_expert_gate", hidden, 1, workload),
      *_mlp(moe.shared_expert_intermediate_size, workload, last=False),
      *expert_matrices(workload, target),
  ]


def _mlp(size: int, workload: Workload, *, last: bool) -> list[Matrix]:
  """No backward pass needs the last product of a layer again."""
  hidden = workload.model.hidden_size
  return [
      *linear("gate_proj", hidden, size, workload, cut="out"),
      *linear("up_proj", hidden, size, workload, cut="out"),
      *linear("down_proj", size, hidden, workload, cut="in", again=not last),
  ]

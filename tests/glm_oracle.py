"""PyTorch models of GLM-5, to be used with the functions of `torch_oracle`.

`exact` is that of `torch_oracle` with one rule more. PyTorch takes any of the
tokens of equal index score, and others for rows of another length. A score of
few index heads is often exactly zero. Inside `exact` the lower index wins.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaTopkRouter,
)

from tests import torch_oracle

# Queries, keys and values of unequal sizes; a part of an index head is rotated.
_SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=16,
    max_position_embeddings=4096,
    rope_parameters=dict(rope_type="default", rope_theta=8e6),
    attn_implementation="eager",
)
# Two runs of one dense layer; one whose sharers are of both kinds; two of
# experts alone, so that the last full layer has two sharers.
_SHARING = dict(
    indexer_types=["full"] * 2 + ["full", "shared", "shared"] * 3,
    mlp_layer_types=["dense"] * 4 + ["sparse"] * 7,
    first_k_dense_replace=4,
)
_ALL_FULL = dict(
    indexer_types=["full"] * 4,
    mlp_layer_types=["dense"] + ["sparse"] * 3,
    first_k_dense_replace=1,
)


def build(
    *, sharing: bool = True, dtype: torch.dtype = torch.float64
) -> GlmMoeDsaForCausalLM:
  """Returns a tiny model with every parameter drawn at random.

  Args:
    sharing: whether some layers share the choice of another, as in GLM-5.2;
      else all have an indexer, as in GLM-5.
    dtype: of all but routers, which are in float32 or wider.
  """
  layers = _SHARING if sharing else _ALL_FULL
  config = GlmMoeDsaConfig(
      **_SHAPE, **layers, num_hidden_layers=len(layers["indexer_types"])
  )
  model = GlmMoeDsaForCausalLM(config)
  # The default kernel of the experts has no float64.
  model.set_experts_implementation("eager")
  torch_oracle.randomise(model)
  routers = [x for x in model.modules() if isinstance(x, GlmMoeDsaTopkRouter)]
  kept = [{n: x.clone() for n, x in r.state_dict().items()} for r in routers]
  model.to(dtype)
  for router, weights in zip(routers, kept, strict=True):
    router.to(torch.promote_types(dtype, torch.float32))
    router.load_state_dict(weights)
  return model.eval()


@contextlib.contextmanager
def exact() -> Iterator[None]:
  """Makes models compute in float64 throughout, and choose by one rule."""
  with (
      torch_oracle.exact(),
      mock.patch.object(torch.Tensor, "topk", _stable_top_k),
      mock.patch.object(torch, "topk", _stable_top_k),
  ):
    yield


@torch.no_grad()
def selected(model: GlmMoeDsaForCausalLM, tokens: torch.Tensor) -> np.ndarray:
  """Returns which tokens each token of each layer attends to, [L,B,T,T]."""
  found = []

  def keep(module, args, kwargs, output):
    indices = output[2].long()
    chosen = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    found.append(chosen.scatter(-1, indices, True).tril())

  with contextlib.ExitStack() as stack:
    for layer in model.model.layers:
      hook = layer.self_attn.register_forward_hook(keep, with_kwargs=True)
      stack.callback(hook.remove)
    model(tokens, use_cache=False)
  return torch.stack(found).numpy()


def _stable_top_k(scores, k, dim=-1, **_):
  values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
  return torch.return_types.topk(
      (values.narrow(dim, 0, k), indices.narrow(dim, 0, k))
  )

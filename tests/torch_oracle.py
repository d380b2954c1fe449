"""PyTorch models that ours are held against, in float64 and with gradients.

The modelling code of transformers casts to float32 by hand in many places, and
its cache writes states in place, which autograd refuses. `exact` undoes both
while it is active: forwards and backwards run inside it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    cache_utils,
)

from modeling import checkpoint_names, checkpoints, rope
from modeling.checkpoint_names import LeafPath
from modeling.decoder_config import DecoderConfig
from modeling.models import Model, abstract_model, read_config

# Two blocks; three value heads a key head; keys and values of unequal size.
_SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    max_position_embeddings=4096,
    attn_implementation="eager",
)
_ROPE = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
_EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
)


def build(
    *,
    moe: bool = False,
    tied: bool = False,
    yarn: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> PreTrainedModel:
  """Returns a tiny model with every parameter drawn at random.

  Fresh models hide errors: their zero-centred norms have weight 0, all
  `dt_bias` are equal, and so on.
  """
  rope = _ROPE | ({"rope_type": "yarn", **yarn} if yarn else {})
  shape = _SHAPE | dict(rope_parameters=rope, tie_word_embeddings=tied)
  if moe:
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**shape, **_EXPERTS))
  else:
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, intermediate_size=48))
  # The default kernel of the experts has no float64.
  model.set_experts_implementation("eager")
  randomise(model)
  return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
  """Draws every parameter with a size that keeps activations near one."""
  generator = torch.Generator().manual_seed(0)
  for name, weight in model.named_parameters():
    draw = torch.randn(weight.shape, generator=generator)
    if name.endswith("A_log"):
      decay = torch.rand(weight.shape, generator=generator)
      draw = torch.log(0.01 + 15.99 * decay)
    elif name.endswith("dt_bias"):
      draw = draw - 1.0
    elif "norm" in name:
      draw = weight.mean().round() + 0.2 * draw  # some are 1 + w
    elif "embed_tokens" not in name:
      draw = 1.3 * draw / weight.shape[-1] ** 0.5
    weight.copy_(draw)
  for name, buffer in model.named_buffers():
    if name.endswith("e_score_correction_bias"):  # as large as in GLM-5.2
      buffer.copy_(7.0 + 0.25 * torch.rand(buffer.shape, generator=generator))


@contextlib.contextmanager
def exact() -> Iterator[None]:
  """Makes models compute in float64 throughout, and caches differentiable."""
  up = lambda x: torch.float64 if x is torch.float32 else x
  widen = lambda function: (
      lambda *args, **kwargs: function(
          *map(up, args), **{name: up(x) for name, x in kwargs.items()}
      )
  )
  layer = cache_utils.LinearAttentionLayer
  with (
      mock.patch.object(torch.Tensor, "to", widen(torch.Tensor.to)),
      mock.patch.object(torch.Tensor, "type", widen(torch.Tensor.type)),
      mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
      mock.patch.object(functional, "softmax", widen(functional.softmax)),
      mock.patch.object(layer, "update_conv_state", _update_conv_state),
      mock.patch.object(layer, "update_recurrent_state", _update_recurrent),
  ):
    yield


def log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
  """Returns the log-probs [B, T-1] of each token given those before it."""
  logits = model(tokens[:, :-1], use_cache=False).logits
  return _select(logits, tokens[:, 1:])


def response_log_probs(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    response: torch.Tensor,
    *,
    prompt_gradient: bool = False,
) -> torch.Tensor:
  """Returns the log-probs [R] of a response, with their graph.

  The first P - 1 prompt tokens fill a cache; then x_P, y_1, ..., y_{R-1} follow
  in one call. This is GRPO with the prompt state captured once.

  Args:
    model: in float64.
    prompt: [P] token ids, P >= 2.
    response: [R] token ids, R >= 2: a single token takes another path, which
      writes the cache in place.
    prompt_gradient: whether the graph reaches through the cache into the
      prompt; without, the prompt is run under `no_grad`.
  """
  assert len(prompt) >= 2 and len(response) >= 2, (len(prompt), len(response))
  with torch.set_grad_enabled(prompt_gradient):
    cache = model(prompt[None, :-1], use_cache=True).cache
  inputs = torch.cat([prompt[-1:], response[:-1]])
  logits = model(inputs[None], cache=cache, use_cache=True).logits
  return _select(logits, response[None])[0]


def our_config(model: PreTrainedModel, **changes) -> Any:
  """Returns our configuration of a model, in float64."""
  dtypes = dict(dtype="float64", param_dtype="float64")
  return read_config(model.config.to_dict(), **(dtypes | changes))


def our_model(model: PreTrainedModel, config: DecoderConfig) -> Model:
  """Returns our model with the same weights."""
  return checkpoints.assemble(config, to_leaves(config, model.state_dict()))


def our_gradients(
    model: PreTrainedModel, config: DecoderConfig
) -> dict[LeafPath, np.ndarray]:
  """Returns the gradients after `backward`, by our paths and in our layout.

  What has none, or is no parameter, has zeros.
  """
  gradients = {n: torch.zeros_like(x) for n, x in model.state_dict().items()}
  gradients |= {
      name: weight.grad
      for name, weight in model.named_parameters()
      if weight.grad is not None
  }
  return to_leaves(config, gradients)


def to_leaves(
    config: DecoderConfig, tensors: Mapping[str, torch.Tensor]
) -> dict[LeafPath, np.ndarray]:
  """Stacks tensors, named as the weights of a model, into our leaves."""
  abstract = checkpoint_names.leaves(abstract_model(config.replace(lora=None)))
  leaves = {p: np.full(x.shape, np.nan) for p, x in abstract.items()}
  for name, place in checkpoint_names.places(config).items():
    tensor = tensors[checkpoint_names.prefixed(name)].numpy()
    place.part(leaves[place.path])[...] = place.to_model(tensor)
  return leaves


def use_our_frequencies(model: PreTrainedModel, config: DecoderConfig) -> None:
  """Puts our table of frequencies into the model.

  Tables differ by a unit in the last place of float32, so that a comparison in
  float64 needs one of them on both sides.
  """
  table = rope.inverse_frequencies(config.rope, head_dim=model.config.head_dim)
  model.model.rotary_emb.inv_freq = torch.tensor(table)


def with_their_frequencies(config: Any, model: PreTrainedModel) -> Any:
  """Returns the configuration with the model's table of frequencies."""
  table = tuple(model.model.rotary_emb.inv_freq.tolist())
  return config.replace(rope=dataclasses.replace(config.rope, inv_freq=table))


def _select(logits, targets):
  all_log_probs = functional.log_softmax(logits, dim=-1)
  return all_log_probs.gather(-1, targets[..., None])[..., 0]


def _update_recurrent(self, recurrent_states, state_idx=0, **_):
  self.is_recurrent_states_initialized[state_idx] = True
  self.recurrent_states[state_idx] = recurrent_states
  return recurrent_states


def _update_conv_state(
    self, conv_states, state_idx=0, conv_kernel_size=None, **_
):
  """Returns all inputs that the convolution sees; keeps the last ones."""
  seen = conv_states
  if self.has_previous_state[state_idx]:
    seen = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
  short = max(0, conv_kernel_size - seen.shape[-1])
  self.conv_states[state_idx] = functional.pad(seen, (short, 0))[
      ..., -conv_kernel_size:
  ]
  self.has_previous_state[state_idx] = True
  self.is_conv_states_initialized[state_idx] = True
  return seen

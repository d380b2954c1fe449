"""What trains the indexers, against PyTorch's autograd in float64.

All lengths share one compiled program: what is missing is padding.
"""

import contextlib
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

from modeling import checkpoint_names
from modeling.parameter import IndexerParam

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (  # noqa: E402
    GlmMoeDsaIndexer,
)

from tests import glm_oracle, torch_oracle  # noqa: E402, they import torch

pytestmark = pytest.mark.reference

LOSS_TOLERANCE = 1e-9  # nats
GRADIENT_TOLERANCE = 1e-8  # of the largest entry of a leaf
K = 16  # index_topk of the oracle
LONGEST = 6 * K
LENGTHS = (K - 1, K, K + 1, 2 * K, LONGEST)
_rng = np.random.default_rng(0)
TOKENS = _rng.integers(0, 96, (2, LONGEST), np.int32)
WEIGHTS = _rng.normal(size=TOKENS.shape)  # of the tokens, in the loss


@functools.cache
def models(sharing):
  """Theirs and ours, with our table of frequencies."""
  theirs = glm_oracle.build(sharing=sharing)
  config = torch_oracle.our_config(theirs)
  assert config.index_topk == K
  torch_oracle.use_our_frequencies(theirs, config)
  return theirs, torch_oracle.our_model(theirs, config)


def their_losses(model, tokens):
  """KL(p || softmax(score)) [B,T], summed over layers with an indexer.

  p is the eager attention of the layer, averaged over its heads. The scores
  are those of the indexer's own forward, but with a graph.
  """
  read, weighed = {}, {}

  def keep_inputs(indexer, args, kwargs, output):
    read[indexer] = args

  def keep_attention(attention, args, kwargs, output):
    weighed[attention.indexer] = output[1]

  with contextlib.ExitStack() as stack:
    for layer in model.model.layers:
      attention = layer.self_attn
      if attention.indexer is not None:
        for module, keep in (
            (attention.indexer, keep_inputs),
            (attention, keep_attention),
        ):
          hook = module.register_forward_hook(keep, with_kwargs=True)
          stack.callback(hook.remove)
    with torch.no_grad():
      model(tokens, use_cache=False)

  total = torch.zeros(tokens.shape, dtype=torch.float64)
  for indexer, args in read.items():
    p = weighed[indexer].mean(1)
    scores = scores_of(indexer, args)
    kept = scores.detach().topk(min(K, tokens.shape[1]), -1).indices
    selected = torch.zeros(p.shape, dtype=torch.bool).scatter(-1, kept, True)
    selected = selected.tril()
    assert (p[~selected] == 0).all() and (p[selected] > 0).all()
    log_q = scores.masked_fill(~selected, -torch.inf).log_softmax(-1)
    terms = torch.xlogy(p, p) - p * log_q.masked_fill(~selected, 0.0)
    total = total + terms.sum(-1)
  return total


def scores_of(indexer, args):
  """Returns what an indexer takes the best of, [B,T,T] with their graph."""
  found, top_k = [], torch.Tensor.topk

  def keep(scores, *args, **kwargs):
    found.append(scores)
    return top_k(scores, *args, **kwargs)

  with mock.patch.object(torch.Tensor, "topk", keep):
    GlmMoeDsaIndexer.forward.__wrapped__(indexer, *args)
  (scores,) = found
  return scores


@jax.jit
def ours_with_gradients(model, tokens, positions, weights):
  """Losses [B,T], and the gradient of their weighted sum to every weight."""

  def total(model):
    _, delta = model(
        tokens,
        positions_BT=positions,
        prefixes=(),
        recurrent=None,
        indexer_loss=True,
    )
    return (weights * delta.indexer_loss).sum(), delta.indexer_loss

  (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(model)
  return losses, gradients


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "all-full"])
def test_losses_and_gradients_are_those_of_pytorch(x64, sharing, length):
  """And no weight but an indexer's has a gradient."""
  theirs, ours = models(sharing)
  theirs.zero_grad()
  with glm_oracle.exact():
    tokens = torch.tensor(TOKENS[:, :length], dtype=torch.int64)
    expected = their_losses(theirs, tokens)
    (expected * torch.tensor(WEIGHTS[:, :length])).sum().backward()
  wanted = torch_oracle.our_gradients(theirs, ours.config)

  index = np.arange(LONGEST, dtype=np.int32)
  positions = np.stack([np.where(index < length, index, -1)] * 2)
  losses, gradients = ours_with_gradients(ours, TOKENS, positions, WEIGHTS)
  error = np.abs(losses[:, :length] - expected.detach().numpy()).max()
  print(f"losses {error:.1e} of {expected.mean():.1f} a token")
  assert error < LOSS_TOLERANCE
  assert not losses[:, length:].any()
  assert (losses[:, 1:length] > 0).all()

  found = checkpoint_names.variables(nnx.state(gradients))
  worst = 0.0
  for path, gradient in wanted.items():
    value = np.asarray(found[path].get_value())
    if not isinstance(found[path], IndexerParam):
      assert not value.any() and not gradient.any(), path
      continue
    size = np.abs(gradient).max()
    assert size > 0, path
    worst = max(worst, np.abs(value - gradient).max() / size)
  print(f"worst gradient {worst:.1e}")
  assert worst < GRADIENT_TOLERANCE

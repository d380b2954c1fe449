"""GLM-5 against PyTorch's in float64: logits, choices, and all gradients.

All lengths and cuts share one compiled program: what is missing is padding.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import checkpoint_names, checkpoints
from modeling.layer_state import Prefix
from modeling.parameter import Buffer, IndexerParam

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (  # noqa: E402
    GlmMoeDsaIndexer,
)

from tests import glm_oracle, torch_oracle  # noqa: E402, they import torch

pytestmark = pytest.mark.reference

LOGITS_TOLERANCE = 1e-9
GRADIENT_TOLERANCE = 1e-8  # of the largest entry of a leaf
K = 16  # index_topk of the oracle
LONGEST = 6 * K
LENGTHS = (K - 1, K, K + 1, 2 * K, LONGEST)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, LONGEST), np.int32)


@functools.cache
def models(sharing):
  """Theirs and ours, with our table of frequencies."""
  theirs = glm_oracle.build(sharing=sharing)
  config = torch_oracle.our_config(theirs)
  assert config.index_topk == K
  torch_oracle.use_our_frequencies(theirs, config)
  return theirs, torch_oracle.our_model(theirs, config)


def padded(start, end):
  """Positions [2, LONGEST] of a part of the tokens, and the part."""
  index = np.arange(LONGEST, dtype=np.int32) + start
  positions = np.where(index < end, index, -1)
  tokens = TOKENS[:, np.minimum(index, LONGEST - 1)]
  return np.stack([positions, positions]), tokens


@jax.jit
def run(model, tokens, positions):
  """Logits, and what the segment adds."""
  hidden, delta = model(
      tokens, positions_BT=positions, prefixes=(), recurrent=None
  )
  return model.logits(hidden), delta


@jax.jit
def continued(model, tokens, positions, slots, stored_positions):
  """Logits behind a state."""
  hidden, delta = model(
      tokens,
      positions_BT=positions,
      prefixes=(Prefix(slots, stored_positions),),
      recurrent=None,
  )
  return model.logits(hidden), delta


def sets(record, length):
  """Which tokens each of the first ones attends to, of each full layer."""
  chosen = np.asarray(record.selections)[:, :, :length]
  found = np.zeros((*chosen.shape[:3], LONGEST + 1), bool)
  np.put_along_axis(found, np.where(chosen < 0, LONGEST, chosen), True, -1)
  return found[..., :LONGEST]  # [l, B, length, LONGEST]


def theirs_on(model, tokens):
  """Logits and choices of PyTorch."""
  tokens = torch.tensor(tokens, dtype=torch.int64)
  with glm_oracle.exact(), torch.no_grad():
    logits = model(tokens, use_cache=False).logits.numpy()
    return logits, glm_oracle.selected(model, tokens)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "all-full"])
def test_logits_and_choices_are_those_of_pytorch(x64, sharing, length):
  theirs, ours = models(sharing)
  expected, selected = theirs_on(theirs, TOKENS[:, :length])
  positions, tokens = padded(0, length)
  logits, delta = run(ours, tokens, positions)
  error = np.abs(logits[:, :length] - expected).max()
  print(f"logits {error:.1e} of a spread of {expected.std():.1f}")
  assert error < LOGITS_TOLERANCE
  full = [kind == "full" for kind in ours.config.indexer_types]
  found = sets(delta.record, length)
  np.testing.assert_array_equal(found[..., :length], selected[full])
  assert not found[..., length:].any()
  # Each layer attends to what the last full layer up to it chose.
  source = np.cumsum(full) - 1
  np.testing.assert_array_equal(selected[full][source], selected)
  if length > K + 1:
    counts = selected[..., -1, :].sum(-1)
    assert (counts == K).all()


def test_ties_are_there_and_go_to_the_earlier_token(x64):
  """Zeros of the ReLU: without the rule PyTorch would choose otherwise."""
  theirs, _ = models(True)
  tokens = torch.tensor(TOKENS, dtype=torch.int64)
  with torch_oracle.exact(), torch.no_grad():
    unruly = glm_oracle.selected(theirs, tokens)
  _, ruled = theirs_on(theirs, TOKENS)
  assert (unruly != ruled).any()


@pytest.mark.parametrize("cut", [1, K - 1, K, K + 1, 2 * K, LONGEST - 1])
def test_a_segment_behind_a_state_is_the_rest_of_the_whole(x64, cut):
  theirs, ours = models(True)
  expected, selected = theirs_on(theirs, TOKENS)
  positions, tokens = padded(0, cut)
  _, before = run(ours, tokens, positions)
  rest, tokens = padded(cut, LONGEST)
  logits, delta = continued(ours, tokens, rest, before.slots, positions)
  count = LONGEST - cut
  error = np.abs(logits[:, :count] - expected[:, cut:]).max()
  assert error < LOGITS_TOLERANCE
  full = [kind == "full" for kind in ours.config.indexer_types]
  np.testing.assert_array_equal(
      sets(delta.record, count), selected[full][:, :, cut:]
  )


@jax.jit
def gradient(model, tokens, positions):
  """Gradients of the mean log-prob of all tokens but the first."""

  def mean(model):
    logits, _ = run(model, tokens, positions)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    targets = tokens[:, 1:, None]
    chosen = jnp.take_along_axis(log_probs, targets, -1)[..., 0]
    keep = (positions[:, 1:] >= 0).astype(chosen.dtype)
    return (keep * chosen).sum() / keep.sum()

  return jax.grad(mean)(model)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "all-full"])
def test_every_gradient_is_that_of_pytorch(x64, sharing, length):
  theirs, ours = models(sharing)
  theirs.zero_grad()
  with glm_oracle.exact():
    tokens = torch.tensor(TOKENS[:, :length], dtype=torch.int64)
    torch_oracle.log_probs(theirs, tokens).mean().backward()
  expected = torch_oracle.our_gradients(theirs, ours.config)
  positions, tokens = padded(0, length)
  gradients = gradient(ours, tokens, positions)
  found = checkpoint_names.variables(nnx.state(gradients))
  worst = 0.0
  for path, wanted in expected.items():
    size = np.abs(wanted).max()
    difference = np.abs(np.asarray(found[path].get_value()) - wanted).max()
    if isinstance(found[path], (IndexerParam, Buffer)):
      assert size == 0 and difference == 0, path
      continue
    assert size > 0, path
    assert difference < GRADIENT_TOLERANCE * size, (path, difference / size)
    worst = max(worst, difference / size)
  print(f"worst gradient {worst:.1e}")


@pytest.mark.parametrize("length", [K + 1, LONGEST])
def test_a_k_of_all_tokens_is_dense_attention(x64, length):
  theirs, ours = models(True)
  dense = checkpoints.assemble(
      ours.config.replace(index_topk=LONGEST), checkpoint_names.leaves(ours)
  )
  with mock.patch.object(GlmMoeDsaIndexer, "forward", _everything):
    expected, selected = theirs_on(theirs, TOKENS[:, :length])
  assert (selected == np.tri(length, dtype=bool)).all()
  positions, tokens = padded(0, length)
  logits, _ = run(dense, tokens, positions)
  assert np.abs(logits[:, :length] - expected).max() < LOGITS_TOLERANCE
  sparse, _ = run(ours, tokens, positions)
  assert np.abs(sparse[:, :length] - expected).max() > 0.1


def _everything(self, hidden_states, *_, **__):
  batch, length = hidden_states.shape[:2]
  return torch.arange(length).expand(batch, length, length)

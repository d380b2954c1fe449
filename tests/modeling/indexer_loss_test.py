"""What trains an indexer: segments, padding, and which weights are trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import checkpoint_names
from modeling.decoder_config import LoraConfig
from modeling.layer_state import NOTHING_RECORDED, LatentState, Prefix
from modeling.models import abstract_model, read_config
from modeling.parameter import IndexerParam
from tests import tiny
from tests.random_model import random_model

TOLERANCE = 1e-12
BF16_TOLERANCE = 0.1  # of losses, relative to their mean; 0.03 is found
# Two groups; the second indexer is of the third layer.
LAYERS = dict(
    num_hidden_layers=4,
    indexer_types=("full", "shared", "full", "full"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
)
CONFIG = tiny.config("tiny-glm", **LAYERS)
K = CONFIG.index_topk
T = 3 * K  # room for tokens
COUNT = T - 7  # how many there are
ROWS = 2
TOKENS = np.stack([tiny.tokens(COUNT, seed=row) for row in range(ROWS)])
TRAINED = {"wq_b", "wk", "weights_proj", "k_norm"}


@functools.cache
def model(config=CONFIG):
  return random_model(config)


def placed(start, end, *, offset=0):
  """Some of the tokens behind `offset` of padding: [ROWS, T], positions."""
  tokens = np.full((ROWS, T), 7, np.int32)
  positions = np.full((ROWS, T), -1, np.int32)
  to = slice(offset, offset + end - start)
  tokens[:, to] = TOKENS[:, start:end]
  positions[:, to] = np.arange(start, end)
  return tokens, positions


@jax.jit
def run(model, tokens, positions, prefixes=(), record=NOTHING_RECORDED):
  """What a segment adds, with the loss."""
  _, delta = model(
      tokens,
      positions_BT=positions,
      prefixes=prefixes,
      recurrent=None,
      record=record,
      indexer_loss=True,
  )
  return delta


@jax.jit
def gradient(model, tokens, positions):
  """Gradient of the summed loss to every weight."""
  total = lambda model: run(model, tokens, positions).indexer_loss.sum()
  return nnx.state(jax.grad(total)(model))


@functools.cache
def whole():
  """All tokens in one segment."""
  return run(model(), *placed(0, COUNT))


@pytest.mark.parametrize("cut", [1, K - 1, K, K + 1, 2 * K, COUNT - 1])
def test_a_segment_behind_a_state_has_the_losses_of_the_whole(x64, cut):
  """Of what is stored it also needs latents, and no other layer's."""
  wanted = whole().indexer_loss[:, :COUNT]
  first = placed(0, cut)
  before = run(model(), *first)
  after = run(
      model(),
      *placed(cut, COUNT),
      (Prefix(before.slots, jnp.asarray(first[1])),),
  )
  found = np.concatenate(
      [before.indexer_loss[:, :cut], after.indexer_loss[:, : COUNT - cut]], 1
  )
  error = np.abs(found - wanted).max()
  print(f"{error:.1e} of {wanted.mean():.2f}")
  assert error < TOLERANCE
  assert not after.indexer_loss[:, COUNT - cut :].any()


def test_any_number_of_states_may_come_before(x64):
  """In any order of their slots, with holes."""
  rng = np.random.default_rng(0)
  slots, positions = whole().slots, placed(0, COUNT)[1]
  order = rng.permutation(T)
  shuffled = jax.tree.map(lambda x: x[:, :, order], slots)
  positions = positions[:, order]
  cut = 2 * K
  parts = (
      np.where((positions >= low) & (positions < high), positions, -1)
      for low, high in ((0, K // 2), (K // 2, cut))
  )
  prefixes = tuple(Prefix(shuffled, jnp.asarray(x)) for x in parts)
  found = run(model(), *placed(cut, COUNT), prefixes).indexer_loss
  wanted = whole().indexer_loss[:, cut:COUNT]
  error = np.abs(found[:, : COUNT - cut] - wanted).max()
  assert error < TOLERANCE


def test_padding_has_no_loss_wherever_it_is(x64):
  """And leaves the gradient of the rest as it is."""
  found = []
  for offset in (0, 3):
    tokens, positions = placed(0, COUNT, offset=offset)
    losses = np.asarray(run(model(), tokens, positions).indexer_loss)
    assert not losses[positions < 0].any()
    assert (losses[positions > 0] > 0).all()
    found.append((losses[positions >= 0], gradient(model(), tokens, positions)))
  assert tiny.largest_difference(*found) < TOLERANCE
  named = checkpoint_names.variables(found[0][1])
  moved = {path for path, x in named.items() if np.asarray(x[...]).any()}
  assert moved == {
      path for path, x in named.items() if isinstance(x, IndexerParam)
  }


def test_a_row_of_padding_alone_has_finite_gradients(x64):
  tokens, positions = placed(0, COUNT)
  positions[1] = -1
  found = gradient(model(), tokens, positions)
  positions = np.stack([positions[0]] * 2)
  twice = gradient(model(), np.stack([tokens[0]] * 2), positions)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
  half = jax.tree.map(lambda x: x / 2, twice)
  assert tiny.largest_difference(found, half) < TOLERANCE


def test_one_token_has_nothing_to_learn(x64):
  """A choice of one has weight 1, whatever its score."""
  losses = whole().indexer_loss
  assert np.abs(losses[:, 0]).max() < TOLERANCE < losses[:, 1].min()


def test_a_recorded_choice_has_the_same_losses(x64):
  """And another choice has others."""
  given = placed(0, COUNT)
  again = run(model(), *given, record=whole().record)
  error = np.abs(again.indexer_loss - whole().indexer_loss).max()
  assert error < TOLERANCE
  record = whole().record
  fewer = record.selections.at[..., K // 2 :].set(-1)
  other = run(model(), *given, record=record._replace(selections=fewer))
  changed = np.abs(other.indexer_loss - whole().indexer_loss)[:, :COUNT]
  assert (changed[:, K:] > TOLERANCE).all()


def test_its_gradient_does_not_choose_again(x64):
  """Index scores are sorted and merged once for each group of layers."""
  for program in (run, gradient):
    text = program.lower(model(), *placed(0, COUNT)).compile().as_text()
    lines = [line for line in text.splitlines() if " sort(" in line]
    for scope in ("index_topk", "choose"):
      assert sum(f"/{scope}/" in line for line in lines) == 2


def test_the_loss_is_made_only_where_it_is_asked_for(x64):
  def loss(model, tokens, positions, **settings):
    return model(
        tokens,
        positions_BT=positions,
        prefixes=(),
        recurrent=None,
        **settings,
    )[1].indexer_loss

  arguments = model(), *placed(0, COUNT)
  shape = lambda **settings: jax.eval_shape(
      functools.partial(loss, **settings), *arguments
  )
  assert shape() is None
  assert shape(indexer_loss=True).shape == (ROWS, T)


def test_bfloat16_activations_give_nearly_the_same_losses():
  """Float32 weights of indexers beside others in bfloat16.

  Rounding changes no choice, as none is made of tokens or experts.
  """
  changes = LAYERS | dict(
      index_topk=T, mlp_layer_types=("dense",) * 4, train_indexers=True
  )
  wide = random_model(tiny.config("tiny-glm", dtype="float32", **changes))
  narrow = random_model(tiny.config("tiny-glm", dtype="bfloat16", **changes))
  given = placed(0, COUNT)
  wanted = run(wide, *given).indexer_loss
  found = run(narrow, *given).indexer_loss
  assert found.dtype == jnp.float32
  error = np.abs(found - wanted).max() / wanted.mean()
  print(f"{error:.1e} relative")
  assert error < BF16_TOLERANCE
  gradients = checkpoint_names.variables(gradient(narrow, *given))
  for x in gradients.values():
    value = np.asarray(x[...])
    assert np.isfinite(value.astype(np.float32)).all()
    if isinstance(x, IndexerParam):
      assert value.dtype == np.float32 and value.any()


def test_weights_of_trained_indexers_are_wide():
  """All others are as they are without."""
  config = tiny.config("tiny-glm", dtype="bfloat16", **LAYERS)
  weights = {
      train: checkpoint_names.variables(
          nnx.state(abstract_model(config.replace(train_indexers=train)))
      )
      for train in (False, True)
  }
  indexers = {p for p, x in weights[True].items() if type(x) is IndexerParam}
  assert {path[path.index("indexer") + 1] for path in indexers} == TRAINED
  assert indexers == {path for path in weights[True] if "indexer" in path}
  assert weights[True].keys() == weights[False].keys()
  for path, x in weights[True].items():
    before = weights[False][path].dtype
    if path in indexers:
      assert x.dtype == jnp.float32 and before == jnp.bfloat16, path
    else:
      wide = "gate" in path  # the router
      assert x.dtype == before == (jnp.float32 if wide else jnp.bfloat16), path


@pytest.mark.parametrize(
    "changes,kind",
    [
        (dict(), nnx.Param),
        (dict(lora=LoraConfig(rank=2, alpha=4.0)), nnx.LoRAParam),
        (dict(train_indexers=True), IndexerParam),
    ],
)
def test_a_configuration_tells_what_is_trained(changes, kind):
  assert CONFIG.replace(**changes).trained is kind


def test_adapters_beside_trained_indexers_are_refused():
  lora = LoraConfig(rank=2, alpha=4.0)
  with pytest.raises(ValueError, match=r"lora=.*: want None with train_index"):
    CONFIG.replace(lora=lora, train_indexers=True)


def test_no_file_tells_that_indexers_are_trained():
  config = CONFIG.replace(train_indexers=True)
  file = config.to_hf()
  assert file == CONFIG.to_hf()
  dtypes = dict(dtype=config.dtype, param_dtype=config.param_dtype)
  for extra in ({}, {"train_indexers": True}):
    assert read_config(file | extra, **dtypes) == CONFIG
  assert read_config(file, **dtypes, train_indexers=True) == config


def test_gradients_of_indexers_come_through_index_keys_alone():
  state = LatentState(latent=jnp.zeros(1), index_key=jnp.ones(1))
  of_indexers = state.learned(IndexerParam)
  assert of_indexers.latent is None
  assert of_indexers.index_key is state.index_key
  for kind in (nnx.Param, nnx.LoRAParam):
    others = state.learned(kind)
    assert others.latent is state.latent and others.index_key is None

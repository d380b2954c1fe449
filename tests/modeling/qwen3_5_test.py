"""The decoder as a segment: splits, padding, adapters and counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling import checkpoint_names, checkpoints, layer_state, presets
from modeling.decoder_config import LoraConfig
from modeling.layer_state import KvState, Prefix
from modeling.models import parameter_count
from modeling.qwen3_5_config import Qwen3_5Config
from tests.random_model import random_model

FLOAT64_TOLERANCE = 1e-11
FLOAT64 = dict(dtype="float64", param_dtype="float64")
DENSE = presets.preset("tiny").replace(num_hidden_layers=8, **FLOAT64)
MOE = presets.preset("tiny-moe").replace(**FLOAT64)
LORA = LoraConfig(rank=2, alpha=6.0, targets=Qwen3_5Config.LINEAR_NAMES)


def segment(model, tokens, positions, prefixes=(), recurrent=None):
  """One segment; recurrent=None is the start of a sequence."""
  if recurrent is None:
    recurrent = layer_state.empty_recurrent(
        model.config, mesh=model.mesh, batch=len(tokens)
    )
  return model(
      tokens, positions_BT=positions, prefixes=prefixes, recurrent=recurrent
  )


run = jax.jit(segment)


def draw_tokens(*shape):
  return np.random.default_rng(0).integers(0, 256, shape, np.int32)


def from_zero(tokens, length=None):
  """Positions 0, 1, ...; -1 from `length` on."""
  steps = np.arange(tokens.shape[1], dtype=np.int32)
  length = tokens.shape[1] if length is None else length
  return np.broadcast_to(np.where(steps < length, steps, -1), tokens.shape)


def joined(deltas, positions):
  """The slots of several segments as one prefix."""
  slots = [delta.slots for delta in deltas]
  return Prefix(
      slots=KvState(
          k=jnp.concatenate([kv.k for kv in slots], axis=2),
          v=jnp.concatenate([kv.v for kv in slots], axis=2),
      ),
      positions=jnp.concatenate(positions, axis=1),
  )


def assert_close(ours, expected):
  chex.assert_trees_all_close(ours, expected, atol=FLOAT64_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3.6-27b", 26_895_998_464),
        ("qwen3.5-4b", 4_205_751_296),
        ("qwen3.5-0.8b", 752_393_024),
        ("qwen3.6-35b-a3b", 34_660_610_688),
    ],
)
def test_real_models_have_the_published_number_of_weights(name, count):
  assert parameter_count(presets.preset(name)) == count


def test_adapters_are_not_counted():
  config = presets.preset("tiny")
  assert parameter_count(config) == parameter_count(config.replace(lora=LORA))


def test_segments_of_any_length_follow_each_other(x64):
  model, tokens = random_model(DENSE), draw_tokens(1, 130)
  positions = from_zero(tokens)
  whole, whole_delta = run(model, tokens, positions)

  hidden, deltas, recurrent = [], [], None
  ends = [2, 65, 130]
  for start, end in zip([0, *ends[:-1]], ends, strict=True):
    part = np.s_[:, start:end]
    prefixes = (joined(deltas, [positions[:, :start]]),) if deltas else ()
    out, delta = run(model, tokens[part], positions[part], prefixes, recurrent)
    hidden.append(out)
    deltas.append(delta)
    recurrent = delta.recurrent
  assert_close(
      (jnp.concatenate(hidden, axis=1), joined(deltas, [positions]).slots),
      (whole, whole_delta.slots),
  )
  assert_close(recurrent, whole_delta.recurrent)


@pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 65, 127, 128, 129])
def test_any_cut_equals_one_pass(x64, cut):
  """Both parts are padded to one length, and so is the prefix: one program.

  The second part stands at the end of its frame or at the beginning of it.
  """
  model, tokens = random_model(DENSE), draw_tokens(1, 130)
  whole, whole_delta = run(model, tokens, from_zero(tokens))

  rest = tokens.shape[1] - cut
  empty = Prefix(
      slots=jax.tree.map(
          lambda x: jnp.zeros(x.shape, x.dtype),
          DENSE.slot_shapes(batch=1, slots=tokens.shape[1]),
      ),
      positions=np.full(tokens.shape, -1, np.int32),
  )
  nothing = layer_state.empty_recurrent(DENSE, mesh=model.mesh, batch=1)
  positions = from_zero(tokens, cut)
  first, delta = run(model, tokens, positions, (empty,), nothing)
  later = np.where(positions < 0, from_zero(tokens), -1)
  for start in (cut, 0):
    second, second_delta = run(
        model,
        np.roll(tokens, start - cut, axis=1),
        np.roll(later, start - cut, axis=1),
        (Prefix(slots=delta.slots, positions=positions),),
        delta.recurrent,
    )
    second = second[:, start : start + rest]
    assert_close(jnp.concatenate([first[:, :cut], second], axis=1), whole)
    assert_close(second_delta.recurrent, whole_delta.recurrent)


def test_padding_and_other_rows_change_nothing(x64):
  model, tokens = random_model(MOE), draw_tokens(2, 70)
  lengths = [67, 5]
  positions = np.concatenate(
      [from_zero(tokens[i : i + 1], length) for i, length in enumerate(lengths)]
  )
  both, delta = run(model, tokens, positions)
  for row, length in enumerate(lengths):
    alone = tokens[row : row + 1, :length]
    hidden, alone_delta = run(model, alone, from_zero(alone))
    assert_close(both[row : row + 1, :length], hidden)
    assert_close(
        jax.tree.map(lambda x, i=row: x[:, :, i : i + 1], delta.recurrent),
        alone_delta.recurrent,
    )


def value(model, tokens):
  """A function of all logits."""
  hidden, _ = segment(model, tokens, jnp.asarray(from_zero(tokens)))
  return jnp.sin(model.logits(hidden)).sum()


plain_value = jax.jit(value)


@jax.jit
def value_and_gradients(model, tokens):
  """The same with its gradients by leaf."""
  result, gradients = jax.value_and_grad(value)(model, tokens)
  return result, checkpoint_names.leaves(gradients)


def with_leaves(model, change):
  """A copy of the model with `change(path, leaf)` in the place of each leaf."""
  leaves = checkpoint_names.leaves(model)
  return checkpoints.assemble(
      model.config, {path: change(path, leaf) for path, leaf in leaves.items()}
  )


def without_adapters(model, *, merged):
  """A model without adapters, with kernels W or W + (alpha / rank) A B."""
  leaves = checkpoint_names.leaves(model)

  def kernel(path, leaf):
    prefix = "" if path[-1] == "kernel" else f"{path[-1]}_"
    a, b = (leaves.get((*path[:-1], f"{prefix}lora_{x}")) for x in "ab")
    if not merged or a is None:
      return leaf
    change = LORA.alpha / LORA.rank * (a @ b)
    if path[-1] == "gate_up_proj":
      change = jnp.concatenate(jnp.moveaxis(change, -3, 0), axis=-1)
    return leaf + change

  config = model.config.replace(lora=None)
  return checkpoints.assemble(
      config, {path: kernel(path, leaf) for path, leaf in leaves.items()}
  )


def test_adapters_act_as_a_change_of_the_kernels(x64):
  model, tokens = random_model(MOE.replace(lora=LORA)), draw_tokens(1, 20)
  is_b = lambda path: path[-1].endswith("lora_b")
  fresh = with_leaves(
      model, lambda path, leaf: 0.0 * leaf if is_b(path) else leaf
  )
  for adapted, merged in ((model, True), (fresh, False)):
    plain = without_adapters(model, merged=merged)
    ours, _ = value_and_gradients(adapted, tokens)
    assert_close(ours, plain_value(plain, tokens))


def test_every_adapter_gets_a_gradient(x64):
  model, tokens = random_model(MOE.replace(lora=LORA)), draw_tokens(1, 20)
  _, gradients = value_and_gradients(model, tokens)
  adapters = {p: g for p, g in gradients.items() if "lora_" in p[-1]}
  assert {path[-2] for path in adapters} == set(Qwen3_5Config.LINEAR_NAMES)
  assert all(jnp.abs(g).max() > 1e-6 for g in adapters.values())

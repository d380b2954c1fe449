"""The decoder as a segment: splits, padding, adapters and counts."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling import checkpoint_names, checkpoints, layer_state, presets
from modeling.layer_state import KvState, Prefix
from modeling.qwen3_5 import parameter_count
from modeling.qwen3_5_config import LINEAR_NAMES, LoraConfig
from tests.random_model import random_model

FLOAT64_TOLERANCE = 1e-11
FLOAT64 = dict(dtype="float64", param_dtype="float64")
DENSE = presets.preset("tiny").replace(num_hidden_layers=8, **FLOAT64)
MOE = presets.preset("tiny-moe").replace(**FLOAT64)
LORA = LoraConfig(rank=2, alpha=6.0, targets=LINEAR_NAMES)

# Programs run once: what counts is the time to compile them.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@jit
def run(model, tokens, positions, prefixes, recurrent):
  """One segment; recurrent=None is the start of a sequence."""
  if recurrent is None:
    recurrent = layer_state.empty_recurrent(model.config, batch=tokens.shape[0])
  return model(
      tokens, positions_BT=positions, prefixes=prefixes, recurrent=recurrent
  )


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


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_segments_of_any_length_follow_each_other(x64, config):
  model, tokens = random_model(config), draw_tokens(2, 136)
  positions = from_zero(tokens)
  whole, whole_delta = run(model, tokens, positions, (), None)

  hidden, deltas, recurrent = [], [], None
  ends = np.cumsum([1, 2, 61, 65, 7])
  for start, end in zip([0, *ends], ends, strict=False):
    part = np.s_[:, start:end]
    prefixes = (joined(deltas, [positions[:, :start]]),) if deltas else ()
    out, delta = run(model, tokens[part], positions[part], prefixes, recurrent)
    hidden.append(out)
    deltas.append(delta)
    recurrent = delta.recurrent
  assert end == tokens.shape[1]
  chex.assert_trees_all_close(
      (jnp.concatenate(hidden, axis=1), joined(deltas, [positions]).slots),
      (whole, whole_delta.slots),
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )
  chex.assert_trees_all_close(
      recurrent, whole_delta.recurrent, atol=FLOAT64_TOLERANCE, rtol=0
  )


@pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 65, 127, 128, 129])
def test_any_cut_equals_one_pass(x64, cut):
  """Both sides are padded to one length, and so is the prefix: one program."""
  model, tokens = random_model(DENSE), draw_tokens(1, 130)
  whole, whole_delta = run(model, tokens, from_zero(tokens), (), None)
  steps = tokens.shape[1]

  empty = Prefix(
      slots=layer_state.empty_slots(DENSE, batch=1, slots=steps),
      positions=np.full((1, steps), -1, np.int32),
  )
  first_positions = from_zero(tokens, cut)
  first, delta = run(
      model,
      tokens,
      first_positions,
      (empty,),
      layer_state.empty_recurrent(DENSE, batch=1),
  )
  shifted = np.roll(tokens, -cut, axis=1)
  second_positions = from_zero(tokens, steps - cut)
  second_positions = np.where(
      second_positions < 0, -1, second_positions + np.int32(cut)
  )
  prefix = Prefix(slots=delta.slots, positions=first_positions)
  second, second_delta = run(
      model, shifted, second_positions, (prefix,), delta.recurrent
  )
  chex.assert_trees_all_close(
      jnp.concatenate([first[:, :cut], second[:, : steps - cut]], axis=1),
      whole,
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )
  chex.assert_trees_all_close(
      second_delta.recurrent,
      whole_delta.recurrent,
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_padding_on_the_right_changes_nothing(x64, config):
  model, tokens = random_model(config), draw_tokens(2, 67)
  hidden, delta = run(model, tokens, from_zero(tokens), (), None)
  padded = np.concatenate([tokens, draw_tokens(2, 13)], axis=1)
  positions = from_zero(padded, tokens.shape[1])
  padded_hidden, padded_delta = run(model, padded, positions, (), None)
  chex.assert_trees_all_close(
      (padded_hidden[:, : tokens.shape[1]], padded_delta.recurrent),
      (hidden, delta.recurrent),
      atol=FLOAT64_TOLERANCE,
      rtol=0,
  )


def test_rows_of_unequal_length_do_not_meet(x64):
  model, tokens = random_model(MOE), draw_tokens(2, 67)
  positions = np.concatenate(
      [from_zero(tokens[:1]), from_zero(tokens[1:], 5)], axis=0
  )
  both, delta = run(model, tokens, positions, (), None)
  for row, length in enumerate([67, 5]):
    one = np.s_[row : row + 1]
    alone, alone_delta = run(model, tokens[one], positions[one], (), None)
    chex.assert_trees_all_close(
        (both[one, :length], delta.recurrent.recurrent[:, :, one]),
        (alone[:, :length], alone_delta.recurrent.recurrent),
        atol=FLOAT64_TOLERANCE,
        rtol=0,
    )


@jit
def run_logits(model, tokens):
  hidden, _ = run(model, tokens, from_zero(tokens), (), None)
  return model.logits(hidden)


@jit
def adapter_gradients(model, tokens):
  gradients = jax.grad(lambda model: jnp.sin(run_logits(model, tokens)).sum())(
      model
  )
  return adapters(gradients)


def adapters(model):
  leaves = checkpoint_names.leaves(model)
  return {
      ".".join(path): leaf
      for path, leaf in leaves.items()
      if "lora" in path[-1]
  }


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
    a, b = (leaves.get((*path[:-1], name)) for name in ("lora_a", "lora_b"))
    return leaf if a is None or not merged else leaf + 3.0 * (a @ b)

  config = model.config.replace(lora=None)
  return checkpoints.assemble(
      config, {path: kernel(path, leaf) for path, leaf in leaves.items()}
  )


def test_adapters_act_as_a_change_of_the_kernels(x64):
  model, tokens = random_model(MOE.replace(lora=LORA)), draw_tokens(1, 20)
  zero_b = with_leaves(
      model, lambda path, leaf: 0.0 * leaf if path[-1] == "lora_b" else leaf
  )
  for adapted, merged in ((model, True), (zero_b, False)):
    plain = without_adapters(model, merged=merged)
    chex.assert_trees_all_close(
        run_logits(adapted, tokens),
        run_logits(plain, tokens),
        atol=FLOAT64_TOLERANCE,
        rtol=0,
    )


def test_every_adapter_gets_a_gradient(x64):
  model = random_model(MOE.replace(lora=LORA))
  gradients = adapter_gradients(model, draw_tokens(1, 20))
  assert {name.split(".")[-2] for name in gradients} == set(LINEAR_NAMES)
  assert all(jnp.abs(leaf).max() > 1e-6 for leaf in gradients.values())

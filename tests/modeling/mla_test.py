"""Absorbed latent attention is the expanded form, adapters included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling import checkpoint_names
from modeling.decoder_config import LoraConfig
from modeling.indexer import recall
from modeling.layer_state import LatentState, Prefix
from modeling.mla import MLA
from modeling.rope import rotation
from modeling.sharding import make_mesh
from tests import tiny

TOLERANCE = 1e-12
CONFIG = tiny.config("tiny-glm")
T, START = 12, 1_000_000  # tokens, and the position of the first
LAYER, LAYERS = 3, 5


def layer(lora, *, seed=0):
  """An attention layer with every weight drawn at random."""
  config = CONFIG.replace(lora=lora)
  abstract = nnx.eval_shape(
      lambda: MLA(config, indexed=False, mesh=make_mesh(), rngs=nnx.Rngs(0))
  )
  graphdef, state = nnx.split(abstract)
  rng = np.random.default_rng(seed)
  flat = []
  for path, variable in checkpoint_names.variables(state).items():
    value = rng.normal(size=variable.shape)
    value *= 1.0 if path[-1] == "weight" else variable.shape[-2] ** -0.5
    flat.append((path, variable.replace(jnp.asarray(value))))
  return nnx.merge(graphdef, nnx.from_flat_state(flat))


def rms(x, norm):
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
  return x * np.asarray(norm.weight[...])


def turn(x, positions):
  """Rope on interleaved pairs, which stay where they are."""
  size = x.shape[-1]
  frequencies = CONFIG.rope.rope_theta ** (-np.arange(0, size, 2) / size)
  frequencies = frequencies.astype(np.float32).astype(np.float64)
  phase = positions[:, None] * frequencies
  pairs = x.reshape(*x.shape[:-1], -1, 2)
  pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * phase)
  return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def expanded(mla, x, selected):
  """Every key and value made of its latent, for one sequence [T,D]."""

  def apply(linear, x):
    y = x @ np.asarray(linear.kernel[...])
    if linear.lora_a is not None:
      a, b = np.asarray(linear.lora_a[...]), np.asarray(linear.lora_b[...])
      y += linear.lora_scale * (x @ a) @ b
    return y

  heads, nope = CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim
  rank = CONFIG.kv_lora_rank
  positions = START + np.arange(len(x))
  q = apply(mla.q_b_proj, rms(apply(mla.q_a_proj, x), mla.q_a_layernorm))
  q = q.reshape(len(x), heads, -1)
  both = apply(mla.kv_a_proj_with_mqa, x)
  kv = apply(mla.kv_b_proj, rms(both[:, :rank], mla.kv_a_layernorm))
  kv = kv.reshape(len(x), heads, -1)
  key_rope = turn(both[:, rank:], positions)
  out = np.zeros((len(x), heads, CONFIG.v_head_dim))
  for h in range(heads):
    query_rope = turn(q[:, h, nope:], positions)
    scores = q[:, h, :nope] @ kv[:, h, :nope].T + query_rope @ key_rope.T
    scores = np.where(selected, scores / np.sqrt(CONFIG.qk_head_dim), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[:, h] = weights @ kv[:, h, nope:]
  return apply(mla.o_proj, out.reshape(len(x), -1))


@jax.jit
def attend(mla, x, selections, positions, prefixes):
  """Output and latents of a segment that attends to given positions."""
  by = rotation(
      positions,
      config=CONFIG.rope,
      head_dim=CONFIG.qk_rope_head_dim,
      dtype=x.dtype,
  )
  chosen = recall(
      selections, positions_BT=positions, prefixes=prefixes, mesh=mla.mesh
  )
  return mla(
      x,
      mla.query_latent(x),
      rotation=by,
      prefixes=prefixes,
      layer=jnp.int32(LAYER),
      choice=chosen.choice,
  )


@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=2, alpha=6.0)], ids=["plain", "adapters"]
)
@pytest.mark.parametrize("cut", [0, 5], ids=["one pass", "behind a state"])
def test_the_absorbed_form_is_the_expanded_one(x64, lora, cut):
  mla = layer(lora)
  rng = np.random.default_rng(1)
  x = rng.normal(size=(1, T, CONFIG.hidden_size))
  # Each token sees itself and some of those before it.
  selected = (np.tri(T) * (rng.random((T, T)) < 0.5) + np.eye(T)) > 0
  selections = np.where(selected, START + np.arange(T), -1)[None]
  selections = jnp.asarray(selections, jnp.int32)
  positions = jnp.asarray(START + np.arange(T), jnp.int32)[None]

  def run(part, prefixes):
    found = attend(
        mla, x[:, part], selections[:, part], positions[:, part], prefixes
    )
    return found[:2]

  outs, prefixes = [], ()
  if cut:
    out, latent = run(slice(cut), ())
    stack = jnp.full((LAYERS, *latent.shape), jnp.nan).at[LAYER].set(latent)
    state = LatentState(latent=stack, index_key=None)
    prefixes = (Prefix(state, positions[:, :cut]),)
    outs.append(out)
  out, _ = run(slice(cut, None), prefixes)
  found = np.concatenate([*outs, out], 1)[0]
  error = np.abs(found - expanded(mla, x[0], selected)).max()
  print(f"{error:.1e}")
  assert error < TOLERANCE

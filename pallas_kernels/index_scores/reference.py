"""The oracle: the products with all keys at once, and JAX's own gradient."""

import jax
import jax.numpy as jnp

from pallas_kernels.latent_attention.reference import mask_entries
from pallas_kernels.shapes import wide


def score(
    q_BTIK: jax.Array,
    weights_BTI: jax.Array,
    keys_LBSK: jax.Array,
    sink: jax.Array | None,
    slots_BTJ: jax.Array,
    counts_BT: jax.Array,
    layer: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the scores [B,T,J], and the sink."""
  keys_BSK = wide(jax.lax.stop_gradient(keys_LBSK[layer]))
  if sink is not None:
    # A zero whose cotangent is the keys'.
    keys_BSK += sink[layer] - jax.lax.stop_gradient(sink[layer])
  products_BTIS = jnp.einsum("btik,bsk->btis", wide(q_BTIK), keys_BSK)
  scores_BTS = jnp.einsum(
      "bti,btis->bts", weights_BTI, jax.nn.relu(scale * products_BTIS)
  )
  slots_BTJ, real_BTJ = mask_entries(slots_BTJ, counts_BT)
  scores_BTJ = jnp.take_along_axis(scores_BTS, slots_BTJ, -1)
  return jnp.where(real_BTJ, scores_BTJ, -jnp.inf), sink

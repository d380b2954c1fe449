"""Does a model fit a mesh? Known from its configuration, before a weight is."""

import math

from flax import nnx
from jax.sharding import Mesh

from modeling.qwen3_5 import abstract_model
from modeling.qwen3_5_config import Qwen3_5Config
from modeling.sharding import check_fits

_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def check_mesh(config: Qwen3_5Config, mesh: Mesh) -> None:
  """Refuses a mesh that does not divide the model's heads and weights.

  A head is never cut, though the columns of its weights could be.

  Raises:
    ValueError: names what is not divided, and by what.
  """
  tensor = mesh.shape["tensor"]
  heads = {name: getattr(config, name) for name in _HEADS}
  wrong = [f"{name}={n}" for name, n in heads.items() if n % tensor]
  if wrong:
    raise ValueError(
        f"mesh.tensor={tensor}: want a divisor of {math.gcd(*heads.values())},"
        f" so that no head is cut; it does not divide {', '.join(wrong)}"
    )
  check_fits(nnx.state(abstract_model(config, mesh=mesh)), mesh)

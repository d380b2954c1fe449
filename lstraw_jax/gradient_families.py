"""Families of weights: the part of the model that each trained leaf is of.

One table over the names of leaves says it. With tied embeddings, the gradient
of the head is part of "embedding", since they are one weight.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

# The names are those of `named_leaves`; * stands for any text, dots included.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens",),
    "q": ("*.self_attn.q_proj.*",),
    "k": ("*.self_attn.k_proj.*",),
    "v": ("*.self_attn.v_proj.*",),
    "q down": ("*.self_attn.q_a_proj.*",),
    "q up": ("*.self_attn.q_b_proj.*",),
    "kv down": ("*.self_attn.kv_a_proj_with_mqa.*",),
    "kv up": ("*.self_attn.kv_b_proj.*",),
    "o": ("*.self_attn.o_proj.*",),
    "GDN qkv": ("*.linear_attn.in_proj_qkv.*",),
    "GDN z": ("*.linear_attn.in_proj_z.*",),
    "GDN b, a": ("*.linear_attn.in_proj_b.*", "*.linear_attn.in_proj_a.*"),
    "GDN out": ("*.linear_attn.out_proj.*",),
    "conv": ("*.linear_attn.conv1d",),
    "decay": ("*.linear_attn.A_log", "*.linear_attn.dt_bias"),
    "norms": ("*norm.weight",),
    "MLP": ("*.mlp.gate_proj.*", "*.mlp.up_proj.*", "*.mlp.down_proj.*"),
    "router": ("*.mlp.gate", "*.mlp.gate.kernel"),
    "experts": ("*.mlp.experts.*",),
    "shared expert": (
        "*.mlp.shared_expert.*",
        "*.mlp.shared_expert_gate.*",
        "*.mlp.shared_experts.*",
    ),
    "head": ("lm_head.*",),
}
_ADAPTERS = {"lora_a": " A", "lora_b": " B"}  # y = x W + scale (x A) B


def by_family(names: Iterable[str]) -> dict[str, list[str]]:
  """Returns the names of each family, families in the order of the table.

  The A and B of adapters are families of their own: "q A", "q B".

  Args:
    names: of leaves, see `named_leaves`.

  Raises:
    ValueError: for a name that is not of exactly one family.
  """
  order = [f"{family}{end}" for family in FAMILIES for end in _ENDS]
  found: dict[str, list[str]] = {}
  for name in names:
    found.setdefault(_family(name), []).append(name)
  return {family: found[family] for family in order if family in found}


_ENDS = ("", *_ADAPTERS.values())


def _family(name: str) -> str:
  fits = [
      family
      for family, patterns in FAMILIES.items()
      if any(fnmatchcase(name, pattern) for pattern in patterns)
  ]
  if len(fits) != 1:
    raise ValueError(
        f"weight={name!r} is of families {fits}: want exactly one. Extend the"
        " table in lstraw_jax/gradient_families.py"
    )
  ends = (end for last, end in _ADAPTERS.items() if name.endswith(last))
  return fits[0] + next(ends, "")

"""Every weight is of exactly one family."""

import pytest

from lstraw_jax import gradient_families
from lstraw_jax.gradient_families import FAMILIES, by_family
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.policy import make_policy
from modeling.decoder_config import LoraConfig
from modeling.models import abstract_model
from tests import tiny

PROJECTIONS = [
    "q", "k", "v", "o", "GDN qkv", "GDN z", "GDN b, a", "GDN out"
]  # fmt: skip
LATENT = ["q down", "q up", "kv down", "kv up", "o"]
ADAPTED = {"lora": tiny.ALL_ADAPTERS}
GLM_ADAPTED = {"lora": LoraConfig(rank=2, alpha=4.0)}
SHARED = ["embedding", *PROJECTIONS, "conv", "decay", "norms"]


def leaves(name="tiny", **changes):
  model = abstract_model(tiny.config(name, dtype="float32", **changes))
  return named_leaves(make_policy(model).trainable)


def adapted(families):
  return [f"{family} {end}" for family in families for end in "AB"]


@pytest.mark.parametrize(
    "kind,changes,families",
    [
        ("tiny", {}, [*SHARED, "MLP", "head"]),
        ("tiny", {"tie_word_embeddings": True}, [*SHARED, "MLP"]),
        (
            "tiny-moe",
            {},
            [*SHARED, "router", "experts", "shared expert", "head"],
        ),
        ("tiny", ADAPTED, adapted([*PROJECTIONS, "MLP", "head"])),
        (
            "tiny-moe",
            ADAPTED,
            adapted([*PROJECTIONS, "experts", "shared expert", "head"]),
        ),
        (
            "tiny-glm",
            {},
            [
                "embedding",
                *LATENT,
                "norms",
                "MLP",
                "router",
                "experts",
                "shared expert",
                "head",
            ],
        ),
        (
            "tiny-glm",
            GLM_ADAPTED,
            adapted([*LATENT, "MLP", "experts", "shared expert", "head"]),
        ),
    ],
)
def test_families_part_all_weights(kind, changes, families):
  names = list(leaves(kind, **changes))
  found = by_family(names)
  assert list(found) == families
  assert sorted(name for group in found.values() for name in group) == sorted(
      names
  )


def test_the_families_of_a_mixture_hold_what_they_say():
  found = by_family(leaves("tiny-moe"))
  ends = lambda family: {
      name.partition(".mlp.")[2]
      for name in found[family]
      if ".full_layer." in name
  }
  assert ends("router") == {"gate"}
  assert ends("experts") == {"experts.gate_up_proj", "experts.down_proj"}
  assert ends("shared expert") == {
      "shared_expert_gate.kernel",
      *(f"shared_expert.{x}_proj.kernel" for x in ("gate", "up", "down")),
  }
  assert len(found["norms"]) == 8  # four of a full layer, three, and the last


def test_the_families_of_a_mixture_behind_a_sigmoid_hold_what_they_say():
  found = by_family(leaves("tiny-glm"))
  ends_of = lambda names: {name.partition(".mlp.")[2] for name in names}
  ends = lambda family: ends_of(found[family])
  assert ends("router") == {"gate.kernel"}  # its bias is not trained
  assert ends("experts") == {"experts.gate_up_proj", "experts.down_proj"}
  assert ends("shared expert") == {
      f"shared_experts.{x}_proj.kernel" for x in ("gate", "up", "down")
  }
  adapted = by_family(leaves("tiny-glm", **GLM_ADAPTED))
  for end, family in (("a", "experts A"), ("b", "experts B")):
    assert ends_of(adapted[family]) == {
        f"experts.gate_up_proj_lora_{end}", f"experts.down_proj_lora_{end}"
    }  # fmt: skip


def test_a_weight_of_no_family_is_refused_by_name():
  with pytest.raises(ValueError, match=r"'blocks.x.indexer.wq' is of .*\[\]"):
    by_family(["embed_tokens", "blocks.x.indexer.wq"])


def test_a_weight_of_two_families_is_refused(monkeypatch):
  twice = {**FAMILIES, "second": ("lm_head.kernel",)}
  monkeypatch.setattr(gradient_families, "FAMILIES", twice)
  with pytest.raises(ValueError, match=r"\['head', 'second'\]: want exactly"):
    by_family(["lm_head.kernel"])

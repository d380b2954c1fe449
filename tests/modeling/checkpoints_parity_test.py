"""Checkpoints of transformers, through our model and back, to the bit."""

import pytest

from modeling import checkpoints

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests import torch_oracle  # noqa: E402, it imports torch

pytestmark = pytest.mark.reference

YARN = dict(factor=4.0, original_max_position_embeddings=1024)
VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=32,
    num_position_embeddings=16,
    patch_size=2,
    temporal_patch_size=1,
)


def logits(model):
  tokens = torch.randint(0, 96, (2, 70), generator=torch.Generator())
  with torch.no_grad():
    return model(input_ids=tokens).logits


def reloaded(directory):
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      directory, attn_implementation="eager", output_loading_info=True
  )
  assert not any(info.values()), info
  return model.eval()


def through_ours(source, out, dtype):
  """Reads a checkpoint with our model and writes it again."""
  config = checkpoints.load_config(source, dtype=dtype, param_dtype=dtype)
  model, report = checkpoints.load_model(source, config=config)
  checkpoints.save_model(model, out)
  return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    [dict(), dict(moe=True), dict(tied=True, yarn=YARN)],
    ids=["dense", "moe", "tied-yarn"],
)
def test_logits_are_the_same_bits(tmp_path, kind, dtype):
  source, out = tmp_path / "source", tmp_path / "out"
  torch_oracle.build(**kind, dtype=getattr(torch, dtype)).save_pretrained(
      source
  )
  through_ours(source, out, dtype)
  theirs, back = reloaded(source), reloaded(out)
  assert type(back) is type(theirs)
  assert back.dtype == theirs.dtype == getattr(torch, dtype)
  assert torch.equal(logits(back), logits(theirs))


def test_the_text_part_of_a_vision_language_model_is_read(tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  text = torch_oracle.build(dtype=torch.float32)
  config = transformers.Qwen3_5Config(
      text_config=text.config.to_dict(), vision_config=VISION
  )
  wrapped = transformers.Qwen3_5ForConditionalGeneration._from_config(
      config, attn_implementation="eager"
  )
  torch_oracle.randomise(wrapped)
  wrapped.save_pretrained(source)
  report = through_ours(source, out, "float32")
  visual = [n for n, _ in wrapped.named_parameters() if ".visual." in n]
  assert sorted(report.vision) == sorted(visual)
  assert torch.equal(logits(reloaded(out)), logits(wrapped.eval()))

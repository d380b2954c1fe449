"""Checkpoints of transformers, through our model and back, to the bit."""

from functools import partial

import pytest

from modeling import checkpoint_files, checkpoints

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests import glm_oracle, torch_oracle  # noqa: E402, they import torch

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


MODELS = {
    "dense": torch_oracle.build,
    "moe": partial(torch_oracle.build, moe=True),
    "tied-yarn": partial(torch_oracle.build, tied=True, yarn=YARN),
    "glm-sharing": glm_oracle.build,
    "glm-all-full": partial(glm_oracle.build, sharing=False),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_the_same_bits(tmp_path, kind, dtype):
  source, out = tmp_path / "source", tmp_path / "out"
  MODELS[kind](dtype=getattr(torch, dtype)).save_pretrained(source)
  through_ours(source, out, dtype)
  theirs, back = reloaded(source), reloaded(out)
  assert type(back) is type(theirs)
  assert back.dtype == theirs.dtype == getattr(torch, dtype)
  assert torch.equal(logits(back), logits(theirs))


@pytest.mark.parametrize("sharing", [True, False])
def test_a_saved_glm_has_the_tensors_and_schedules_of_theirs(tmp_path, sharing):
  source, out = tmp_path / "source", tmp_path / "out"
  theirs = glm_oracle.build(sharing=sharing, dtype=torch.float32)
  theirs.save_pretrained(source)
  through_ours(source, out, "float32")
  assert stored(out) == stored(source)
  before, after = (
      transformers.AutoConfig.from_pretrained(directory).to_dict()
      for directory in (source, out)
  )
  for name in ("_name_or_path", "max_position_embeddings"):
    before[name] = after[name]
  assert after.items() >= before.items()


def stored(directory):
  """Names, dtypes and shapes of the tensors of a file."""
  with checkpoint_files.open_tensors(directory) as tensors:
    return {name: (x.dtype, x.shape) for name, x in tensors.items()}


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

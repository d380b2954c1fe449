"""GLM-5 decoders: what holds of the whole model beside parity."""

import pytest
from flax import nnx

from lstraw_jax.capacity.stage_programs import StagePrograms
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.models import abstract_model
from modeling.presets import preset
from modeling.sharding import make_mesh
from tests import tiny


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-glm"])
def test_models_of_one_configuration_share_compiled_programs(name):
  config = tiny.config(name, dtype="float32")
  assert nnx.graphdef(abstract_model(config)) == nnx.graphdef(
      abstract_model(config)
  )


def test_a_backward_pass_does_not_choose_again():
  """Index scores are sorted once for each set of keys, and merged once."""
  workload = Workload(
      model=tiny.config("tiny-glm", dtype="float32"),
      prompt_tokens=1000,
      response_tokens=8,
      group_size=1,
      update=UpdateConfig(
          prompt_gradient="exact",
          capture_chunk_tokens=64,
          replay=ReplayConfig(block_tokens=8),
      ),
  )
  stages = StagePrograms(workload, make_mesh())
  sorts = {}
  for stage in ("capture", "prompt_gradient"):
    text = stages.lower(stage).compile().as_text()
    lines = [line for line in text.splitlines() if " sort(" in line]
    sorts[stage] = [
        sum(f"/{scope}/" in line for line in lines)
        for scope in ("index_topk", "choose")
    ]
  assert sorts["capture"] == sorts["prompt_gradient"] == [2, 1]


def test_what_the_architecture_has_not_is_refused():
  config = preset("tiny-glm")
  with pytest.raises(ValueError, match=r"tie_word_embeddings=True: want False"):
    config.replace(tie_word_embeddings=True)
  with pytest.raises(ValueError, match=r"mesh\.tensor=2: want 1"):
    config.check_tensor(2)

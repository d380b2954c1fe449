"""A run that cannot fit its devices is refused before it allocates."""

import pytest

from experiments import fit_check
from experiments.configs import base, sft_base
from experiments.fit_check import Extent, check_fits
from experiments.requests import make_requests
from experiments.settings import read_settings
from lstraw_jax.capacity.memory_plan import plan_memory
from lstraw_jax.capacity.workload import Workload
from tests import binaries

SMALL = {
    "data.prompt_tokens": 64,
    "sampling.max_tokens": 4,
    "train.capture_chunk_tokens": 32,
    "train.steps": 1,
}


def grpo(**memory):
  config = base.get_config()
  with config.unlocked():
    for name, value in SMALL.items():
      section, field = name.split(".")
      config[section][field] = value
  config.memory.update(memory)
  return config


def check(config, extent, *, force=False):
  settings = read_settings(config)
  check_fits(
      config,
      extent,
      model=settings.model,
      mesh=settings.mesh,
      update=settings.update,
      optimizer=settings.optimizer,
      force=force,
  )
  return settings


def peak(settings, extent) -> int:
  workload = Workload(
      model=settings.model,
      **extent._asdict(),
      update=settings.update,
      optimizer=settings.optimizer,
  )
  return plan_memory(workload).peak


EXTENT = Extent(prompt_tokens=65_536, response_tokens=128, group_size=8)


def test_a_run_that_fits_to_the_byte_starts_and_one_less_is_refused():
  settings = check(grpo(), EXTENT)  # a CPU does not tell: nothing is compared
  needed = peak(settings, EXTENT)
  check(grpo(device_bytes=needed), EXTENT)
  with pytest.raises(ValueError, match=r"state\.memory_kind=pinned_host"):
    check(grpo(device_bytes=needed - 1), EXTENT)


def test_the_device_is_asked_where_no_number_is_given(monkeypatch):
  needed = peak(read_settings(grpo()), EXTENT)
  monkeypatch.setattr(fit_check, "device_memory", lambda: needed - 1)
  with pytest.raises(ValueError, match="a device, in replay, of the "):
    check(grpo(), EXTENT)
  check(grpo(device_bytes=needed), EXTENT)


def test_a_negative_number_of_bytes_is_refused():
  with pytest.raises(ValueError, match=r"memory\.device_bytes=-1: want"):
    check(grpo(device_bytes=-1), EXTENT)


def test_force_says_so_and_goes_on(capsys):
  check(grpo(device_bytes=1), EXTENT, force=True)
  assert "started because of --force" in capsys.readouterr().out


def test_the_extent_of_the_text_task_is_that_of_its_settings():
  config = grpo()
  requests = make_requests(config, read_settings(config))
  assert requests.extent == Extent(64, 4, config.train.group_size)


@pytest.mark.parametrize(
    "name, config", [("train_grpo", "tiny"), ("train_sft", "sft")]
)
def test_a_binary_refuses_before_it_makes_anything(tmp_path, name, config):
  workdir = tmp_path / "run"
  settings = {"memory.device_bytes": 1000}
  binaries.expect_mistake(
      binaries.command(name, workdir=workdir, settings=settings, config=config),
      "the run needs about",
      workdir=workdir,
  )


def test_every_kind_of_training_has_the_setting():
  assert sft_base.get_config().memory == base.get_config().memory

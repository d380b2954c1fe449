"""How far an update goes, and what would help it to go further."""

import dataclasses

import pytest

from lstraw_jax.capacity.advice import advise, longest_prompt, peak_bytes
from lstraw_jax.capacity.memory_plan import plan_memory
from lstraw_jax.capacity.tables import verdict
from lstraw_jax.capacity.targets import Machine, find_machine
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import LoraConfig
from modeling.presets import preset

GB = 10**9


def workload(*, lora=True, prompt_tokens=2_097_152, **update) -> Workload:
  model = preset("qwen3.6-27b")
  if lora:
    model = model.replace(lora=LoraConfig(rank=16, alpha=16.0))
  else:
    model = model.replace(param_dtype="float32")
  return Workload(
      model=model,
      context=8,
      prompt_tokens=prompt_tokens,
      response_tokens=8192,
      group_size=8,
      update=UpdateConfig(
          **dict(prompt_gradient="dropped", capture_chunk_tokens=8192) | update
      ),
  )


def of_length(plan, tokens):
  return dataclasses.replace(plan, prompt_tokens=tokens)


@pytest.mark.parametrize("limit", [20 * GB, 80 * GB, 150 * GB])
def test_the_longest_prompt_fits_and_the_next_does_not(limit):
  plan = workload()
  longest = longest_prompt(plan, limit)
  assert longest > 1
  assert peak_bytes(of_length(plan, longest)) <= limit
  assert peak_bytes(of_length(plan, longest + 1)) > limit


def test_there_is_none_where_the_weights_alone_do_not_fit():
  assert longest_prompt(workload(), GB) == 0


def test_the_papers_machine_takes_what_the_issue_asks():
  """LoRA on 8 H20-3e: 8,388,608 tokens dropped, 2,097,152 exact."""
  limit = find_machine("h20-3e:8").target.memory_bytes
  assert limit is not None
  assert longest_prompt(workload(), limit) > 8_388_608
  assert longest_prompt(workload(prompt_gradient="exact"), limit) > 2_097_152
  assert peak_bytes(workload()) <= 40 * GB
  assert peak_bytes(workload(prompt_tokens=4_456_448)) <= 60 * GB
  assert peak_bytes(workload(prompt_gradient="exact")) <= 100 * GB
  narrow = workload(prompt_gradient="exact", cotangent_dtype="bfloat16")
  assert peak_bytes(narrow) <= 70 * GB


def test_advice_tells_what_it_gives_and_puts_first_what_suffices():
  plan = workload(lora=False, prompt_gradient="exact")
  limit = 100 * GB
  assert peak_bytes(plan) > limit
  found = advise(plan, limit)
  peaks = {advice.setting: advice.peak for advice in found}
  assert peaks["lora.rank=16"] == peak_bytes(
      dataclasses.replace(plan, model=workload().model)
  )
  assert peaks["train.cotangent_dtype=bfloat16"] == peak_bytes(
      workload(lora=False, prompt_gradient="exact", cotangent_dtype="bfloat16")
  )
  assert peaks["mesh.context=16"] < 0.6 * peak_bytes(plan)
  enough = [advice.peak <= limit for advice in found]
  assert enough == sorted(enough, reverse=True)
  assert all(advice.peak < peak_bytes(plan) for advice in found)


def test_host_memory_is_advised_with_what_it_takes_there():
  (there,) = (
      advice
      for advice in advise(workload(), 10 * GB)
      if advice.setting == "state.memory_kind=pinned_host"
  )
  assert there.host == plan_memory(workload()).stages[
      "capture"
  ].prompt_state - (
      plan_memory(workload(memory_kind="pinned_host"))
      .stages["capture"]
      .prompt_state
  )


def test_what_is_set_already_is_not_advised():
  plan = workload(
      prompt_gradient="exact",
      cotangent_dtype="bfloat16",
      memory_kind="pinned_host",
  )
  settings = {advice.setting for advice in advise(plan, GB)}
  assert not settings & {
      "lora.rank=16",
      "train.cotangent_dtype=bfloat16",
      "state.memory_kind=pinned_host",
  }
  assert "capture.memory_kind=pinned_host" in settings
  assert "optimizer.memory_kind=pinned_host" in settings


def test_the_verdict_says_by_how_much():
  plan = plan_memory(workload())
  fits = verdict(plan, Machine("h20-3e", 8))
  assert fits.startswith("FITS: peak") and "to spare" in fits
  long = plan_memory(workload(prompt_tokens=33_554_432))
  assert "DOES NOT FIT" in verdict(long, Machine("h20-3e", 8))
  short = long.peak - find_machine("h20-3e").target.memory_bytes
  assert f"{short / 1e9:,.2f} GB too few" in verdict(long, Machine("h20-3e", 8))
  assert "not known" in verdict(plan, Machine("cpu", 8))

"""The planner as a user starts it."""

import json
import pathlib
import sys

import pytest

from lstraw_jax.capacity.tables import in_band
from lstraw_jax.capacity.topology import missing_extra
from tests import binaries

_APART = pathlib.Path(__file__).parents[2] / ".venv-plan/bin/python"
needs_compiler = pytest.mark.skipif(
    missing_extra("cuda") is not None and not _APART.exists(),
    reason="no compiler for absent GPUs: make plan-env",
)

REAL = [
    "--model=qwen3.6-27b",
    "--target=h20-3e:8",
    "--prompt_tokens=2097152",
    "--response_tokens=8192",
    "--group_size=8",
    "--trainable=lora:16",
]
GLM = [
    "--model=glm-5.2",
    "--target=h20-3e:32",
    "--prompt_tokens=2097152",
    "--response_tokens=1024",
    "--group_size=2",
    "--trainable=lora:8",
]
SMALL = ["--model=tiny", "--prompt_tokens=4097", "--chunk_tokens=512"]


def plan(*flags, out):
  ended = binaries.run(command(*flags, f"--out={out}"))
  assert ended.returncode == 0, ended.stderr
  return ended.stdout, json.loads((out / "plan.json").read_text())


def command(*flags):
  return [sys.executable, "-m", "experiments.plan_capacity", *flags]


def test_the_real_model_is_planned_without_a_device(tmp_path):
  shown, found = plan(*REAL, out=tmp_path)
  assert "FITS: peak" in shown
  assert f"{found['peak_bytes'] / 1e9:,.2f} GB a device" in shown
  assert f"{found['longest_prompt_tokens']:,} tokens" in shown
  assert list(found["planned"]) == ["capture", "score", "replay", "optimizer"]
  assert found["device_bytes"] == 150_754_820_096
  assert found["costs"]["capture"]["flops"] > 1e17
  assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_so_is_one_of_another_family(tmp_path):
  shown, found = plan(*GLM, out=tmp_path)
  assert "FITS: peak" in shown
  assert found["longest_prompt_tokens"] > 2_097_152
  assert list(found["planned"]) == ["capture", "score", "replay", "optimizer"]
  assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
  shown, _ = plan("--model=tiny-glm", "--target=cpu:8", out=tmp_path)
  assert "the memory of cpu is not known" in shown


def test_what_does_not_fit_is_said_with_what_would_help(tmp_path):
  shown, found = plan(
      *REAL,
      "--trainable=full",
      "--prompt_gradient=exact",
      "--target=h100:8",
      out=tmp_path,
  )
  assert "DOES NOT FIT" in shown and "GB too few" in shown
  assert "--trainable=lora:16" in shown
  assert "--state_memory=pinned_host" in shown
  assert found["longest_prompt_tokens"] < 2_097_152


def test_host_memory_is_planned_for_each_host(tmp_path):
  shown, found = plan(*REAL, "--state_memory=pinned_host", out=tmp_path)
  share = found["host_bytes_per_device"]
  assert share == 65_536 * 2_097_152 // 8
  assert f"{8 * share / 1e9:,.2f} GB a host" in shown
  assert "if the host has room" in shown


@pytest.mark.first_class
def test_the_compiler_is_asked_in_another_process(tmp_path):
  shown, found = plan(
      *SMALL,
      "--target=cpu:8",
      "--prompt_gradient=exact",
      "--compile",
      out=tmp_path,
  )
  assert list(found["compiled"]) == list(found["planned"])
  assert "peak / compiled" in shown
  assert "the plan and the compiler disagree" in shown  # it is that small
  assert "the memory of cpu is not known" in shown
  assert found["longest_prompt_tokens"] is None


@needs_compiler
@pytest.mark.first_class
def test_programs_are_compiled_for_gpus_that_are_not_there(tmp_path):
  shown, found = plan(
      *SMALL,
      "--prompt_tokens=262144",
      "--target=h200:8",
      "--compile",
      out=tmp_path,
  )
  peaks = [
      max(sum(stage.values()) for stage in found[engine].values())
      for engine in ("planned", "compiled")
  ]
  assert in_band(peaks[0] / peaks[1]), shown


@needs_compiler
@pytest.mark.first_class
def test_no_stage_copies_the_prompt(tmp_path):
  """Left alone, XLA lays keys, values or their sums out anew: all of them."""
  found = []
  for prompt_tokens in (65_536, 262_144):
    _, numbers = plan(
        *SMALL,
        f"--prompt_tokens={prompt_tokens}",
        "--target=h200:1",
        "--prompt_gradient=exact",
        "--compile",
        out=tmp_path,
    )
    found.append(numbers["compiled"])
  for stage in ("capture", "score", "replay", "prompt_gradient"):
    few, many = (stages[stage]["temporaries"] for stages in found)
    grown = (many - few) / (262_144 - 65_536)
    print(f"{stage}: {grown:.2f} bytes a prompt token")
    assert grown < 5, stage  # which slots a chunk sees; the state has 512


@needs_compiler
@pytest.mark.first_class
def test_the_real_model_keeps_its_promise_when_compiled(tmp_path):
  """The paper: 97.7e9 bytes a device for a group of 8, 0.21e9 less for 2."""
  peaks = {}
  for group in (2, 8):
    shown, found = plan(
        *REAL, f"--group_size={group}", "--compile", out=tmp_path
    )
    compiled = found["compiled"].values()
    peaks[group] = max(sum(stage.values()) for stage in compiled)
    print(shown)
  assert peaks[8] <= 40e9
  assert abs(peaks[8] - peaks[2]) < 0.1e9


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--target=h20-3f:8", "want one of h20-3e, h20, h100, h200, b200"),
        ("--target=h200:none", "want a number of devices"),
        ("--model=qwen3.6-27c", "did you mean 'qwen3.6-27b'"),
        ("--model=no/such/folder", "no/such/folder"),
        ("--prompt_tokens=0", "prompt_tokens=0: want at least 1"),
        ("--response_tokens=-5", "response_tokens=-5: want at least 1"),
        ("--chunk_tokens=1001", "want a multiple of the context=8"),
        ("--block_tokens=1001", "block_tokens=1001: want a multiple of"),
        ("--chunk_tokens=0", "capture_chunk_tokens=0: want at least 1"),
        ("--trainable=lora", "want 'full', or 'lora:RANK'"),
        ("--trainable=lora:0", "lora.rank=0: want at least 1"),
        ("--prompt_gradient=none", "one of <dropped|exact>"),
        ("--cotangent_dtype=int8", "one of <float32|bfloat16>"),
        ("--state_memory=disk", "one of <device|pinned_host>"),
        ("--mesh=context=4", "that is 4 devices, but the target has 8"),
        ("--mesh=rows=8", "want sizes of data, context and tensor"),
        ("--mesh=tensor=8", "so that no head is cut"),
        ("--promt_tokens=5", "promt_tokens"),
        ("--model=tiny-glm --mesh=context=4,tensor=2", "mesh.tensor=2: want 1"),
    ],
)
def test_a_mistake_is_answered_in_a_line(tmp_path, flag, message):
  out = tmp_path / "out"
  binaries.expect_mistake(
      command(*REAL, *flag.split(), f"--out={out}"), message, workdir=out
  )


def test_a_file_is_no_folder_to_write_in(tmp_path):
  out = tmp_path / "notes.txt"
  out.touch()
  ended = binaries.run(command(*SMALL, f"--out={out}"))
  assert ended.returncode == 1 and not ended.stdout
  assert "want a folder, but that is a file" in ended.stderr


def test_a_machine_without_a_compiler_is_told_how_to_get_one(tmp_path):
  out = tmp_path / "out"
  flags = ["--compile", "--compiler_python=/no/such/python"]
  if missing_extra("cuda") is None:
    pytest.skip("there is a compiler in this very environment")
  binaries.expect_mistake(
      command(*SMALL, *flags, "--target=h200:8", f"--out={out}"),
      "make plan-env",
      workdir=out,
  )

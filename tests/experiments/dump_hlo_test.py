"""The binary as a user runs it: in a process of its own, with one below it."""

import json
import pathlib
import re
import sys

import jax
import pytest

from lstraw_jax.capacity.topology import missing_extra
from tests import binaries

SMALL = [
    "--model=tiny",
    "--prompt_tokens=512",
    "--response_tokens=32",
    "--group_size=2",
    "--chunk_tokens=128",
    "--block_tokens=32",
    "--prompt_gradient=exact",
]
STAGES = ["capture", "score", "replay", "prompt_gradient", "optimizer"]
PLAN = binaries.ROOT / ".venv-plan/bin/python"


def command(out, *flags):
  module = ["-m", "experiments.dump_hlo"]
  return [sys.executable, *module, *SMALL, f"--out={out}", *flags]


def run(out, *flags):
  ended = binaries.run(command(out, *flags))
  assert ended.returncode == 0, ended.stderr
  assert "\x1b" not in ended.stdout, "control characters in a file"
  assert f"{out}/index.html has the rest" in ended.stdout.replace("\n", "")
  return ended.stdout


def read(path):
  return json.loads(path.read_text(), parse_constant=pytest.fail)


def lines_exist(items):
  """Checks that source lines are lines of our files; returns how many."""
  places = [item["source"] for item in items if item["source"]]
  for place in places:
    file, _, line = place.partition(":")
    text = (binaries.ROOT / file).read_text().splitlines()
    assert text[int(line) - 1].strip(), place
  return len(places)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
  out = tmp_path_factory.mktemp("dump_hlo") / "dump"
  mesh = "--mesh=data=2,context=2,tensor=2"
  return out, run(out, "--target=cpu:8", "--stage=all", mesh)


@pytest.mark.timeout(600)
def test_every_stage_is_dumped(dumped):
  out, shown = dumped
  summary = read(out / "summary.json")
  assert summary["target"] == "cpu:8" and summary["jax"] == jax.__version__
  assert summary["workload"]["prompt_tokens"] == 512
  assert list(summary["stages"]) == STAGES
  page = (out / "index.html").read_text()
  for stage in STAGES:
    assert stage in shown and f'<h2 id="{stage}">' in page
    memory = read(out / stage / "memory.json")
    assert f"{memory['temp_bytes']:,}" in page
    assert len(read(out / stage / "buffers.json")) == 20
    assert "module @jit_" in (out / stage / "stablehlo.txt").read_text()
  for address in re.findall(r'href="([^#"]*)"', page):
    assert (out / address).is_file(), address


@pytest.mark.timeout(600)
def test_what_is_known_of_the_update_is_found_in_its_dump(dumped):
  out, _ = dumped
  replay = out / "replay"
  buffers = read(replay / "buffers.json")
  names = [x["scope"] for x in buffers if x["kind"] == "argument"]
  assert {"prompt.slots.k", "cotangent.slots.v"} <= {*names}
  assert lines_exist(buffers) >= 10
  collectives = read(replay / "collectives.json")
  assert lines_exist(collectives) == len(collectives)
  axes = {x["axes"] for x in collectives}
  assert {"context", "tensor", "data, context"} <= axes
  # Three linear layers, for each of two responses, in blocks of 32 tokens.
  weights = [x for x in collectives if x["kind"] == "all-gather"]
  blocks = read(out / "summary.json")["workload"]["group_size"] * 128 // 32
  assert weights[0]["times"] == str(3 * blocks)
  # The backward pass takes two products for each of the forward's, which is
  # run again.
  score, replay = (
      read(out / stage / "cost.json")["matmul_flops"]
      for stage in ("score", "replay")
  )
  assert 3 * score < replay < 6 * score


@pytest.mark.timeout(600)
def test_another_size_is_compared(dumped, tmp_path):
  before, _ = dumped
  flags = ["--target=cpu:8", "--stage=capture", f"--diff={before}"]
  flags += ["--mesh=context=4,tensor=2", "--prompt_tokens=1024"]
  shown = run(tmp_path / "other", *flags)
  assert "before" in shown and "%" in shown and "replay" not in shown
  page = (tmp_path / "other" / "diff.html").read_text()
  for what in ("argument", "matrix products", "operations in all"):
    assert what in shown and what in page
  for size in ("512 + 2 x 32 tokens", "1,024 + 2 x 32 tokens"):
    assert size in page


@pytest.mark.timeout(600)
def test_a_stage_is_run_on_the_devices_that_are_here(tmp_path):
  """Its named scopes are in the trace, which holds the program's operations."""
  flags = ["--target=local:4", "--stage=capture", "--profile"]
  run(tmp_path, *flags)
  assert read(tmp_path / "summary.json")["target"] == "local:4"
  traces = (tmp_path / "profile/capture").rglob("*.xplane.pb")
  (trace,) = [path.read_bytes() for path in traces]
  for scope in (b"prefix_attention", b"gated_delta_rule", b"linear_layer"):
    assert scope in trace


@pytest.mark.skipif(
    missing_extra("cuda") is not None and not PLAN.exists(),
    reason="there is no compiler for GPUs",
)
@pytest.mark.timeout(600)
def test_a_machine_that_is_not_there_is_compiled_for(tmp_path):
  run(tmp_path, "--target=h20-3e:8", "--stage=capture")
  stage = tmp_path / "capture"
  assert "__triton" in (stage / "hlo.txt").read_text()
  buffers = read(stage / "buffers.json")
  assert lines_exist(buffers) >= 10
  assert "state.slots.k" in {x["scope"] for x in buffers}
  collectives = read(stage / "collectives.json")
  assert lines_exist(collectives) == len(collectives) > 5
  assert {x["axes"] for x in collectives} == {"context"}
  assert {x["times"] for x in collectives} == {"1", "3"}
  cost = read(stage / "cost.json")
  assert cost["xla"] is None and cost["matmul_flops"] > 0
  assert "gives no cost analysis" in (tmp_path / "index.html").read_text()


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "thesis.txt").write_text("years of work")
  return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stage=reply"], "stage='reply': want one of capture, score"),
        (["--target=h21:8"], "h200, b200, v5p, v6e, cpu"),
        (["--target=h21:8"], "or local, the devices here"),
        (["--target=local:9"], "target='local:9': want 1 to 8 devices"),
        (["--target=local:x"], "target='local:x': want 1 to 8 devices"),
        (["--target=cpu:8", "--profile"], "profile: target=cpu:8 is not here"),
        (
            ["--target=cpu:8", "--diff={here}"],
            "diff='{here}': there is no dump",
        ),
        (
            ["--target=h20-3e:8", "--state_memory=pinned_host"],
            "state_memory='pinned_host': jax knows no host memory of target",
        ),
        (
            ["--target=cpu:8", "--mesh=context=3"],
            "mesh='context=3': that is 3 devices, but the target has 8",
        ),
    ],
)
def test_a_mistake_is_answered_in_a_line(folder, flags, message):
  flags = [flag.format(here=folder) for flag in flags]
  binaries.expect_mistake(
      command(folder / "new", *flags),
      message.format(here=folder),
      workdir=folder / "new",
  )


def test_a_folder_with_other_things_is_left_alone(folder):
  ended = binaries.run(command(folder, "--target=cpu:8"))
  assert ended.returncode == 1
  assert ended.stderr.startswith(f"error: out='{folder}': there is no dump")
  assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_dumps_without_a_common_stage_are_not_compared(dumped, tmp_path):
  before, _ = dumped
  known = tmp_path / "known"
  known.mkdir()
  summary = read(before / "summary.json")
  summary["stages"] = {"optimizer": summary["stages"]["optimizer"]}
  pathlib.Path(known / "summary.json").write_text(json.dumps(summary))
  binaries.expect_mistake(
      command(
          tmp_path / "new", "--target=cpu:8", "--stage=score", f"--diff={known}"
      ),
      "it has optimizer of the stages; want one of score",
      workdir=tmp_path / "new",
  )

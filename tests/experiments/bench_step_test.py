"""The benchmark at a small size: what it measures, and that it compares."""

import json
import sys

import pytest

from tests import binaries

pytestmark = pytest.mark.first_class

SIZES = [
    "--prompt_tokens=512",
    "--response_tokens=8",
    "--group_size=8",
    "--chunk_tokens=128",
    "--repeats=1",
]


def command(*flags):
  return [
      sys.executable,
      "-m",
      "experiments.bench_step",
      *SIZES,
      *flags,
  ]


def test_the_exact_gradient_is_that_of_one_graph_for_less_memory(tmp_path):
  path = tmp_path / "bench.json"
  ended = binaries.run(command(f"--json={path}"))
  assert ended.returncode == 0, ended.stderr
  ways = json.loads(path.read_text())["ways"]
  assert list(ways) == ["graph", "dropped", "exact"]
  for way, found in ways.items():
    assert found["seconds"] > 0
    assert f"{found['peak_bytes'] / 1e6:.1f}" in ended.stdout, way
  assert ways["exact"]["gradient_distance"] < 1e-4  # float32
  assert ways["dropped"]["gradient_distance"] > 1e-2
  assert 3 * ways["exact"]["peak_bytes"] < ways["graph"]["peak_bytes"]


@pytest.mark.parametrize(
    "flag,message",
    [
        ("--model=huge", "huge"),
        ("--way=fast", "way='fast': want one of graph, dropped, exact"),
        ("--group_size=0", "group_size"),
        ("--json=no/such/folder.json", "no/such/folder.json"),
    ],
)
def test_a_mistake_is_answered_in_a_line(tmp_path, flag, message):
  binaries.expect_mistake(command(flag), message, workdir=tmp_path / "run")

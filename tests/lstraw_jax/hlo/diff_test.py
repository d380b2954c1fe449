"""Summaries side by side, and the folders that they are read from."""

import copy
import io
import json

import pytest
from rich.console import Console

from lstraw_jax.hlo import folder as hlo_folder
from lstraw_jax.hlo.diff import Change, compare
from lstraw_jax.hlo.diff_page import diff_page, diff_table
from lstraw_jax.hlo.report import StageReport

SENT = {"kind": "all-gather", "operations": 3, "bytes": 1000, "unknown": 0}
REPORT = StageReport(
    compiled={"seconds": 1.5, "jax": "0.10.2", "jaxlib": "0.10.2"},
    memory={
        "argument_bytes": 9,
        "output_bytes": 0,
        "alias_bytes": 0,
        "temp_bytes": 2000,
        "host_temp_bytes": 0,
        "total_bytes": 2009,
    },
    cost={
        "xla": {"flops": 50.0, "bytes accessed": 10.0},
        "matmul_flops": 4000,
        "matmul_flops_a_round": 0,
    },
    buffers=[],
    collectives=[],
    sent=[SENT | {"axes": "context"}, SENT | {"axes": "data, tensor"}],
    ops={"operations": {"dot": 3, "copy": 2}, "fusions": {}, "fused": {}},
)


def written(folder, *stages, title="one"):
  """Returns the summary of a dump whose stages are all the same."""
  hlo_folder.begin(folder)
  for stage in stages:
    (folder / stage).mkdir()
    REPORT.write(folder / stage)
  _, summary = hlo_folder.complete(
      folder, stages, title=title, target="cpu:8", workload={"data": 1}
  )
  return summary


@pytest.fixture
def before(tmp_path):
  return written(tmp_path / "before", "capture", "replay")


@pytest.fixture
def after(before):
  changed = copy.deepcopy(before)
  changed["title"] = "the other"
  del changed["stages"]["capture"]
  stage = changed["stages"]["replay"]
  stage["memory"]["temp_bytes"] = 1000
  stage["memory"]["host_temp_bytes"] = 300
  stage["cost"]["xla"] = None
  stage["cost"]["matmul_flops_a_round"] = 8
  stage["sent"] = [SENT | {"axes": "context", "unknown": 2, "bytes": 1500}]
  stage["ops"]["operations"] = {"dot": 3, "copy": 5, "while": 1}
  return changed


def test_all_that_changed_is_told(before, after):
  found = compare(before, after)
  assert list(found) == ["replay"]
  rows = [(x.what, *x.both) for x in found["replay"]]
  assert rows == [
      ("argument", 9, 9),
      ("temp", 2000, 1000),
      ("host temp", 0, 300),
      ("total", 2009, 2009),
      ("matrix products", 4000, 4000),
      ("products in unknown loops, a round of each", 0, 8),
      ("XLA: flops, loops once", 50.0, None),
      ("XLA: bytes accessed, loops once", 10.0, None),
      ("all-gather over context", 1000, 1500),
      ("all-gather over context: operations of unknown times", 0, 2),
      ("all-gather over data, tensor", 1000, None),
      ("operations in all", 5, 9),
      ("operations: copy", 2, 5),
      ("operations: while", None, 1),
      ("fusions in all", 0, 0),
      ("fused in all", 0, 0),
  ]


def test_a_dump_differs_from_itself_in_nothing(before):
  for changes in compare(before, before).values():
    assert all(x.texts()[3] == "" for x in changes)


def test_a_row_has_four_texts():
  assert Change("temp", (2000, 1000), "B").texts() == [
      "temp",
      "2 kB",
      "1 kB",
      "-50 %",
  ]
  assert Change("dot", (1234, None)).texts() == ["dot", "1,234", "-", "gone"]


def test_table_and_page_show_the_same(before, after):
  changes = compare(before, after)
  console = Console(width=120, file=io.StringIO())
  console.print(diff_table(changes))
  shown = console.file.getvalue()
  text = diff_page(before, after, changes)
  for row in changes["replay"]:
    for cell in row.texts():
      assert cell in shown and cell in text
  assert "the other" in text and "0.10.2" in text


def test_a_dump_is_read_back(tmp_path, before):
  folder, out = tmp_path / "before", tmp_path / "out"
  read = hlo_folder.read_earlier(folder, out=out, stages=["replay", "score"])
  assert read == json.loads((folder / "summary.json").read_text()) == before
  with pytest.raises(ValueError, match="it has capture, replay of the stages"):
    hlo_folder.read_earlier(folder, out=out, stages=["optimizer"])
  with pytest.raises(ValueError, match=r"diff=.*to be overwritten"):
    hlo_folder.read_earlier(folder, out=folder / ".", stages=["replay"])


@pytest.mark.parametrize("text", [None, "no json", "[]", '{"kind": "else"}'])
def test_another_folder_is_no_dump(tmp_path, text):
  folder = tmp_path / "mine"
  folder.mkdir()
  hlo_folder.check_folder(folder)  # an empty one may be used
  (folder / "thesis.txt").write_text("years of work")
  if text is not None:
    (folder / "summary.json").write_text(text)
  with pytest.raises(ValueError, match=r"diff=.*mine': there is no dump"):
    hlo_folder.read_earlier(folder, out=tmp_path, stages=["replay"])
  with pytest.raises(ValueError, match=r"out=.*mine': there is no dump"):
    hlo_folder.check_folder(folder)
  with pytest.raises(ValueError, match=r"out=.*: it is a file"):
    hlo_folder.check_folder(folder / "thesis.txt")


def test_a_dump_is_replaced_whole_and_nothing_else_is(tmp_path, before):
  folder = tmp_path / "before"
  hlo_folder.check_folder(folder)
  hlo_folder.check_folder(tmp_path / "new")
  (folder / "notes.txt").write_text("mine")
  (folder / "profile" / "replay").mkdir(parents=True)
  (folder / "diff.html").write_text("old")
  written(folder, "replay")
  names = sorted(path.name for path in folder.iterdir())
  assert names == ["index.html", "notes.txt", "replay", "summary.json"]


def test_a_dump_that_was_broken_off_may_be_replaced(tmp_path):
  hlo_folder.begin(tmp_path)
  hlo_folder.check_folder(tmp_path)
  with pytest.raises(ValueError, match="it has none of the stages"):
    hlo_folder.read_earlier(tmp_path, out=tmp_path / "x", stages=["replay"])

"""The rows on disk."""

import json
import math
import os

import pytest

from lstraw_jax.metrics import PeakMemory
from lstraw_jax.run_log import append_row, make_row, truncate_after
from lstraw_jax.sft_step import SftMetrics
from lstraw_jax.update_metrics import UpdateMetrics
from tests.update_rows import row


def test_a_row_holds_all_that_is_known():
  made = row(step=3)
  assert made["step"] == 3
  assert made["ratio_max"] == 1.05
  assert made["tokens_per_s"] == pytest.approx(10000 / 4.96)
  assert made["seconds"]["capture"] == 3.0
  assert made["sampler_gap_nats"] is None
  assert json.loads(json.dumps(made, allow_nan=False)) == made
  assert set(UpdateMetrics._fields) - {"tokens"} < set(made)


def test_a_row_of_supervised_training_has_its_own_fields():
  metrics = SftMetrics(loss=2.5, grad_norm=1.0, tokens=90, loss_tokens=40)
  made = make_row(
      metrics,
      step=3,
      tokens=90,
      seconds={"capture": 1.0, "prompt": 2.0},
      peak=PeakMemory(7, "process"),
  )
  assert made.items() > metrics._asdict().items()
  assert made["tokens_per_s"] == 30.0


def test_rows_on_disk_are_cut_back_to_the_restored_step(tmp_path):
  path = tmp_path / "metrics.jsonl"
  assert truncate_after(path, 0) == []
  rows = [row(step) for step in (1, 2, 3)]
  for each in rows:
    append_row(path, each)
  whole = path.read_bytes()
  assert truncate_after(path, 3) == rows
  assert path.read_bytes() == whole
  assert truncate_after(path, 2) == rows[:2]
  append_row(path, rows[2])
  assert path.read_bytes() == whole
  assert truncate_after(path, 0) == []
  assert path.read_bytes() == b""


def test_a_half_written_last_row_is_dropped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  append_row(path, row(1))
  whole = path.read_bytes()
  for cut in (1, 10, len(whole) - 1):
    path.write_bytes(whole + whole[:cut])
    assert truncate_after(path, 9) == [row(1)]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("bad", ["{", "[1]", '{"loss": 1}', '{"step": null}'])
def test_another_bad_row_is_an_error_with_its_place(tmp_path, bad):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n' + bad + '\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a row: "):
    truncate_after(path, 9)


def test_a_row_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
  path = tmp_path / "metrics.jsonl"
  synced = []
  monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
  append_row(path, row(1))
  assert synced == [path.read_bytes()]
  with pytest.raises(ValueError, match="JSON"):
    append_row(path, row(2) | {"loss": math.nan})
  assert len(path.read_bytes().splitlines()) == 1

"""The table and the live line, the rows on disk, the curve."""

import io
import itertools
import json
import math
import os
import re
import threading
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from rich.console import Console

from lstraw_jax import report
from lstraw_jax.report import (
    Report,
    append_row,
    make_row,
    plot_rewards,
    truncate_after,
)
from lstraw_jax.train_step import UpdateMetrics

PNG = b"\x89PNG"
MIB = 2**20


def row(step=1, *, seconds=None, **changes):
  metrics = UpdateMetrics(
      loss=-1.5e-8,
      reward_mean=0.8125,
      grad_norm=1.25,
      prompt_tokens=9000,
      response_tokens=1000,
      denominator=2,
      sampler_gap_nats=math.nan,
      tokens=dict(
          ratio_mean=1.0,
          ratio_max=1.05,
          clip_share=0.125,
          kl_nats=0.002,
          entropy_nats=5.5,
      ),
  )
  return make_row(
      metrics._replace(**changes),
      step=step,
      seconds=seconds or {"capture": 3.0, "replay": 1.0, "respond": 0.96},
      peak_bytes=1536 * MIB,
      peak_source="process",
  )


def shown(rows, *, width=80, terminal=False):
  """Returns the lines that a run of these rows prints."""
  file = io.StringIO()
  console = Console(file=file, width=width, force_terminal=terminal)
  with Report(step=0, steps=len(rows), console=console) as table:
    for each in rows:
      table("capture", 1, 2)
      table.add(each)
  return file.getvalue()


def lines_of(terminal_output):
  """Returns what a terminal shows, but for the lines drawn over."""
  plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal_output)
  return [line.split("\r")[-1] for line in plain.split("\n")]


def test_a_row_holds_all_that_is_known():
  made = row(step=3)
  assert made["step"] == 3
  assert made["ratio_max"] == 1.05
  assert made["tokens_per_s"] == pytest.approx(10000 / 4.96)
  assert made["seconds"]["capture"] == 3.0
  assert made["sampler_gap_nats"] is None
  assert json.loads(json.dumps(made, allow_nan=False)) == made
  assert set(UpdateMetrics._fields) - {"tokens"} < set(made)


def test_a_file_gets_aligned_rows_without_control_characters():
  output = shown([row(step) for step in range(1, 42)])
  assert re.fullmatch(r"[ -~\n]*", output)
  lines = output.splitlines()
  header, first = lines[3], lines[4]
  assert " ".join(first.split()) == (
      "1 -1.5e-8 0.8125 1.000 1.050 12% 2e-3 5.500 1.250 - 2.0k"
      " 3.0 1.0 - 1.0 - 1.5G"
  )
  assert header.split()[:3] == ["step", "loss", "reward"]
  assert len(header.split()) == len(first.split())
  assert {len(line) for line in lines[3:]} == {len(header)}
  heads = [i for i, line in enumerate(lines[3:]) if line == header]
  assert heads == [0, 21, 42]
  ends = [[m.end() for m in re.finditer(r"\S+", x)] for x in (header, first)]
  assert ends[0] == ends[1]


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20, 5])
def test_a_terminal_of_any_width_is_not_wrapped(width):
  output = shown([row(1), row(2)], width=width, terminal=True)
  assert max(map(len, lines_of(output))) <= width


def test_only_the_header_and_the_legend_are_styled():
  output = shown([row(1), row(2)], terminal=True)
  styled = re.findall(r"\x1b\[[12]m([^\x1b]*)", output)
  assert [text.split()[0] for text in styled] == [
      "ratio,",
      "kl",
      "ca(pture)",
      "step",
  ]
  assert re.search(r"\x1b\[2K    1 -1\.5e-8 [ -~]*\n", output)


def test_eighty_columns_keep_what_matters():
  header = lines_of(shown([row()], width=80, terminal=True))[3]
  assert " ".join(header.split()) == (
      "step loss reward r.max clip kl entr grad gap tok/s ca re rp peak"
  )


def test_the_live_line_shows_where_the_update_is():
  file = io.StringIO()
  console = Console(file=file, width=80, force_terminal=True)
  with Report(step=3, steps=20, console=console) as table:
    table("capture", 3, 9)
  last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).split("\r")
  assert any(re.match("update 4/20: capture chunk .* 3/9 ", x) for x in last)
  assert file.getvalue().endswith("\x1b[2K")  # and is wiped at the end


def test_the_line_goes_on_to_the_next_update():
  console = Console(file=io.StringIO(), width=80, force_terminal=True)
  with Report(step=3, steps=5, console=console) as table:
    table.add(row(4))
    assert table._line.tasks[0].description.startswith("update 5/5")
    table.add(row(5))
    assert table._line.tasks[0].description.startswith("update 5/5")


def test_progress_comes_from_any_thread():
  console = Console(file=io.StringIO(), width=80, force_terminal=True)
  with Report(step=0, steps=1, console=console) as table:

    def work():
      for done in range(1, 101):
        table("replay", done, 100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for step in range(1, 30):
      table.add(row(step))
    for thread in threads:
      thread.join()
    table("replay", 100, 100)
    assert table._line.tasks[0].completed == 100


def test_a_program_with_a_report_in_it_is_compiled_once():
  traces = itertools.count()
  console = Console(file=io.StringIO(), width=80, force_terminal=True)
  table = Report(step=0, steps=1, console=console)

  @partial(jax.jit, static_argnames="progress")
  def program(x, progress):
    next(traces)
    jax.debug.callback(lambda x: progress("replay", int(x), 9), x)
    return x

  with table:
    for done in (1, 7):
      program(np.int32(done), progress=table).block_until_ready()
    jax.effects_barrier()
    assert table._line.tasks[0].completed == 7
  assert next(traces) == 1


@given(
    st.floats(1e-40, 1e12) | st.floats(-1e12, -1e-40), st.sampled_from([5, 7])
)
def test_a_number_fits_and_keeps_its_size(value, width):
  width += value < 0
  text = report._number(value, width)
  assert len(text) <= width
  error = 0.06 if "e" not in text else 0.5
  assert float(text) == pytest.approx(value, rel=error)


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        (report._number(None, 5), "-"),
        (report._number(0.0, 5), "0"),
        (report._number(0.6931, 5), "0.693"),
        (report._number(12345.6, 5), "12346"),
        (report._number(123456.0, 5), "1.2e5"),
        (report._number(-1.23e-10, 7), "-1e-10"),
        (report._scaled(7.46, 1000), "7.5"),
        (report._scaled(999.6, 1000), "1.0k"),
        (report._scaled(130 * MIB, 1024), "130M"),
        (report._scaled(1000 * MIB, 1024), "1.0G"),
        (report._duration(9.96), "10"),
        (report._duration(999.0), "999"),
        (report._duration(1500.0), "25m"),
        (report._duration(3 * 3600.0), "3h"),
        (report._percent(0.004), "0.4%"),
        (report._percent(1.0), "100%"),
    ],
)
def test_cells_are_short(text, shown_as):
  assert text == shown_as


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


def test_the_curve_is_drawn_without_pyplot(tmp_path):
  path = tmp_path / "rewards.png"
  plot_rewards(path, [row(step) for step in range(1, 30)], title="tiny")
  plot_rewards(path, [row(1)], title="a single update " * 20)
  assert path.read_bytes().startswith(PNG)
  assert pyplot.get_fignums() == []
  with pytest.raises(ValueError, match=r"rows=\[\]"):
    plot_rewards(path, [], title="tiny")


def test_the_mean_is_over_the_last_updates():
  values = np.array([1.0, 2.0, 3.0, 7.0])
  assert report._moving_mean(values, 2) == [1.0, 1.5, 2.5, 5.0]
  assert report._moving_mean(values, 9) == [1.0, 1.5, 2.0, 3.25]

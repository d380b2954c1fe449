"""The table and the live line."""

import io
import itertools
import re
import threading
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lstraw_jax import tables
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.report import Report
from lstraw_jax.tables import GRPO
from tests.update_rows import MIB, row


def shown(rows, *, width=80, terminal=False):
  """Returns the lines that a run of these rows prints."""
  file = io.StringIO()
  console = Console(file=file, width=width, force_terminal=terminal)
  with Report(GRPO, step=0, steps=len(rows), console=console) as table:
    for each in rows:
      table("capture", 1, 2)
      table.add(each)
  return file.getvalue()


def lines_of(terminal_output):
  """Returns what a terminal shows, but for the lines drawn over."""
  plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal_output)
  return [line.split("\r")[-1] for line in plain.split("\n")]


def test_a_file_gets_aligned_rows_without_control_characters():
  output = shown([row(step) for step in range(1, 42)])
  assert re.fullmatch(r"[ -~\n]*", output)
  lines = output.splitlines()
  header, first = lines[3], lines[4]
  assert " ".join(first.split()) == (
      "1 -1.5e-8 0.8125 1.000 1.050 12% 2e-3 5.500 1.250 - 3 0.015"
      " 2.0k 3.0 1.0 - 1.0 - - 1.5G"
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
  with Report(GRPO, step=3, steps=20, console=console) as table:
    table("capture", 3, 9)
  last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).split("\r")
  assert any(re.match("update 4/20: capture chunk .* 3/9 ", x) for x in last)
  assert file.getvalue().endswith("\x1b[2K")  # and is wiped at the end


def test_the_line_goes_on_to_the_next_update():
  console = Console(file=io.StringIO(), width=80, force_terminal=True)
  with Report(GRPO, step=3, steps=5, console=console) as table:
    table.add(row(4))
    assert table._line.tasks[0].description.startswith("update 5/5")
    table.add(row(5))
    assert table._line.tasks[0].description.startswith("update 5/5")


def test_progress_comes_from_any_thread():
  console = Console(file=io.StringIO(), width=80, force_terminal=True)
  with Report(GRPO, step=0, steps=1, console=console) as table:

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
  table = Report(GRPO, step=0, steps=1, console=console)

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
  text = tables._number(value, width)
  assert len(text) <= width
  error = 0.06 if "e" not in text else 0.5
  assert float(text) == pytest.approx(value, rel=error)


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        (tables._number(None, 5), "-"),
        (tables._number(0.0, 5), "0"),
        (tables._number(0.6931, 5), "0.693"),
        (tables._number(12345.6, 5), "12346"),
        (tables._number(123456.0, 5), "1.2e5"),
        (tables._number(-1.23e-10, 7), "-1e-10"),
        (tables._scaled(7.46, 1000), "7.5"),
        (tables._scaled(999.6, 1000), "1.0k"),
        (tables._scaled(130 * MIB, 1024), "130M"),
        (tables._scaled(1000 * MIB, 1024), "1.0G"),
        (tables._duration(9.96), "10"),
        (tables._duration(999.0), "999"),
        (tables._duration(1500.0), "25m"),
        (tables._duration(3 * 3600.0), "3h"),
        (tables._percent(0.004), "0.4%"),
        (tables._percent(1.0), "100%"),
    ],
)
def test_cells_are_short(text, shown_as):
  assert text == shown_as


def test_a_watchdog_is_told_all_that_the_line_shows():
  told, file = [], io.StringIO()
  with Report(
      GRPO, step=2, steps=60, console=Console(file=file), beat=told.append
  ) as table:
    clock = PhaseClock(begin=table.begin)
    with clock.phase("capture"):
      table("capture", 5, 12)
    with clock.phase("respond"):
      pass
  assert told == [
      "update 3/60: capture",
      "update 3/60: capture chunk 5/12",
      "update 3/60: respond",
  ]
  assert clock.seconds.keys() == {"capture", "respond"}
  assert not file.getvalue()


def test_all_processes_but_one_print_nothing(capsys):
  for shown in (False, True):
    with Report(GRPO, step=0, steps=1, shown=shown) as table:
      table.add(row(1))
    assert bool(capsys.readouterr().out) == shown

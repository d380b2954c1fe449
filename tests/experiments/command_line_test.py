"""How a program ends: in one line for a mistake, at once among several."""

import jax
import pytest

from experiments import command_line
from tests import processes

GLOO = "UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer"


def ended(monkeypatch, error, *, several):
  """Returns what is raised in the place of `error`."""
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
  monkeypatch.setattr(command_line.os, "_exit", lambda status: exit(status))

  def main(_):
    raise error

  with pytest.raises(BaseException) as caught:
    command_line._main(main, [])
  return caught.value


@pytest.mark.parametrize(
    "error",
    [ValueError("seed=x"), OSError("seed=x"), FloatingPointError("seed=x")],
)
def test_a_mistake_is_one_line_of_one_process_or_several(
    monkeypatch, capsys, error
):
  assert ended(monkeypatch, error, several=False).args == ("error: seed=x",)
  assert ended(monkeypatch, error, several=True).args == (1,)
  assert capsys.readouterr().err == "error: seed=x\n"


# Gloo's errors come as either.
@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_lost_process_is_one_line(monkeypatch, capsys, kind):
  assert ended(monkeypatch, kind(GLOO), several=True).args == (1,)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: another process has ended or cannot be")
  assert line.endswith(f"({GLOO})")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, capsys):
  error = RuntimeError("ours")
  assert ended(monkeypatch, error, several=False) is error
  assert not capsys.readouterr().err
  assert ended(monkeypatch, error, several=True).args == (1,)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith("Traceback") and lines[-1] == "RuntimeError: ours"


def test_a_process_that_fails_does_not_wait_for_the_others(tmp_path):
  port = str(processes.free_port())
  command = ["tests/distributed_child.py", "fail", port]
  commands = [[*command, str(i), str(tmp_path)] for i in (0, 1)]
  with processes.started(commands, output=tmp_path) as (first, second):
    # At an ordinary exit jax would wait for the other process for 60 s.
    processes.wait_for([tmp_path / "going-on"], [first])
    assert second.wait(30) == 1
    assert first.poll() is None
  assert processes.printed(tmp_path, 1).splitlines()[-1] == "error: mine"

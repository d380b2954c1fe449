"""Programs of several real processes, each with four virtual CPU devices."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 4  # of each process
START_S = 120  # that a process may take to start, on slow and busy cores


def free_port() -> int:
  """Returns a port that was free a moment ago."""
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    return server.getsockname()[1]


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], *, output: pathlib.Path
) -> Iterator[list[subprocess.Popen]]:
  """Runs Python with each list of arguments; none outlives the block.

  Args:
    commands: arguments of each process.
    output: a folder for what they print; see `printed`.
  """
  # What conftest gives this process, but for the number of devices.
  flags = os.environ["XLA_FLAGS"].replace("_count=8", f"_count={DEVICES}")
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": flags,
      "PYTHONPATH": str(ROOT),
  }
  output.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    processes = []
    for index, command in enumerate(commands):
      file = stack.enter_context(_output(output, index).open("w"))
      process = subprocess.Popen(
          [sys.executable, *command],
          cwd=ROOT,
          env=environment,
          stdout=file,
          stderr=subprocess.STDOUT,
      )
      stack.callback(_end, process)
      processes.append(process)
    yield processes


def printed(output: pathlib.Path, index: int) -> str:
  """Returns what a process has printed, errors included."""
  return _output(output, index).read_text()


def wait_for(
    paths: Sequence[pathlib.Path], processes: Sequence[subprocess.Popen]
) -> None:
  """Returns when all these files exist, and fails if a process ends before."""
  deadline = time.monotonic() + START_S
  while not all(path.exists() for path in paths):
    ended = [process.poll() for process in processes]
    assert ended == [None] * len(processes), f"ended early: {ended}"
    assert time.monotonic() < deadline, f"no {paths} in time"
    time.sleep(0.05)


def _output(folder, index):
  return folder / f"{index}.txt"


def _end(process):
  process.kill()
  process.wait()

"""The binaries of experiments/, started as a user starts them."""

import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]


def command(
    name: str,
    *flags: str,
    workdir: pathlib.Path,
    settings: Mapping[str, Any],
    config: str = "tiny",
) -> list[str]:
  """Returns the command line of a binary.

  Args:
    name: of its module.
    flags: further ones, as they are.
    workdir: its run folder.
    settings: values by name, e.g. `train.steps`.
    config: which of experiments/configs.
  """
  return [
      sys.executable,
      "-m",
      f"experiments.{name}",
      f"--config=experiments/configs/{config}.py",
      f"--workdir={workdir}",
      *(f"--config.{name}={value}" for name, value in settings.items()),
      *flags,
  ]


def run(command: list[str]) -> subprocess.CompletedProcess:
  """Runs a command to its end; what it prints is text."""
  return subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, timeout=500
  )


def expect_mistake(
    command: list[str], message: str, *, workdir: pathlib.Path
) -> None:
  """Runs a command that must say what is wrong, and make nothing before."""
  ended = run(command)
  assert ended.returncode == 1, ended.stdout
  assert ended.stderr.startswith("error: "), ended.stderr
  assert message in ended.stderr
  assert "Traceback" not in ended.stderr
  assert not workdir.exists(), "something was made before the check"

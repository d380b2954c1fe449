"""A process that compiles for devices which are not there.

It is the same binary with `--in_child`, but with an environment that XLA reads
only at its start, and, if need be, with another Python: a compiler for GPUs
complains at every start of jax on a machine without a driver, so it may have an
environment of its own (`make plan-env`). What it prints is one JSON object a
line.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from lstraw_jax.capacity.targets import Machine
from lstraw_jax.capacity.topology import missing_extra

IN_CHILD = flags.DEFINE_bool(
    "in_child", False, "Set by the binary itself, for the process it starts."
)
_PYTHON = flags.DEFINE_string(
    "compiler_python",
    "",
    "Python with the plan-gpu or plan-tpu extra. Default: this one, or else"
    " that of .venv-plan.",
)
_ROOT = pathlib.Path(__file__).parents[1]
# Autotuning runs kernels, for which there is no device.
_GPU_FLAGS = ("--xla_gpu_autotune_level=0",)


def run_child(
    module: str,
    machine: Machine,
    *,
    xla_flags: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
  """Runs a binary again with this one's flags; yields what it says.

  Args:
    module: the binary.
    machine: what it compiles for.
    xla_flags: more of them.

  Raises:
    ValueError: if there is no compiler for the machine, or the child fails;
      with the child's message.
  """
  command = [_python(machine), "-m", module, *sys.argv[1:], "--in_child"]
  with tempfile.TemporaryFile("w+") as noise:
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=noise,
        text=True,
        env=_environment(machine, xla_flags),
    )
    assert child.stdout is not None, "asked for above"
    try:
      for line in child.stdout:
        yield json.loads(line)
    finally:
      child.terminate()
      status = child.wait()
    if status:
      noise.seek(0)
      raise ValueError(_told(noise.read(), status))


def tell(**what: Any) -> None:
  """Says something to the parent."""
  print(json.dumps(what), flush=True)


def _environment(machine, xla_flags) -> Mapping[str, str]:
  target = machine.target
  more = list(xla_flags)
  if target.platform == "cuda":
    more += _GPU_FLAGS
  if target.platform == "cpu":
    more.append(f"--xla_force_host_platform_device_count={machine.devices}")
  given = os.environ.get("XLA_FLAGS", "")
  # A topology needs no backend; the one for GPUs would look for a driver.
  return os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": " ".join([given, *more]).strip(),
      "TPU_SKIP_MDS_QUERY": "1",
      "TF_CPP_MIN_LOG_LEVEL": "2",
  }


def _python(machine) -> str:
  """Returns a Python that can compile for a machine."""
  extra = missing_extra(machine.target.platform)
  if extra is None:
    return sys.executable
  apart = _PYTHON.value or str(_ROOT / ".venv-plan/bin/python")
  if pathlib.Path(apart).exists():
    return apart
  raise ValueError(
      f"target={machine}: there is no compiler for it here. `make plan-env`"
      f" makes an environment with the extra {extra!r}, about 1.5 GB, which is"
      " then found; or pass --compiler_python=PYTHON of another that has it"
  )


def _told(noise: str, status: int) -> str:
  """Returns the child's own message, or the end of what it said."""
  lines = [line for line in noise.splitlines() if line.strip()]
  for line in reversed(lines):
    if line.startswith("error: "):
      return line.removeprefix("error: ")
  return f"the compiler ended with status {status}:\n" + "\n".join(lines[-15:])

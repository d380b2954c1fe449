"""The receipt of a run: where its numbers came from, for whoever reads them.

`receipt.json` is one object with these fields:

    versions         of python, lstraw_jax, jax, jaxlib, flax, optax,
                     orbax-checkpoint and numpy; null if not installed
    platform         "cpu", "gpu" or "tpu"
    devices          {kind: count}, over all processes
    processes        number of processes
    git              {commit, dirty} of the sources that ran, dirty if a .py or
                     .toml file is not as committed; null if not a git checkout
    config           the resolved settings
    seed             of all random choices
    steps            optimizer steps that the weights have seen
    gradient         {prompt_gradient, meaning}
    staleness_steps  most optimizer steps between the capture of a prompt state
                     and its use; 0: each step captures its prompts anew
    seconds          {total, phases: {name: {seconds, share}}}
    peak_bytes       the most memory that was held, and whose that is:
    peak_source      "device", the busiest one's own counter, or "process"
    curve            {field, updates, first_five, last_five}: which number of
                     an update the run is watched by, how many updates, and its
                     mean over those at either end

A float that is not finite is written as text: "inf" or "nan".
"""

import collections
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import jax

_PACKAGES = (
    "lstraw_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
)  # fmt: skip
_MEANINGS = {
    "dropped": (
        "Each response is differentiated with its prompt's state held constant:"
        " the gradient through the prompt is left out, as in the paper."
    ),
    "exact": (
        "The gradient through the prompt's state is included: it is the"
        " gradient of the whole sequences."
    ),
}
_GIT_TIMEOUT_S = 10


def write_receipt(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    seed: int,
    steps: int,
    prompt_gradient: str,
    staleness_steps: int,
    seconds: Mapping[str, float],
    peak_bytes: int,
    peak_source: str,
    curve_field: str,
    curve: Sequence[float],
) -> dict[str, Any]:
  """Writes the receipt of this process's run, whole or not at all.

  Args:
    path: of the file; one that is there is replaced.
    config: a field, as JSON can hold it.
    seed: a field.
    steps: a field.
    prompt_gradient: "dropped" or "exact".
    staleness_steps: a field.
    seconds: spent in each phase, by name.
    peak_bytes: a field.
    peak_source: a field.
    curve_field: name of the number that the run is watched by.
    curve: its value at each update, in order.

  Returns:
    What was written; the module says what the fields are.

  Raises:
    ValueError: for a value that no run can have.
  """
  counts = {
      "steps": steps,
      "staleness_steps": staleness_steps,
      "peak_bytes": peak_bytes,
      **{f"seconds[{name!r}]": value for name, value in seconds.items()},
  }
  for name, value in counts.items():
    if not (math.isfinite(value) and value >= 0):
      raise ValueError(f"{name}={value}: want a finite number >= 0")
  if prompt_gradient not in _MEANINGS:
    raise ValueError(
        f"prompt_gradient={prompt_gradient!r}: want one of {list(_MEANINGS)}"
    )
  receipt = {
      **environment(),
      "config": config,
      "seed": seed,
      "steps": steps,
      "gradient": {
          "prompt_gradient": prompt_gradient,
          "meaning": _MEANINGS[prompt_gradient],
      },
      "staleness_steps": staleness_steps,
      "seconds": _shares(seconds),
      "peak_bytes": peak_bytes,
      "peak_source": peak_source,
      "curve": {
          "field": curve_field,
          "updates": len(curve),
          "first_five": _mean(curve[:5]),
          "last_five": _mean(curve[-5:]),
      },
  }
  return write_json(path, receipt)


def write_json(
    path: str | os.PathLike[str], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Writes fields as JSON, whole or not at all, and returns what it wrote.

  Args:
    path: of the file; one that is there is replaced.
    fields: what JSON can hold; floats that are not finite become text.
  """
  written = _finite_or_text(fields)
  _replace(pathlib.Path(path), json.dumps(written, indent=2) + "\n")
  return written


def environment() -> dict[str, Any]:
  """Returns versions, platform, devices, processes and git; see the module."""
  versions: dict[str, str | None] = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = None
  return {
      "versions": versions,
      "platform": jax.default_backend(),
      "devices": collections.Counter(d.device_kind for d in jax.devices()),
      "processes": jax.process_count(),
      "git": _git_state(pathlib.Path(__file__)),
  }


def _git_state(source: pathlib.Path) -> dict[str, Any] | None:
  """Returns the commit that `source` is of, or None if git has none for it."""

  # A hook's variables would point git at another repository.
  variables = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith("GIT_")
  }
  variables["GIT_OPTIONAL_LOCKS"] = "0"  # `status` then writes no index

  def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=source.parent,
        env=variables,
        capture_output=True,
        check=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
    ).stdout.strip()

  try:
    # Not so in an environment that happens to lie within some checkout.
    git("ls-files", "--error-unmatch", source.name)
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", ":/*.py", ":/*.toml")),
    }
  except (OSError, subprocess.SubprocessError):
    return None


def _shares(seconds: Mapping[str, float]) -> dict[str, Any]:
  total = sum(seconds.values())
  return {
      "total": total,
      "phases": {
          name: {"seconds": spent, "share": spent / total if total else 0.0}
          for name, spent in seconds.items()
      },
  }


def _mean(values: Sequence[float]) -> float | None:
  return math.fsum(values) / len(values) if values else None


def _finite_or_text(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite_or_text(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite_or_text(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file such that it holds the old text or the new at any moment."""
  new = path.with_name(f".{path.name}.new")
  with open(new, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(new, path)

"""How the processes of a run find each other and agree on what to do."""

import json
import pathlib
import time
from typing import Any

from lstraw_jax.distributed import (
    DistributedConfig,
    check_same_config,
    gather_text,
    initialize,
)


def join_processes(config: Any, **flags: Any) -> None:
  """Finds the other processes of a run and checks that they do the same.

  Args:
    config: the settings.
    flags: values of other flags, by name.
  """
  initialize(DistributedConfig(**config.distributed))
  named = {f"--{name}": value for name, value in flags.items()}
  check_same_config({**resolved(config), **named})


def agree_on_workdir(given: str | None, *, kind: str = "") -> pathlib.Path:
  """Returns the run folder, by default one named by kind and time."""
  # By each process's clock.
  started = time.strftime(f"runs/{kind}%Y%m%d-%H%M%S")
  workdir, *_ = gather_text(given or started)
  return pathlib.Path(workdir)


def resolved(config: Any) -> dict[str, Any]:
  """Returns the settings as JSON can hold them."""
  return json.loads(config.to_json_best_effort())

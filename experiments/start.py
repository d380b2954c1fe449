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


def join_processes(config: Any) -> None:
  """Finds the other processes of a run and checks that they do the same."""
  initialize(DistributedConfig(**config.distributed))
  check_same_config(resolved(config))


def agree_on_workdir(given: str | None) -> pathlib.Path:
  """Returns the run folder, by default one named by the time."""
  started = time.strftime("runs/%Y%m%d-%H%M%S")  # by each process's clock
  workdir, *_ = gather_text(given or started)
  return pathlib.Path(workdir)


def resolved(config: Any) -> dict[str, Any]:
  """Returns the settings as JSON can hold them."""
  return json.loads(config.to_json_best_effort())

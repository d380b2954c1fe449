"""Several processes that train as one, each with devices of its own.

1. Process 0 hosts jax's coordination service; the others reach it by network.
2. All of them run the same program on the same data, so they must have been
   started with the same config: that is checked before anything else.
3. Who dies or stops answering is missed by its heartbeats: jax then ends all
   others (signal SIGABRT) and says so on standard error. A process that answers
   but makes no progress is a matter of `lstraw_jax.watchdog`.

Files are written by process 0 alone, checkpoints by all: the run folder is to
be on a file system that all of them see.
"""

import dataclasses
import json
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lstraw_jax.named_leaves import differences
from lstraw_jax.watchdog import end_process

_MARGIN_S = 60  # by which jax's own timeout comes later than ours

# What is each process's own affair.
_OWN = ("distributed.process_id", "distributed.coordinator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
  """How a process finds the others; by default it is alone.

  `auto` asks the cluster (SLURM, GKE, a TPU pod) for the other three.
  """

  coordinator: str = ""  # HOST:PORT of process 0
  num_processes: int = 0
  process_id: int = -1
  auto: bool = False
  timeout_s: int = 300  # until a process that does not answer is given up
  stall_timeout_s: int = 3600  # until one without progress is

  def __post_init__(self):
    for name in ("timeout_s", "stall_timeout_s"):
      if getattr(self, name) < 1:
        raise ValueError(
            f"distributed.{name}={getattr(self, name)}: want at least 1"
        )
    given = self.coordinator, self.num_processes, self.process_id
    if self.auto and given != ("", 0, -1):
      raise ValueError(
          "distributed.auto=True finds coordinator, num_processes and"
          f" process_id itself; leave {given} out, or set auto=False"
      )
    if self.coordinator:
      self._check_place()
    elif given != ("", 0, -1):
      raise ValueError(
          f"distributed.num_processes={self.num_processes}, process_id="
          f"{self.process_id}: want distributed.coordinator=HOST:PORT of"
          " process 0 as well"
      )

  def _check_place(self):
    found = re.fullmatch(r"(.+):(\d+)", self.coordinator)
    if not (found and 0 < int(found[2]) < 1 << 16):
      raise ValueError(
          f"distributed.coordinator={self.coordinator!r}: want HOST:PORT with a"
          " port in 1..65535"
      )
    if self.num_processes < 1:
      raise ValueError(
          f"distributed.num_processes={self.num_processes}: want the number of"
          " processes that are started, at least 1"
      )
    if not 0 <= self.process_id < self.num_processes:
      raise ValueError(
          f"distributed.process_id={self.process_id}: want"
          f" 0..{self.num_processes - 1}, another for each process"
      )


def initialize(config: DistributedConfig) -> None:
  """Joins the other processes; nothing happens where there are none.

  Call it before anything that asks jax for its devices.

  The process ends if not all have come within `timeout_s`: jax would abort it
  then, with a stack trace.

  Raises:
    ValueError: if there is no cluster to ask, or another program has the port.
  """
  if not (config.auto or config.coordinator):
    return
  place: dict[str, Any] = {}
  if config.coordinator:
    place = dict(
        coordinator_address=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        cluster_detection_method="deactivate",
    )
    if config.process_id == 0:
      _check_port(config.coordinator)
  where = config.coordinator or "the cluster's coordinator"
  late = threading.Timer(
      config.timeout_s,
      end_process,
      [
          f"could not join the other processes at {where} within"
          f" distributed.timeout_s={config.timeout_s}. Are all of them started,"
          " with the same coordinator, and can they reach it?"
      ],
  )
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
        **place,
        initialization_timeout=config.timeout_s + _MARGIN_S,
        heartbeat_timeout_seconds=config.timeout_s,
        shutdown_timeout_seconds=config.timeout_s,
    )
  except ValueError as error:
    if not config.auto:
      raise
    raise ValueError(
        "distributed.auto=True: found no cluster to ask; give coordinator,"
        f" num_processes and process_id ({error})"
    ) from error
  finally:
    late.cancel()


def _check_port(coordinator: str) -> None:
  """Refuses a port that is taken: jax 0.11 crashes on one."""
  with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      server.bind(("", int(coordinator.rpartition(":")[2])))
    except OSError as error:
      raise ValueError(
          f"distributed.coordinator={coordinator!r}: cannot listen on that port"
          f" of this host ({error.strerror}); choose another"
      ) from error


def is_primary() -> bool:
  """Tells whether this process writes the files of the run."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints a line once, whatever the number of processes."""
  if is_primary():
    print(text)


def gather_text(text: str) -> list[str]:
  """Returns the text that each process gave, in their order."""
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([data.size], np.int32))
  padded = np.zeros((sizes.max(),), np.uint8)
  padded[: data.size] = data
  rows = multihost_utils.process_allgather(padded)
  return [
      bytes(row[:size]).decode()
      for row, size in zip(rows, sizes[:, 0], strict=True)
  ]


def check_same_config(config: Mapping[str, Any]) -> None:
  """Refuses to train with processes that were started differently.

  Args:
    config: settings of the run as JSON can hold them.

  Raises:
    ValueError: names each setting that differs between processes.
  """
  first, *others = map(json.loads, gather_text(json.dumps(config)))
  for index, other in enumerate(others, 1):
    if lines := differences(
        first, other, but=_OWN, names=("process 0", f"process {index}")
    ):
      raise ValueError(
          f"process {index} was started with another config:\n  "
          + "\n  ".join(lines)
      )

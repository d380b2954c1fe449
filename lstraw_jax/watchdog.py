"""Ends a process that makes no progress, so that no run hangs for ever.

A process that dies or is stopped is missed by its heartbeats, and jax ends the
others (see `lstraw_jax.distributed`). One that is alive and stuck is not: the
others wait for it within a program, all the while sending heartbeats. So each
process watches itself: its work tells what it begins, and if nothing is told
for long enough, a thread says so and ends the process.

Work that tells nothing meanwhile is a compilation, a load, a chunk of capture,
a whole group's sampling, and one branch or, in all processes but the first, one
group of replay. The timeout must exceed the longest of these: the first update,
which compiles everything, sets the scale.
"""

import contextlib
import os
import threading
import time
from typing import NoReturn

import jax

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on


class Watchdog(contextlib.AbstractContextManager):
  """A thread that ends the process after `timeout_s` without a beat."""

  def __init__(self, timeout_s: float, *, armed: bool | None = None):
    """Begins as if with a beat.

    Args:
      timeout_s: longest time between beats.
      armed: False does nothing; by default only one of several processes is.
    """
    self._timeout_s = timeout_s
    self._armed = jax.process_count() > 1 if armed is None else armed
    # Known from the start: jax itself may be what is stuck.
    self._who = f"process {jax.process_index()} of {jax.process_count()}"
    self._last = ("start", time.monotonic())
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> "Watchdog":
    self.beat("start")
    if self._armed:
      self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._done.set()
    if self._armed:
      self._thread.join()

  def beat(self, what: str) -> None:
    """Tells what the process does now; may be called from any thread."""
    self._last = (what, time.monotonic())

  def _watch(self):
    left = self._timeout_s
    while not self._done.wait(left):
      what, at = self._last
      silent = time.monotonic() - at
      left = self._timeout_s - silent
      if left <= 0:
        self._end(what, silent)

  def _end(self, what, silent):
    end_process(
        f"{self._who} has made no progress for {silent:.0f} s; the last was:"
        f" {what}. It, or one that it waits for, is stuck: compare the output"
        " of all. Started again on the same --workdir, the run goes on from its"
        " last checkpoint. If the work takes that long, raise"
        " distributed.stall_timeout_s"
    )


def end_process(message: str) -> NoReturn:
  """Ends the process at once, by one line on standard error."""
  # Neither a lock of sys.stderr nor a handler at exit may hold it up.
  os.write(2, f"error: {message}\n".encode())
  os._exit(EXIT_STATUS)

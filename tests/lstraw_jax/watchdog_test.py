"""The watchdog barks at silence, and at nothing else."""

import pathlib
import subprocess
import sys

from lstraw_jax.watchdog import EXIT_STATUS

PROGRAM = """
import time
from lstraw_jax.watchdog import Watchdog

with Watchdog(0.5):  # not armed: this process is alone
  time.sleep(1)
with Watchdog(1.0, armed=True) as dog:
  for index in range(8):
    time.sleep(0.2)
    dog.beat(str(index))
time.sleep(1.5)
print("alive", flush=True)
with Watchdog(1.0, armed=True) as dog:
  dog.beat("update 3/60: capture chunk 5/12")
  time.sleep(60)
print("never")
"""


def test_silence_ends_the_process_and_says_what_was_last():
  result = subprocess.run(
      [sys.executable, "-c", PROGRAM],
      cwd=pathlib.Path(__file__).parents[2],
      capture_output=True,
      text=True,
      timeout=60,
  )
  assert result.returncode == EXIT_STATUS
  assert result.stdout == "alive\n"
  (line,) = result.stderr.splitlines()
  assert line.startswith(
      "error: process 0 of 1 has made no progress for 1 s; the last was: update"
      " 3/60: capture chunk 5/12. "
  )
  assert "raise distributed.stall_timeout_s" in line

"""Two processes that work as one, until one of them is lost."""

import json
import signal
import socket

import jax
import pytest

from lstraw_jax.distributed import DistributedConfig, initialize, is_primary
from lstraw_jax.watchdog import EXIT_STATUS
from tests import processes

CHILD = "tests/distributed_child.py"
TIMEOUT_S = 10


def pair(name, *arguments):
  """Returns the commands of two processes that find each other."""
  port = str(processes.free_port())
  return [[CHILD, name, port, str(i), *arguments] for i in (0, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(coordinator="host"), "coordinator='host': want HOST:PORT"),
        (dict(coordinator="host:99999"), "want HOST:PORT with a port in 1"),
        (dict(coordinator="h:1"), "num_processes=0: want the number"),
        (
            dict(coordinator="h:1", num_processes=2),
            r"process_id=-1: want 0\.\.1, another for each",
        ),
        (dict(coordinator="h:1", num_processes=2, process_id=2), "id=2"),
        (dict(num_processes=2), "num_processes=2, .* distributed.coordinator="),
        (dict(process_id=0), "process_id=0: want distributed.coordinator="),
        (dict(auto=True, process_id=1), "leave .* out, or set auto=False"),
        (dict(timeout_s=0), "timeout_s=0: want at least 1"),
        (dict(stall_timeout_s=0), "stall_timeout_s=0"),
    ],
)
def test_an_impossible_place_is_refused_by_name(settings, message):
  with pytest.raises(ValueError, match=message):
    DistributedConfig(**settings)


def test_a_process_that_is_alone_asks_nobody():
  initialize(DistributedConfig())
  assert is_primary()


def test_a_port_that_is_taken_is_refused():
  with socket.socket() as server:
    server.bind(("", 0))
    server.listen()
    port = server.getsockname()[1]
    with pytest.raises(ValueError, match=f"h:{port}': cannot listen on that"):
      initialize(
          DistributedConfig(
              coordinator=f"h:{port}", num_processes=2, process_id=0
          )
      )


def test_a_cluster_that_is_not_there_is_missed(monkeypatch):
  def initialize_in_no_cluster(**_):
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", initialize_in_no_cluster)
  with pytest.raises(ValueError, match="auto=True: found no cluster to ask"):
    initialize(DistributedConfig(auto=True))


def test_processes_learn_each_other_s_texts_and_configs(tmp_path):
  with processes.started(pair("agree"), output=tmp_path) as children:
    assert [child.wait(processes.START_S) for child in children] == [0, 0]
  lines = [processes.printed(tmp_path, i).splitlines() for i in (0, 1)]
  found = [json.loads(each[-1]) for each in lines]
  assert [each["primary"] for each in found] == [True, False]
  assert ["said once" in each for each in lines] == [True, False]
  for each in found:
    assert each["devices"] == [4, 8]
    assert each["texts"] == ["ä", "äää"]
    assert each["refused"].splitlines() == [
        "process 1 was started with another config:",
        "  seed: process 0 0, process 1 1",
        "  train.steps: process 0 3, process 1 4",
    ]


@pytest.mark.parametrize(
    ("victim", "sent"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP)],
)
def test_a_lost_process_ends_the_other(tmp_path, victim, sent):
  commands = pair("work", str(tmp_path), str(TIMEOUT_S), "999", "-1")
  with processes.started(commands, output=tmp_path) as children:
    ready = [tmp_path / f"ready-{i}" for i in (0, 1)]
    processes.wait_for(ready, children)
    children[victim].send_signal(sent)
    assert children[1 - victim].wait(3 * TIMEOUT_S) != 0
  message = processes.printed(tmp_path, 1 - victim)
  assert "indicates that another task died" in message


def test_a_process_that_is_stuck_ends_all(tmp_path):
  commands = pair("work", str(tmp_path), "60", "6", "1")
  with processes.started(commands, output=tmp_path) as children:
    assert [child.wait(processes.START_S) for child in children] == [
        EXIT_STATUS
    ] * 2
  for index in (0, 1):
    *_, line = processes.printed(tmp_path, index).splitlines()
    assert line.startswith(
        f"error: process {index} of 2 has made no progress for 6 s; the last"
        " was: round 5."
    )


def test_a_process_that_nobody_joins_says_so(tmp_path):
  alone = pair("work", str(tmp_path), "3", "999", "-1")[1:]
  with processes.started(alone, output=tmp_path) as (child,):
    assert child.wait(processes.START_S) == EXIT_STATUS
  (line,) = processes.printed(tmp_path, 0).splitlines()
  assert line.startswith("error: could not join the other processes at 127.0.0")
  assert "within distributed.timeout_s=3." in line

"""Machines by name, and devices that are not there."""

import jax
import pytest

from lstraw_jax.capacity import topology
from lstraw_jax.capacity.targets import TARGETS, Machine, find_machine
from lstraw_jax.capacity.topology import (
    absent_devices,
    gpu_config,
    missing_extra,
)


def test_a_machine_is_a_name_and_a_count():
  machine = find_machine("h20-3e:8")
  assert machine == Machine("h20-3e", 8)
  assert str(machine) == "h20-3e:8"
  assert find_machine("h200") == Machine("h200", 1)
  # 143,771 MiB: the ceiling that LongStraw states.
  assert machine.target.memory_bytes == 150_754_820_096


@pytest.mark.parametrize(
    "text, message",
    [
        ("h20-3f:8", "want one of h20-3e, h20, h100.*did you mean 'h20-3e'"),
        ("abacus:8", "'abacus' is unknown, want one of"),
        ("h200:", "want a number of devices behind the colon, as h200:8"),
        ("h200:0", "got '0'"),
        ("h200:-1", "got '-1'"),
        ("h200:eight", "got 'eight'"),
    ],
)
def test_a_mistake_is_refused_with_what_is_known(text, message):
  with pytest.raises(ValueError, match=message):
    find_machine(text)


@pytest.mark.parametrize("name", [n for n in TARGETS if n != "cpu"])
def test_every_accelerator_states_its_rates(name):
  target = TARGETS[name]
  rates = (target.flops, target.memory_rate, target.link_rate, target.host_rate)
  assert all(rates) and target.memory_bytes and target.device_kind
  if target.platform == "cuda":
    config = gpu_config(target)
    assert f"core_count: {target.cores}" in config
    assert f"device_memory_size: {target.memory_bytes}" in config


def test_a_cpu_needs_no_extra_and_has_no_more_devices_than_there_are():
  assert missing_extra("cpu") is None
  assert list(absent_devices(Machine("cpu", 8))) == jax.devices()[:8]
  with pytest.raises(ValueError, match="cpu:9: there are 8 devices"):
    absent_devices(Machine("cpu", 9))


@pytest.mark.parametrize(
    "machine, message",
    [
        (Machine("h200", 12 + 1), "want a multiple of 8 devices, or fewer"),
        (Machine("v5p", 6), "want a multiple of 4 devices"),
        (Machine("v6e", 6), "want one of 1, 4, 8, 16, 32, 64 devices"),
    ],
    ids=str,
)
def test_a_count_that_no_machine_has_is_refused(machine, message):
  with pytest.raises(ValueError, match=message):
    absent_devices(machine)


def test_an_extra_that_is_missing_has_a_name(monkeypatch):
  monkeypatch.setattr(
      topology, "_MODULES", {"tpu": ("no_such.module", "plan-tpu")}
  )
  assert missing_extra("tpu") == "plan-tpu"

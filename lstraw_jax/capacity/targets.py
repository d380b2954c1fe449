"""Accelerators by name: what a plan must know of each.

Rates are the vendor's peaks for dense bfloat16; links are one direction. A new
target is one more entry. Sources: the data sheets of NVIDIA H20, H100 SXM, H200
SXM and DGX B200, and of Google Cloud TPU v5p and v6e. Memory in MiB is what the
driver reports.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Literal

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One device. Bytes a second and operations a second are at their peak."""

  platform: Literal["cuda", "tpu", "cpu"]
  memory_bytes: int | None  # None: not known
  flops: float | None = None  # bfloat16, dense
  memory_rate: float | None = None
  link_rate: float | None = None  # to the other devices of a host
  host_rate: float | None = None  # to host memory
  # What the compiler must know of a GPU; H20 is compiled as a small H200.
  device_kind: str = ""
  cores: int = 0
  capability: tuple[int, int] = (9, 0)
  l2_bytes: int = 50 * _MIB
  clock_ghz: float = 1.98
  devices_per_host: int = 8


TARGETS: Mapping[str, Target] = {
    "h20-3e": Target(
        platform="cuda",
        memory_bytes=143_771 * _MIB,
        flops=148e12,
        memory_rate=4.8e12,
        device_kind="NVIDIA H200",
        cores=78,
        link_rate=450e9,
        host_rate=64e9,
    ),
    "h20": Target(
        platform="cuda",
        memory_bytes=97_871 * _MIB,
        flops=148e12,
        memory_rate=4.0e12,
        device_kind="NVIDIA H200",
        cores=78,
        link_rate=450e9,
        host_rate=64e9,
    ),
    "h100": Target(
        platform="cuda",
        memory_bytes=81_559 * _MIB,
        flops=989e12,
        memory_rate=3.35e12,
        device_kind="NVIDIA H100 80GB HBM3",
        cores=132,
        link_rate=450e9,
        host_rate=64e9,
    ),
    "h200": Target(
        platform="cuda",
        memory_bytes=143_771 * _MIB,
        flops=989e12,
        memory_rate=4.8e12,
        device_kind="NVIDIA H200",
        cores=132,
        link_rate=450e9,
        host_rate=64e9,
    ),
    "b200": Target(
        platform="cuda",
        memory_bytes=183_359 * _MIB,
        flops=2250e12,
        memory_rate=8.0e12,
        link_rate=900e9,
        host_rate=64e9,
        device_kind="NVIDIA B200",
        cores=148,
        capability=(10, 0),
        l2_bytes=126 * _MIB,
    ),
    "v5p": Target(
        platform="tpu",
        memory_bytes=95 * 1024 * _MIB,
        flops=459e12,
        memory_rate=2.765e12,
        link_rate=600e9,
        host_rate=32e9,
        device_kind="v5p",
        devices_per_host=4,
    ),
    "v6e": Target(
        platform="tpu",
        memory_bytes=32 * 1024 * _MIB,
        flops=918e12,
        memory_rate=1.638e12,
        link_rate=448e9,
        host_rate=32e9,
        device_kind="v6e",
    ),
    "cpu": Target(platform="cpu", memory_bytes=None),
}


@dataclasses.dataclass(frozen=True)
class Machine:
  """Some devices of one kind."""

  name: str
  devices: int

  @property
  def target(self) -> Target:
    """What each of them is."""
    return TARGETS[self.name]

  def __str__(self) -> str:
    return f"{self.name}:{self.devices}"


def find_machine(text: str) -> Machine:
  """Reads NAME:COUNT, as h20-3e:8; one device if no count is given.

  Raises:
    ValueError: for an unknown name or a count below 1.
  """
  name, _, count = text.partition(":")
  if name not in TARGETS:
    near = difflib.get_close_matches(name, TARGETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"target={text!r}: {name!r} is unknown, want one of"
        f" {', '.join(TARGETS)}, and a number of devices, as h20-3e:8{hint}"
    )
  if ":" in text and not re.fullmatch("[1-9][0-9]{0,5}", count):
    raise ValueError(
        f"target={text!r}: want a number of devices behind the colon, as"
        f" {name}:8; got {count!r}"
    )
  return Machine(name, int(count or 1))

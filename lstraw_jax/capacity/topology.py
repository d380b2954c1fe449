"""Devices that are not there: XLA compiles for them all the same.

Only in a process made for it (`experiments/plan_child.py`): a compiler plugin
reads its environment when jax starts, and complains where no driver is.
"""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from lstraw_jax.capacity.targets import Machine, Target

# Chips a side; jax wants each topology by its shape.
_V6E = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
_MODULES = {
    "cuda": ("jax_plugins.xla_cuda13", "plan-gpu"),
    "tpu": ("libtpu", "plan-tpu"),
}


def missing_extra(platform: str) -> str | None:
  """Returns the extra that must be installed to compile for a platform."""
  if platform == "cpu":
    return None
  module, extra = _MODULES[platform]
  try:
    return None if importlib.util.find_spec(module) else extra
  except ModuleNotFoundError:  # its parent
    return extra


def absent_devices(machine: Machine) -> Sequence[Any]:
  """Returns devices that programs can be compiled for but not run on.

  On "cpu" they are this host's, which must be as many.

  Raises:
    ValueError: if the compiler cannot make so many.
  """
  target, count = machine.target, machine.devices
  if target.platform == "cpu":
    devices = jax.devices("cpu")
    if len(devices) < count:
      raise ValueError(f"target={machine}: there are {len(devices)} devices")
    return devices[:count]
  if target.platform == "tpu":
    return _tpu(machine).devices
  hosts = math.ceil(count / target.devices_per_host)
  if count % hosts:
    raise ValueError(
        f"target={machine}: want a multiple of {target.devices_per_host}"
        " devices, or fewer"
    )
  found = topologies.get_topology_desc(
      platform="cuda",
      target_config=gpu_config(target),
      topology=f"1x{hosts}x{count // hosts}",
  )
  return found.devices


def _tpu(machine: Machine):
  """Returns a slice: v5p in three dimensions, v6e in two."""
  count = machine.devices
  if machine.name == "v6e":
    if count not in _V6E:
      raise ValueError(
          f"target={machine}: want one of {', '.join(map(str, _V6E))} devices"
      )
    shape = _V6E[count]
  else:
    if count % 4:
      raise ValueError(f"target={machine}: want a multiple of 4 devices")
    shape = f"2x2x{count // 4}"
  return topologies.get_topology_desc(
      platform="tpu", topology_name=f"{machine.target.device_kind}:{shape}"
  )


def gpu_config(target: Target) -> str:
  """Returns XLA's description of a GPU, a GpuTargetConfigProto in text."""
  major, minor = target.capability
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.memory_rate or 0)}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{target.device_kind}"
"""

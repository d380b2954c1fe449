"""What a stage asks of one device, and how long that takes at peak rates."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from lstraw_jax.capacity.targets import Target

Bound = Literal["compute", "memory", "links", "host"]


class StageCost(NamedTuple):
  """Work of one device."""

  flops: int = 0  # of matrix products: a multiplication and an addition are two
  memory_bytes: float = 0.0  # read from and written to device memory
  collective_bytes: float = 0.0  # received from other devices
  host_bytes: float = 0.0  # between host memory and the device

  def seconds(self, target: Target) -> float | None:
    """Returns the time of what takes longest, the rest hidden behind it.

    None for a target whose rates are not known.
    """
    times = self.times(target)
    return None if times is None else max(times.values())

  def bound(self, target: Target) -> Bound | None:
    """Returns what takes longest; None for a target of unknown rates."""
    times = self.times(target)
    return None if times is None else max(times, key=times.__getitem__)

  def times(self, target: Target) -> Mapping[Bound, float] | None:
    """Returns the seconds of each kind of work alone; None as above."""
    work: Mapping[Bound, tuple[float, float | None]] = {
        "compute": (self.flops, target.flops),
        "memory": (self.memory_bytes, target.memory_rate),
        "links": (self.collective_bytes, target.link_rate),
        "host": (self.host_bytes, target.host_rate),
    }
    known: dict[Bound, float] = {
        kind: x / rate for kind, (x, rate) in work.items() if rate
    }
    return known if len(known) == len(work) else None

  def repeated(self, count: int) -> "StageCost":
    """Returns the work of doing this so many times."""
    flops, *moved = self
    return StageCost(count * flops, *(count * x for x in moved))


def total(costs: Iterable[StageCost]) -> StageCost:
  """Adds up."""
  return StageCost(*map(sum, zip(*costs, strict=True)))


def gathered(size: float, parts: int) -> float:
  """Returns the bytes that each of some devices receives in an all-gather.

      (parts - 1) / parts of the whole, `size`

  They are as many in a reduce-scatter and in an all-to-all.
  """
  return size * (parts - 1) / parts


def reduced(size: float, parts: int) -> float:
  """Returns the bytes of an all-reduce: a reduce-scatter and an all-gather."""
  return 2 * gathered(size, parts)

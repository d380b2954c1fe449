"""Numbers that describe an update: per token, per phase, per step."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lstraw_jax.log_probs import TokenScores
from lstraw_jax.objectives import TokenLosses


class TokenStats(NamedTuple):
  """Sums and a maximum over tokens that carry loss; scalars, or stacked."""

  tokens: jax.Array
  ratio_sum: jax.Array
  ratio_max: jax.Array
  clipped: jax.Array
  kl_sum: jax.Array
  entropy_sum: jax.Array

  def combine(self) -> "TokenStats":
    """Statistics of all the sets of tokens whose own are stacked in this."""
    sums = jax.tree.map(jnp.sum, self)
    return sums._replace(ratio_max=self.ratio_max.max())

  def means(self) -> dict[str, float]:
    """Returns what a log row shows, on the host."""
    tokens = max(float(self.tokens), 1.0)
    return {
        "ratio_mean": float(self.ratio_sum) / tokens,
        "ratio_max": float(self.ratio_max),
        "clip_share": float(self.clipped) / tokens,
        "kl_nats": float(self.kl_sum) / tokens,
        "entropy_nats": float(self.entropy_sum) / tokens,
    }


def token_stats(
    losses: TokenLosses, scores: TokenScores, loss_mask: jax.Array
) -> TokenStats:
  """Sums the per-token values where `loss_mask` is set."""
  dtype = scores.log_probs.dtype
  kept = lambda x: jnp.where(loss_mask, x.astype(dtype), 0.0)
  return TokenStats(
      tokens=loss_mask.sum(dtype=dtype),
      ratio_sum=kept(losses.ratio).sum(),
      ratio_max=kept(losses.ratio).max(),
      clipped=kept(losses.clipped).sum(),
      kl_sum=kept(losses.kl).sum(),
      entropy_sum=kept(scores.entropy).sum(),
  )


class PhaseClock:
  """Adds up the seconds spent in each phase of an update."""

  def __init__(self, *, begin: Callable[[str], None] | None = None):
    """Begins at zero; `begin` is called with each phase that begins."""
    self.seconds: dict[str, float] = {}
    self._begin = begin

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Times a phase; the caller waits for its device work inside."""
    if self._begin is not None:
      self._begin(name)
    start = time.perf_counter()
    yield
    spent = time.perf_counter() - start
    self.seconds[name] = self.seconds.get(name, 0.0) + spent


class PeakMemory(NamedTuple):
  """The most memory that was held, and whose it is."""

  bytes: int
  source: Literal["device", "process"]


def peak_memory() -> PeakMemory:
  """Returns the peak so far.

  The busiest device's own counter where the backend has one, else the largest
  resident set of this process.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  if peaks:
    return PeakMemory(max(peaks), "device")
  kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return PeakMemory(kibibytes * 1024, "process")


def device_memory() -> int | None:
  """Returns the bytes that a device may hold, if the backend tells."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
  return min(limits, default=None)

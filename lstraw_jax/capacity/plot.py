"""The picture of a plan: peak memory against the length of the prompt."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lstraw_jax.capacity.advice import longest_prompt, peak_bytes
from lstraw_jax.capacity.workload import Workload

# Positions and peak bytes a device that LongStraw reports for Qwen3.6-27B with
# adapters on 8 H20-3e (arXiv 2607.14952): a group of 8 responses, then 64
# replays behind one frozen prefix, and its longest block that fit.
PUBLISHED = (
    (2_097_152, 97.711e9),
    (4_456_448, 83.894e9),
    (4_456_448, 143.163e9),
    (4_538_368, 145.176e9),
)
_POINTS = 200


def plot_plan(
    path: str | os.PathLike[str],
    workload: Workload,
    *,
    limit: int | None,
    compiled: Sequence[tuple[int, int]],
    with_published: bool,
    title: str,
) -> None:
  """Draws the planned peak over prompt lengths.

  Args:
    path: of the PNG.
    workload: all but the length of the prompt.
    limit: bytes of a device, if known.
    compiled: prompt tokens and peak bytes by the compiler.
    with_published: show the paper's points too.
    title: facts about the update.
  """
  longest = 2 * workload.prompt_tokens
  if limit is not None:
    longest = max(longest, int(1.3 * longest_prompt(workload, limit)))
  tokens = np.unique(np.linspace(1, longest, _POINTS).astype(int))
  peaks = [
      peak_bytes(dataclasses.replace(workload, prompt_tokens=int(n)))
      for n in tokens
  ]
  figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  axes.step(
      tokens / 2**20, np.array(peaks) / 1e9, where="post", label="planned"
  )
  here = peak_bytes(workload)
  axes.plot(workload.prompt_tokens / 2**20, here / 1e9, "o", color="tab:blue")
  if compiled:
    where, found = np.array(compiled, float).T
    axes.plot(where / 2**20, found / 1e9, "x", label="compiled", color="k")
  if with_published:
    where, found = np.array(PUBLISHED).T
    axes.plot(
        where / 2**20,
        found / 1e9,
        "s",
        mfc="none",
        color="tab:red",
        label="LongStraw, as published",
    )
  if limit is not None:
    axes.axhline(
        limit / 1e9, color="tab:gray", ls="--", label="memory of a device"
    )
  axes.set_xlabel("prompt tokens / 1,048,576")
  axes.set_ylabel("peak, GB per device")
  axes.set_xlim(left=0)
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
  axes.set_title(title, fontsize="medium", wrap=True)
  figure.savefig(path)

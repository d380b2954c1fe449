"""What the gradient of one update costs: one graph, and ours, twice.

    python -m experiments.bench_step --prompt_tokens=8192 --response_tokens=128

On the same random weights and tokens, each way in a process of its own:

    graph    G whole sequences as one batch in one graph, rematerialised layer
             by layer: the conventional update, in JAX
    dropped  capture and replay
    exact    capture, replay, and the reverse sweep over the prompt

Seconds are the median of some runs after one that compiles. Bytes are those of
the largest program of a way as XLA assigned them, weights included. The last
column is the distance of the gradient from that of one graph.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import command_line
from experiments.gradient_ways import WAYS
from experiments.random_group import make_problem
from modeling.presets import preset

_MODEL = flags.DEFINE_string("model", "tiny", "See modeling/presets.py.")
_SIZES = {
    "prompt_tokens": (8192, "Tokens of the prompt, P."),
    "response_tokens": (128, "Tokens of a response, R."),
    "group_size": (8, "Responses, G."),
    "chunk_tokens": (1024, "Tokens of a chunk of the prompt."),
}
for name, (default, text) in _SIZES.items():
  flags.DEFINE_integer(name, default, text, lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs.", lower_bound=1)
_JSON = flags.DEFINE_string("json", "", "Where to write all numbers.")
_WAY = flags.DEFINE_string("way", "", "Runs this way alone, and prints JSON.")
_GRADIENT = flags.DEFINE_string("gradient", "", "Where a way saves it, .npy.")


def main(argv):
  del argv
  sizes: dict[str, Any] = {name: flags.FLAGS[name].value for name in _SIZES}
  if _WAY.value:
    print(json.dumps(measure(_WAY.value, sizes)))
    return
  preset(_MODEL.value)  # a mistake is found before anything runs
  if _JSON.value:
    pathlib.Path(_JSON.value).touch()
  console = Console()
  with tempfile.TemporaryDirectory() as folder:
    results = {}
    for way in WAYS:
      with console.status(f"{way}: compiling and running"):
        results[way] = _child(way, sizes, pathlib.Path(folder))
  console.print(table(results))
  if _JSON.value:
    report = {"model": _MODEL.value, **sizes, "ways": results}
    pathlib.Path(_JSON.value).write_text(json.dumps(report, indent=2) + "\n")


def measure(way: str, sizes: dict[str, int]) -> dict[str, float]:
  """Runs one way in this process."""
  if way not in WAYS:
    raise ValueError(f"way={way!r}: want one of {', '.join(WAYS)}")
  run, peak_bytes = WAYS[way](make_problem(model=_MODEL.value, **sizes))
  seconds = []
  for _ in range(1 + _REPEATS.value):
    start = time.perf_counter()
    gradients = jax.block_until_ready(run())
    seconds.append(time.perf_counter() - start)
  if _GRADIENT.value:
    leaves = map(np.ravel, jax.tree.leaves(jax.device_get(gradients)))
    np.save(_GRADIENT.value, np.concatenate(list(leaves)))
  return {
      "seconds": statistics.median(seconds[1:]),
      "first_seconds": seconds[0],
      "peak_bytes": peak_bytes(),
  }


def table(results: dict[str, dict[str, float]]) -> Table:
  """Returns the numbers, each beside its share of one graph's."""
  graph = results["graph"]
  shown = Table("way", "seconds", "faster", "MB", "less", "gradient apart")
  for way, found in results.items():
    shown.add_row(
        way,
        f"{found['seconds']:.2f}",
        f"{graph['seconds'] / found['seconds']:.1f} x",
        f"{found['peak_bytes'] / 1e6:.1f}",
        f"{graph['peak_bytes'] / found['peak_bytes']:.1f} x",
        f"{found['gradient_distance']:.1e}",
    )
  return shown


def _child(way, sizes, folder: pathlib.Path):
  """Measures a way in another process, and compares its gradient."""
  command = [sys.executable, "-m", "experiments.bench_step", f"--way={way}"]
  options = sizes | {"model": _MODEL.value, "repeats": _REPEATS.value}
  command += [f"--{name}={value}" for name, value in options.items()]
  command.append(f"--gradient={folder / way}.npy")
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise ValueError(f"way={way!r} ended with status {done.returncode}")
  found = json.loads(done.stdout.splitlines()[-1])
  graph, ours = (np.load(folder / f"{name}.npy") for name in ("graph", way))
  distance = np.linalg.norm(ours - graph) / np.linalg.norm(graph)
  return found | {"gradient_distance": float(distance)}


if __name__ == "__main__":
  command_line.run(main)

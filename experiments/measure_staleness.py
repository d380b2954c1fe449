"""Measures how a reused prompt state drifts, step by step, and its estimate.

    python -m experiments.measure_staleness --config=experiments/configs/tiny.py

The prompt of the first update is captured once, and updates follow behind that
state. After some of them it is compared to a state captured anew, as the paper
does (`lstraw_jax/staleness_oracle.py`). Beside it stands the estimate that
`--config.refresh.rule=adaptive` goes by. Step 0 is all zero; its seconds
include compilation. Writes `staleness.json` and `staleness.png`.
"""

import dataclasses

import numpy as np
from absl import flags
from rich.console import Console

from experiments import command_line
from experiments.requests import make_requests
from experiments.run_flags import CONFIG, WORKDIR
from experiments.run_settings import load_policy
from experiments.settings import describe, read_settings
from experiments.start import agree_on_workdir, join_processes, resolved
from lstraw_jax.distributed import is_primary, say
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.receipt import environment, write_json
from lstraw_jax.staleness_oracle import measure_steps
from lstraw_jax.staleness_plot import plot_staleness

_STEPS = flags.DEFINE_list("steps", "1,2,4,8", "Steps after which to measure.")
_RATES = flags.DEFINE_list(
    "learning_rates", None, "Default: config.optimizer.learning_rate."
)
_HEADER = "   rate step    loss %    drift estimate   estimate s  capture s"
_ROW = "{:7g} {:4d} {:9.3g} {:8.4f} {:8.4f} {:12.3f} {:10.3f}"


def main(argv):
  del argv
  config = CONFIG.value
  join_processes(config, steps=_STEPS.value, learning_rates=_RATES.value)
  steps = _numbers("steps", _STEPS.value, int)
  rates = _RATES.value or [config.optimizer.learning_rate]
  rates = _numbers("learning_rates", rates, float)
  settings = read_settings(config)
  if config.objective.kl_coef:
    raise ValueError(
        f"objective.kl_coef={config.objective.kl_coef}: want 0; the loss that"
        " is compared has no penalty"
    )
  request = make_requests(config, settings)(0)[0]
  workdir = agree_on_workdir(WORKDIR.value, kind="staleness-")
  say(f"folder {workdir}\ndrift, estimate: nats per token\n{_HEADER}")
  console, rows = Console(quiet=not is_primary(), highlight=False), []
  with console.status("start") as line:
    for row in measure(config, settings, request, steps, rates, line.update):
      console.print(_ROW.format(*row.values()))
      rows.append(row)
  if is_primary():
    _write(workdir, config, rows)
  say(_summary([row for row in rows if row["step"]]))


def measure(config, settings, request, steps, rates, show):
  """Yields a row for each learning rate and step."""
  policy = load_policy(config, settings)
  # One callable for all, as it is compiled in.
  progress = lambda stage, done, total: show(f"{stage} {done}/{total}")
  for rate in rates:
    found = measure_steps(
        policy,
        request,
        steps=steps,
        optimizer=make_optimizer(
            dataclasses.replace(settings.optimizer, learning_rate=rate)
        ),
        seed=config.seed,
        config=settings.update,
        clock=PhaseClock(begin=show),
        progress=progress,
    )
    for step, measured in found:
      yield {"learning_rate": rate, "step": step, **measured._asdict()}


def _write(folder, config, rows):
  folder.mkdir(parents=True, exist_ok=True)
  source = {**environment(), "config": resolved(config), "seed": config.seed}
  write_json(folder / "staleness.json", {**source, "rows": rows})
  witness = f"witness of {config.refresh.witness_tokens} tokens"
  title = f"{describe(config)}, {witness}"
  plot_staleness(folder / "staleness.png", rows, title=title)


def _summary(rows):
  share = np.median([row["estimate_s"] / row["capture_s"] for row in rows])
  text = f"an estimate takes {share:.1%} of the time of a capture"
  if len(rows) == 1:
    return text
  ranks = lambda name: np.argsort(np.argsort([row[name] for row in rows]))
  rank = np.corrcoef(ranks("drift_nats"), ranks("estimate_nats"))[0, 1]
  return f"{text}; its rank correlation to the drift is {rank:.2f}"


def _numbers(name, texts, kind):
  """Returns the numbers of a flag, each once, in rising order."""
  try:
    numbers = sorted({kind(text) for text in texts})
  except ValueError:
    numbers = []
  if not numbers or not 0 < numbers[0] <= numbers[-1] < float("inf"):
    raise ValueError(
        f"--{name}={','.join(map(str, texts))}: want numbers above 0, separated"
        " by commas"
    )
  return numbers


if __name__ == "__main__":
  command_line.run(main)

"""The course of a run, whatever its updates are.

It begins anew or goes on from the last checkpoint, to the same bits that an
unbroken run would have; logs every update, saves some, and sums up at the end.
What it writes is listed in `lstraw_jax/run_folder.py`.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.start import resolved
from lstraw_jax.capture import Progress
from lstraw_jax.checkpoint import TrainCheckpoints
from lstraw_jax.curve_plot import Curve
from lstraw_jax.distributed import is_primary, say
from lstraw_jax.metrics import PhaseClock, peak_memory
from lstraw_jax.report import Report
from lstraw_jax.run_folder import RunFolder
from lstraw_jax.run_log import Row, make_row
from lstraw_jax.sft_step import SftMetrics
from lstraw_jax.tables import Table
from lstraw_jax.train_state import TrainState
from lstraw_jax.update_config import PromptGradient
from lstraw_jax.update_metrics import UpdateMetrics
from lstraw_jax.watchdog import Watchdog
from modeling.checkpoints import save_model

FORCE = flags.DEFINE_bool(
    "force", False, "Start a run that by the plan does not fit the devices."
)
# What a run may change when it goes on; a checkpoint is the same on any mesh.
_MAY_CHANGE = (
    "train.steps",
    "checkpoint",
    "mesh",
    "distributed",
    "state",
    "memory",
)


class Updated(NamedTuple):
  """What an update leaves."""

  state: TrainState
  metrics: UpdateMetrics | SftMetrics
  tokens: int  # that it worked on


# (state, position in the data, clock, progress) -> what it leaves
Update = Callable[[TrainState, int, PhaseClock, Progress], Updated]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """What makes one kind of training of a run."""

  start: Callable[[], TrainState]  # the state before the first update
  update: Update
  prompt_gradient: PromptGradient
  table: Table
  curve: Curve
  title: str
  # Called when a checkpoint is complete, to drop whatever it does not hold: a
  # run that goes on from it has none.
  forget: Callable[[], None] = lambda: None


def train(
    config: Any, training: Training, *, workdir: pathlib.Path
) -> list[Row]:
  """Trains until `config.train.steps`; returns a row per update."""
  folder = RunFolder(workdir, config=resolved(config))
  say(f"run folder {workdir}")
  say(f"prompt gradient: {training.prompt_gradient}")
  with (
      Watchdog(config.distributed.stall_timeout_s) as dog,
      TrainCheckpoints(
          folder.checkpoints,
          config=resolved(config),
          may_change=_MAY_CHANGE,
          keep=config.checkpoint.keep,
      ) as checkpoints,
  ):
    state, position = _start(training, checkpoints)
    step = int(state.step)
    folder.begin(step=step)
    with Report(
        training.table,
        step=step,
        steps=config.train.steps,
        shown=is_primary(),
        beat=dog.beat,
    ) as table:
      while step < config.train.steps:
        clock = PhaseClock(begin=table.begin)
        state, metrics, tokens = training.update(state, position, clock, table)
        position += config.train.prompts_per_step
        step = int(state.step)
        row = make_row(
            metrics,
            step=step,
            tokens=tokens,
            seconds=clock.seconds,
            peak=peak_memory(),
        )
        table.add(row)
        folder.add(row)
        last = step == config.train.steps
        if last or step % config.checkpoint.every_steps == 0:
          table.begin("checkpoint")
          checkpoints.save(state, position=position)
          training.forget()
    if config.checkpoint.export and not folder.model.exists():
      dog.beat("export")
      save_model(state.policy.model, folder.model)
  folder.finish(
      training.curve,
      prompt_gradient=training.prompt_gradient,
      title=training.title,
  )
  return folder.rows


def say_outcome(curve: Curve, rows: list[Row], *, seed: int) -> None:
  """Says how a run went, in a line."""
  values = curve.of(rows)
  say(
      f"{curve.name} of the first five updates {np.mean(values[:5]):.3f}, of"
      f" the last five {np.mean(values[-5:]):.3f}; seed {seed}"
  )


def _start(training, checkpoints):
  """Returns the state and the data position, new or of the last checkpoint."""
  state = training.start()
  if checkpoints.latest_step() is None:
    return state, 0
  state, position = checkpoints.restore(state)
  say(f"resumed after update {int(state.step)}")
  return state, position

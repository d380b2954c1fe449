"""Trains a policy by GRPO on long prompts.

    python -m experiments.train_grpo --config=experiments/configs/tiny.py

samples the responses itself, to prompts cut from real text. With
`--config.model.checkpoint=DIR` it trains a Hugging Face model, with
`--config.data.rollouts=FILE` on responses from a JSONL file. Started again on
the same `--workdir`, it goes on from the last checkpoint, to the same bits that
an unbroken run would have.

`--config.mesh.context=8` spreads a prompt over eight devices; several hosts run
the same, each with its `--config.distributed.process_id`. What a run writes is
listed in `lstraw_jax/run_folder.py`.
"""

import json
import pathlib
import time

import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments import command_line
from experiments.requests import make_requests
from experiments.settings import describe, load_policy, read_settings
from lstraw_jax.checkpoint import TrainCheckpoints
from lstraw_jax.distributed import (
    DistributedConfig,
    check_same_config,
    gather_text,
    initialize,
    is_primary,
    say,
)
from lstraw_jax.metrics import PhaseClock, peak_memory
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.report import Report
from lstraw_jax.run_folder import RunFolder
from lstraw_jax.run_log import make_row
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import train_step
from lstraw_jax.watchdog import Watchdog
from modeling.checkpoints import save_model

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Settings of the run, e.g. experiments/configs/tiny.py."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run folder. Default: runs/ and the time of the start."
)

# What a run may change when it goes on; a checkpoint is the same on any mesh.
_MAY_CHANGE = ("train.steps", "checkpoint", "mesh", "distributed", "state")


def main(argv):
  del argv
  config = _CONFIG.value
  initialize(DistributedConfig(**config.distributed))
  check_same_config(_resolved(config))
  settings = read_settings(config)
  requests = make_requests(config, settings)
  started = time.strftime("runs/%Y%m%d-%H%M%S")  # by each process's clock
  workdir, *_ = gather_text(_WORKDIR.value or started)
  rows = train(config, settings, requests, workdir=pathlib.Path(workdir))
  rewards = [row["reward_mean"] for row in rows]
  say(
      f"reward of the first five updates {np.mean(rewards[:5]):.3f}, of the"
      f" last five {np.mean(rewards[-5:]):.3f}; seed {config.seed}"
  )


def train(config, settings, requests, *, workdir: pathlib.Path):
  """Trains until `config.train.steps`; returns a row per update."""
  folder = RunFolder(workdir, config=_resolved(config))
  say(f"run folder {workdir}")
  say(f"prompt gradient: {config.train.prompt_gradient}")
  optimizer = make_optimizer(settings.optimizer)
  with (
      Watchdog(config.distributed.stall_timeout_s) as dog,
      TrainCheckpoints(
          folder.checkpoints,
          config=_resolved(config),
          may_change=_MAY_CHANGE,
          keep=config.checkpoint.keep,
      ) as checkpoints,
  ):
    state, position = _start(config, settings, optimizer, checkpoints)
    step = int(state.step)
    folder.begin(step=step)
    with Report(
        step=step, steps=config.train.steps, shown=is_primary(), beat=dog.beat
    ) as table:
      while step < config.train.steps:
        clock = PhaseClock(begin=table.begin)
        state, metrics = train_step(
            state,
            requests(position),
            optimizer=optimizer,
            config=settings.update,
            clock=clock,
            progress=table,
        )
        position += config.train.prompts_per_step
        step = int(state.step)
        row = make_row(
            metrics, step=step, seconds=clock.seconds, peak=peak_memory()
        )
        table.add(row)
        folder.add(row)
        last = step == config.train.steps
        if last or step % config.checkpoint.every_steps == 0:
          table.begin("checkpoint")
          checkpoints.save(state, position=position)
    if config.checkpoint.export and not folder.model.exists():
      dog.beat("export")
      save_model(state.policy.model, folder.model)
  folder.finish(title=describe(config))
  return folder.rows


def _start(config, settings, optimizer, checkpoints):
  """Returns the state and the data position, new or of the last checkpoint."""
  state = make_train_state(
      load_policy(config, settings),
      optimizer,
      seed=config.seed,
      with_reference=settings.update.replay.objective.kl_coef > 0,
  )
  if checkpoints.latest_step() is None:
    return state, 0
  state, position = checkpoints.restore(state)
  say(f"resumed after update {int(state.step)}")
  return state, position


def _resolved(config):
  return json.loads(config.to_json_best_effort())


flags.mark_flag_as_required("config")

if __name__ == "__main__":
  command_line.run(main)

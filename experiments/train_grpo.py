"""Trains a policy by GRPO on long prompts.

    python -m experiments.train_grpo --config=experiments/configs/tiny.py

samples the responses itself, to prompts cut from real text. With
`--config.model.checkpoint=DIR` it trains a Hugging Face model, with
`--config.data.rollouts=FILE` on responses from a JSONL file. Started again on
the same `--workdir`, it goes on from the last checkpoint, to the same bits that
an unbroken run would have.

The run folder holds `config.json` (resolved), `checkpoints/`, `metrics.jsonl`
(one row per update), `receipt.json` and `reward.png`; with
`--config.checkpoint.export=True` also `model/`, for transformers.
"""

import json
import pathlib
import time
from collections import Counter

import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments import command_line
from experiments.requests import make_requests
from experiments.settings import load_policy, read_settings
from lstraw_jax.checkpoint import TrainCheckpoints
from lstraw_jax.metrics import PhaseClock, peak_memory
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.receipt import write_receipt
from lstraw_jax.report import Report
from lstraw_jax.reward_plot import plot_rewards
from lstraw_jax.run_log import append_row, make_row, truncate_after
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import train_step
from modeling.checkpoints import save_model

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Settings of the run, e.g. experiments/configs/tiny.py."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run folder. Default: runs/ and the time of the start."
)

# What a run may change when it goes on from a checkpoint.
_MAY_CHANGE = ("train.steps", "checkpoint")


def main(argv):
  del argv
  config = _CONFIG.value
  settings = read_settings(config)
  requests = make_requests(config, settings)
  workdir = _WORKDIR.value or time.strftime("runs/%Y%m%d-%H%M%S")
  rows = train(config, settings, requests, workdir=pathlib.Path(workdir))
  rewards = [row["reward_mean"] for row in rows]
  print(
      f"reward of the first five updates {np.mean(rewards[:5]):.3f}, of the"
      f" last five {np.mean(rewards[-5:]):.3f}; seed {config.seed}"
  )


def train(config, settings, requests, *, workdir: pathlib.Path):
  """Trains until `config.train.steps`; returns a row per update."""
  workdir.mkdir(parents=True, exist_ok=True)
  resolved = json.loads(config.to_json_best_effort())
  print(f"run folder {workdir}")
  print(f"prompt gradient: {config.train.prompt_gradient}")
  optimizer = make_optimizer(settings.optimizer)
  state = make_train_state(
      load_policy(config, settings.model),
      optimizer,
      seed=config.seed,
      with_reference=settings.update.replay.objective.kl_coef > 0,
  )
  position = 0
  with TrainCheckpoints(
      workdir / "checkpoints",
      config=resolved,
      may_change=_MAY_CHANGE,
      keep=config.checkpoint.keep,
  ) as checkpoints:
    if checkpoints.latest_step() is not None:
      state, position = checkpoints.restore(state)
      print(f"resumed after update {int(state.step)}")
    (workdir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
    step = int(state.step)
    rows = truncate_after(workdir / "metrics.jsonl", step)
    with Report(step=step, steps=config.train.steps) as table:
      while step < config.train.steps:
        clock = PhaseClock()
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
        append_row(workdir / "metrics.jsonl", row)
        rows.append(row)
        last = step == config.train.steps
        if last or step % config.checkpoint.every_steps == 0:
          checkpoints.save(state, position=position)
  if config.checkpoint.export and not (workdir / "model").exists():
    save_model(state.policy.model, workdir / "model")
  _write_receipt(workdir / "receipt.json", resolved, rows)
  plot_rewards(workdir / "reward.png", rows, title=_title(config))
  return rows


def _write_receipt(path, config, rows):
  """Sums up all updates of the run, those before it was resumed included."""
  seconds = sum((Counter(row["seconds"]) for row in rows), Counter())
  most = max(rows, key=lambda row: row["peak_bytes"])
  write_receipt(
      path,
      config=config,
      seed=config["seed"],
      steps=rows[-1]["step"],
      prompt_gradient=config["train"]["prompt_gradient"],
      staleness_steps=0,
      seconds=seconds,
      peak_bytes=most["peak_bytes"],
      peak_source=most["peak_source"],
      rewards=[row["reward_mean"] for row in rows],
  )


def _title(config) -> str:
  source = config.data.rollouts or f"{config.data.prompt_tokens}-token prompts"
  model = config.model.checkpoint or config.model.preset
  return (
      f"{model}, {source}, {config.train.group_size} responses,"
      f" {config.train.prompt_gradient} prompt gradient, seed {config.seed}"
  )


flags.mark_flag_as_required("config")

if __name__ == "__main__":
  command_line.run(main)

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

import pathlib

from experiments import command_line, training
from experiments.fit_check import check_fits
from experiments.requests import make_requests
from experiments.run_flags import CONFIG, WORKDIR
from experiments.run_settings import load_policy
from experiments.settings import describe, read_settings
from experiments.start import agree_on_workdir, join_processes
from lstraw_jax import tables
from lstraw_jax.curve_plot import REWARD
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.prompt_states import make_prompt_states
from lstraw_jax.train_state import make_train_state
from lstraw_jax.train_step import train_step


def main(argv):
  del argv
  config = CONFIG.value
  join_processes(config)
  settings = read_settings(config)
  requests = make_requests(config, settings)
  check_fits(
      config,
      requests.extent,
      model=settings.model,
      mesh=settings.mesh,
      update=settings.update,
      optimizer=settings.optimizer,
      force=training.FORCE.value,
  )
  workdir = agree_on_workdir(WORKDIR.value)
  rows = train(config, settings, requests, workdir=workdir)
  training.say_outcome(REWARD, rows, seed=config.seed)


def train(config, settings, requests, *, workdir: pathlib.Path):
  """Trains until `config.train.steps`; returns a row per update."""
  optimizer = make_optimizer(settings.optimizer)
  states = make_prompt_states(settings.update)

  def start():
    return make_train_state(
        load_policy(config, settings),
        optimizer,
        seed=config.seed,
        with_reference=settings.update.replay.objective.kl_coef > 0,
        memory_kind=settings.optimizer.memory_kind,
    )

  def update(state, position, clock, progress):
    state, metrics = train_step(
        state,
        requests(position),
        optimizer=optimizer,
        config=settings.update,
        clock=clock,
        progress=progress,
        states=states,
    )
    tokens = metrics.prompt_tokens + metrics.response_tokens
    return training.Updated(state, metrics, tokens)

  run = training.Training(
      start=start,
      update=update,
      prompt_gradient=settings.update.prompt_gradient,
      table=tables.GRPO,
      curve=REWARD,
      title=describe(config),
      forget=states.clear,
  )
  return training.train(config, run, workdir=workdir)


if __name__ == "__main__":
  command_line.run(main)

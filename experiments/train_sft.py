"""Trains a model on whole sequences, exactly, however long they are.

    python -m experiments.train_sft --config=experiments/configs/sft.py

predicts every byte of windows cut from real text. With
`--config.data.sequences=FILE` it trains on token lists from a JSONL file (see
`lstraw_jax/sequence_reader.py`), with `--config.model.checkpoint=DIR` a Hugging
Face model. Checkpoints, meshes and processes are as in `train_grpo.py`; every
setting is in `experiments/configs/sft_base.py`.
"""

import pathlib

from experiments import command_line, training
from experiments.fit_check import check_fits
from experiments.run_flags import CONFIG, WORKDIR
from experiments.run_settings import load_policy
from experiments.sequences import make_sequences
from experiments.sft_settings import describe, read_sft_settings
from experiments.start import agree_on_workdir, join_processes
from lstraw_jax import tables
from lstraw_jax.curve_plot import LOSS
from lstraw_jax.optimizer import make_optimizer
from lstraw_jax.sft_step import sft_step
from lstraw_jax.train_state import make_train_state


def main(argv):
  del argv
  config = CONFIG.value
  join_processes(config)
  settings = read_sft_settings(config)
  sequences = make_sequences(config, settings)
  check_fits(
      config,
      sequences.extent,
      model=settings.model,
      mesh=settings.mesh,
      update=settings.update.as_update(),
      optimizer=settings.optimizer,
      force=training.FORCE.value,
  )
  workdir = agree_on_workdir(WORKDIR.value)
  rows = train(config, settings, sequences, workdir=workdir)
  training.say_outcome(LOSS, rows, seed=config.seed)


def train(config, settings, sequences, *, workdir: pathlib.Path):
  """Trains until `config.train.steps`; returns a row per update."""
  optimizer = make_optimizer(settings.optimizer)

  def start():
    return make_train_state(
        load_policy(config, settings),
        optimizer,
        seed=config.seed,
        with_reference=False,
        memory_kind=settings.optimizer.memory_kind,
    )

  def update(state, position, clock, progress):
    state, metrics = sft_step(
        state,
        sequences(position),
        optimizer=optimizer,
        config=settings.update,
        clock=clock,
        progress=progress,
    )
    return training.Updated(state, metrics, metrics.tokens)

  run = training.Training(
      start=start,
      update=update,
      prompt_gradient="exact",
      table=tables.SFT,
      curve=LOSS,
      title=describe(config),
  )
  return training.train(config, run, workdir=workdir)


if __name__ == "__main__":
  command_line.run(main)

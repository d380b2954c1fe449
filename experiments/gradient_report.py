"""Measures what dropping the prompt gradient changes, by kind of weight.

    python -m experiments.gradient_report \
      --config=experiments/configs/tiny.py --prompt_tokens=512,2048,8192

For each length it takes the prompts and samples the responses that the first
update of training would, and compares the gradient at a constant prompt state
to the exact one. With `--config.data.rollouts=FILE` the file has both. Prompts
are reported one by one; on a mesh with a `data` axis, as many together as it
has replicas. What it writes is listed in `lstraw_jax/gradient_folder.py`.
"""

import numpy as np
from absl import flags
from rich.console import Console

from experiments import command_line
from experiments.requests import make_requests
from experiments.run_flags import CONFIG, WORKDIR
from experiments.run_settings import load_policy
from experiments.settings import read_settings
from experiments.start import agree_on_workdir, join_processes, resolved
from lstraw_jax.distributed import is_primary, say
from lstraw_jax.gradient_folder import GradientFolder
from lstraw_jax.gradient_table import gradient_table
from lstraw_jax.gradient_turn import report_turn
from lstraw_jax.metrics import PhaseClock
from lstraw_jax.watchdog import Watchdog

_PROMPT_TOKENS = flags.DEFINE_list(
    "prompt_tokens",
    None,
    "Prompt lengths, e.g. 512,2048. Default: config.data.prompt_tokens.",
)

# A report has both gradients, with both dtypes of sums, and takes no step.
_UNUSED = (
    "optimizer, checkpoint, train.steps, train.prompt_gradient,"
    " train.cotangent_dtype"
)


def main(_):
  config = CONFIG.value
  join_processes(config, prompt_tokens=_PROMPT_TOKENS.value)
  settings = read_settings(config)
  turns = _turns(config, settings)
  workdir = agree_on_workdir(WORKDIR.value, kind="gradient_report-")
  say(f"run folder {workdir}\nsettings that a report does not use: {_UNUSED}")
  model = config.model.checkpoint or config.model.preset
  title = f"{model}, lora.rank {config.lora.rank}, seed {config.seed}"
  folder = GradientFolder(workdir, config=resolved(config), title=title)
  report(config, settings, turns, folder)


def report(config, settings, turns, folder):
  """Reports turn by turn, and shows how far it is."""
  policy = load_policy(config, settings)
  longest = max(p.size for request, _ in turns for p in request.prompts)
  console = Console(quiet=not is_primary(), highlight=False)
  with (
      Watchdog(config.distributed.stall_timeout_s) as dog,
      console.status("start") as line,
  ):

    def begin(phase: str):
      dog.beat(phase)
      console.print(phase)
      line.update(phase)

    def progress(stage: str, done: int, total: int):
      dog.beat(f"{stage} {done}/{total}")
      line.update(f"{stage} {done}/{total}")

    for request, indices in turns:
      sizes = " + ".join(f"{prompt.size:,}" for prompt in request.prompts)
      console.print(f"prompts of {sizes} tokens")
      clock = PhaseClock(begin=begin)
      groups, rows = report_turn(
          policy,
          request,
          seed=config.seed,
          indices=indices,
          room_tokens=longest,  # all of them share their programs
          config=settings.update,
          clock=clock,
          progress=progress,
      )
      label = f"{sizes} tokens, {' + '.join(g.group_id for g in groups)}"
      console.print(gradient_table(rows, title=label))
      folder.add(label, groups, rows, seconds=clock.seconds)


def _turns(config, settings):
  """Returns for each length the turns of an update, with prompts' indices."""
  updates = []
  if config.data.rollouts:
    if _PROMPT_TOKENS.value is not None:
      raise ValueError(
          f"--prompt_tokens={','.join(_PROMPT_TOKENS.value)}: the prompts of"
          f" data.rollouts={config.data.rollouts!r} have lengths of their own;"
          " give one or the other"
      )
    updates.append(make_requests(config, settings)(0))
  else:
    changed = config.copy_and_resolve_references()
    for changed.data.prompt_tokens in _lengths(config):
      updates.append(make_requests(changed, settings)(0))
  rows = np.arange(settings.mesh.shape["data"])
  return [
      (request, rows + index * rows.size)
      for requests in updates
      for index, request in enumerate(requests)
  ]


def _lengths(config) -> list[int]:
  if (texts := _PROMPT_TOKENS.value) is None:
    texts = [str(config.data.prompt_tokens)]
  lengths = [int(text) if text.isdecimal() else 0 for text in texts]
  if not lengths or min(lengths) < 2 or len(set(lengths)) < len(lengths):
    raise ValueError(
        f"--prompt_tokens={','.join(texts)}: want different integers >= 2,"
        " separated by commas; a prompt of one token leaves no state"
    )
  return lengths


if __name__ == "__main__":
  command_line.run(main)

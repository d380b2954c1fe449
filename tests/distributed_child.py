"""What the processes of tests do: `python tests/distributed_child.py NAME ...`.

It imports little: each process is waited for.
"""

import hashlib
import json
import pathlib
import sys
import time

import jax
import numpy as np

from lstraw_jax import distributed
from lstraw_jax.named_leaves import named_leaves
from lstraw_jax.watchdog import Watchdog
from modeling.sharding import MeshConfig, replicate, sharding


def join(port: str, process: str, *, timeout_s: int = 60) -> None:
  distributed.initialize(
      distributed.DistributedConfig(
          coordinator=f"127.0.0.1:{port}",
          num_processes=2,
          process_id=int(process),
          timeout_s=timeout_s,
      )
  )


def work(port: str, process: str, folder: str, *settings: str):
  """Adds up over all devices until it is ended; one process may get stuck."""
  timeout_s, stall_timeout_s, stuck = map(int, settings)
  join(port, process, timeout_s=timeout_s)
  mesh = MeshConfig(data="auto").make()
  step = jax.jit(lambda x: x + replicate(x.sum(), mesh))
  x = jax.jit(
      lambda: jax.numpy.ones((8,)),
      out_shardings=sharding(mesh, ("batch",)),
  )()
  with Watchdog(stall_timeout_s) as dog:
    for index in range(100_000):
      dog.beat(f"round {index}")
      if stuck == int(process) and index == 5:
        time.sleep(1000)
      x = step(x).block_until_ready()
      pathlib.Path(folder, f"ready-{process}").touch()
      time.sleep(0.05)


def agree(port: str, process: str):
  """Exchanges texts and configs of several kinds; prints what came of it."""
  join(port, process)
  config = {
      "seed": 0,
      "train": {"steps": 3},
      "distributed": {"process_id": int(process), "timeout_s": 60},
  }
  distributed.check_same_config(config)
  texts = distributed.gather_text("ä" * (1 + 2 * int(process)))
  distributed.say("said once")
  refused = ""
  try:
    other = {"seed": int(process), "train": {"steps": 3 + int(process)}}
    distributed.check_same_config(config | other)
  except ValueError as error:
    refused = str(error)
  found = {
      "texts": texts,
      "refused": refused,
      "primary": distributed.is_primary(),
      "devices": [jax.local_device_count(), jax.device_count()],
  }
  print(json.dumps(found))


def fail(port: str, process: str, folder: str):
  """Fails in one process, in the way of a mistake of the user's."""
  from experiments import command_line

  def main(_):
    join(port, process)
    distributed.gather_text("")  # both are there
    if process == "1":
      raise ValueError("mine")
    pathlib.Path(folder, "going-on").touch()
    time.sleep(1000)

  sys.argv = sys.argv[:1]
  command_line.run(main)


def train(port: str, process: str, folder: str):
  """Trains as the config in the folder says; writes what its devices hold."""
  from experiments import requests, settings, train_grpo, training
  from experiments.configs import tiny
  from lstraw_jax.checkpoint import TrainCheckpoints

  class Recorded(TrainCheckpoints):

    def save(self, state, *, position):
      super().save(state, position=position)
      held = digests(state)
      pathlib.Path(folder, f"held-{process}.json").write_text(json.dumps(held))

  join(port, process)
  jax.config.update("jax_enable_x64", True)
  config = tiny.get_config()
  changes = json.loads(pathlib.Path(folder, "changes.json").read_text())
  config.update_from_flattened_dict(changes)
  training.TrainCheckpoints = Recorded
  read = settings.read_settings(config)
  train_grpo.train(
      config,
      read,
      requests.make_requests(config, read),
      workdir=pathlib.Path(folder, "run"),
  )


def digests(state) -> dict[str, list[str]]:
  """Returns, for each part of an array, its digest on each device with it."""
  held = {}
  arrays = named_leaves({"w": state.policy.trainable, "o": state.opt_state})
  for name, array in arrays.items():
    for shard in array.addressable_shards:
      digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
      held.setdefault(f"{name}{shard.index}", []).append(digest)
  return held


if __name__ == "__main__":
  name, *arguments = sys.argv[1:]
  {"work": work, "agree": agree, "fail": fail, "train": train}[name](*arguments)

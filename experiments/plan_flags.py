"""The flags that describe an update to be planned, not run."""

from typing import Any

from absl import flags

from lstraw_jax.capacity.targets import Machine
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.capture import TapeConfig
from lstraw_jax.objectives import ObjectiveConfig
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.replay import ReplayConfig
from lstraw_jax.update_config import UpdateConfig
from modeling.checkpoints import load_config
from modeling.decoder_config import DecoderConfig, LoraConfig
from modeling.presets import PRESETS, preset

_MODEL = flags.DEFINE_string(
    "model", "tiny", "A preset of modeling/presets.py, or a checkpoint folder."
)
_SIZES = {
    "prompt_tokens": (4096, "Tokens of the prompt, P."),
    "response_tokens": (128, "Tokens of the longest response, R."),
    "group_size": (8, "Responses to a prompt, G."),
    "chunk_tokens": (8192, "train.capture_chunk_tokens of the run."),
    "block_tokens": (2048, "train.replay_block_tokens."),
    "head_chunk_tokens": (256, "train.head_chunk_tokens."),
    "boundary_every": (1, "capture.boundary_every."),
}
_NUMBERS = {
    name: flags.DEFINE_integer(name, default, text)
    for name, (default, text) in _SIZES.items()
}
_TRAINABLE = flags.DEFINE_string(
    "trainable", "full", "'full', or 'lora:RANK' for adapters."
)
_MEMORIES = ("device", "pinned_host")
_CHOICES = {
    "prompt_gradient": (("dropped", "exact"), "train.prompt_gradient."),
    "cotangent_dtype": (("float32", "bfloat16"), "train.cotangent_dtype."),
    "state_memory": (_MEMORIES, "state.memory_kind."),
    "boundary_memory": (_MEMORIES, "capture.memory_kind."),
    "optimizer_memory": (_MEMORIES, "optimizer.memory_kind."),
}
_CHOSEN = {
    name: flags.DEFINE_enum(name, known[0], known, text)
    for name, (known, text) in _CHOICES.items()
}
_KL_COEF = flags.DEFINE_float("kl_coef", 0.0, "objective.kl_coef.")
_MESH = flags.DEFINE_string(
    "mesh",
    "",
    "Sizes of the mesh, as 'context=4,tensor=2'. Default: all devices share"
    " the tokens of a prompt.",
)


def read_workload(*, devices: int) -> Workload:
  """Returns the update that the flags describe, on so many devices.

  Raises:
    ValueError: for the first flag that is wrong.
  """
  number = {name: flag.value for name, flag in _NUMBERS.items()}
  chosen: dict[str, Any] = {k: flag.value for k, flag in _CHOSEN.items()}
  update = UpdateConfig(
      prompt_gradient=chosen["prompt_gradient"],
      replay=ReplayConfig(
          objective=ObjectiveConfig(kl_coef=_KL_COEF.value),
          block_tokens=number["block_tokens"],
          head_chunk_tokens=number["head_chunk_tokens"],
      ),
      tape=TapeConfig(
          boundary_every=number["boundary_every"],
          memory_kind=chosen["boundary_memory"],
      ),
      cotangent_dtype=chosen["cotangent_dtype"],
      capture_chunk_tokens=number["chunk_tokens"],
      memory_kind=chosen["state_memory"],
  )
  return Workload(
      model=_model(),
      **_mesh_sizes(devices),
      prompt_tokens=number["prompt_tokens"],
      response_tokens=number["response_tokens"],
      group_size=number["group_size"],
      update=update,
      optimizer=OptimizerConfig(
          learning_rate=1e-5,  # of no effect on a plan
          memory_kind=chosen["optimizer_memory"],
      ),
  )


def _model() -> DecoderConfig:
  """Returns the model as it is trained: adapters, or float32 weights."""
  name, trainable = _MODEL.value, _TRAINABLE.value
  kind, _, rank = trainable.partition(":")
  if not (trainable == "full" or (kind == "lora" and rank.isdecimal())):
    raise ValueError(
        f"trainable={trainable!r}: want 'full', or 'lora:RANK' as lora:16"
    )
  changes: dict[str, Any] = {"param_dtype": "float32"}
  if kind == "lora":
    lora = LoraConfig(rank=int(rank), alpha=16.0)
    changes = {"lora": lora}
  if name not in PRESETS and "/" in name:
    return load_config(name, **changes)
  return preset(name).replace(**changes)


def _mesh_sizes(devices: int) -> dict[str, Any]:
  sizes: dict[str, Any] = {"data": 1, "context": 1, "tensor": 1}
  if not _MESH.value:
    return sizes | {"context": devices}
  for part in _MESH.value.split(","):
    axis, _, size = part.partition("=")
    if axis not in sizes or not size.isdecimal() or int(size) < 1:
      raise ValueError(
          f"mesh={_MESH.value!r}: want sizes of data, context and tensor, as"
          " 'context=4,tensor=2'"
      )
    sizes[axis] = int(size)
  wanted = sizes["data"] * sizes["context"] * sizes["tensor"]
  if wanted != devices:
    raise ValueError(
        f"mesh={_MESH.value!r}: that is {wanted} devices, but the target has"
        f" {devices}"
    )
  return sizes


def model_name() -> str:
  """Returns the model as it was given."""
  return _MODEL.value


def describe(workload: Workload, machine: Machine) -> str:
  """Returns what is planned, in a line."""
  sizes = ("data", "context", "tensor")
  mesh = ", ".join(f"{name}={getattr(workload, name)}" for name in sizes)
  return (
      f"{_MODEL.value}, {_TRAINABLE.value}, {workload.prompt_tokens:,} +"
      f" {workload.group_size} x {workload.response_tokens:,} tokens,"
      f" {workload.update.prompt_gradient} prompt gradient, on {machine}"
      f" ({mesh})"
  )

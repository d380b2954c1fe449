"""Checkpoints of a training run: what cannot be made again, kept safely.

A checkpoint is one directory, `<directory>/<step>`, renamed into place when it
is complete, so that a run killed at any moment goes on from the one before.

1. Its arrays are the trained weights, the optimizer's state, the step, the
   random key and the reference. Frozen weights are read from their source
   again; a fingerprint tells whether they are still the same.
2. Beside them stands a JSON record: the run's config, the model's config, the
   fingerprint and the position in the data.
3. Before an array is restored, all of this is held against the run that asks,
   and each difference is named.
4. None of it depends on the mesh: a state goes on wherever the template lies.

Of several processes each writes what its devices hold, and all make the same
calls. The directory is on a file system that all of them see.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from lstraw_jax.fingerprint import fingerprint
from lstraw_jax.named_leaves import differences, named_leaves, specs
from lstraw_jax.train_state import TrainState

_SHOWN = 10  # differences that an error names; it counts the others
_RECORD = ("config", "frozen", "key_impl", "model_config", "position")


class TrainCheckpoints(contextlib.AbstractContextManager):
  """The checkpoints of one run, in a directory that no other run writes to.

  Saving returns when the checkpoint is complete. That is safe against a killed
  process; a machine that loses power may lose what it had not yet written.
  """

  def __init__(
      self,
      directory: str | pathlib.Path,
      *,
      config: Mapping[str, Any],
      may_change: Collection[str] = (),
      keep: int = 2,
  ):
    """Opens or makes the directory and removes what a kill left half written.

    Args:
      directory: of the checkpoints.
      config: settings of the run as JSON can hold them: nested string keys
        with numbers, strings, booleans, None and lists.
      may_change: key paths of `config` that may differ from the checkpoint's,
        as "train.steps"; "log" stands for all that is below it as well.
      keep: number of newest checkpoints that are not deleted.

    Raises:
      ValueError: for a config that JSON cannot hold, or `keep` below 1.
    """
    if keep < 1:
      raise ValueError(f"keep={keep}: want at least 1")
    self._config = _as_json(config)
    self._may_change = tuple(may_change)
    self._at: int | None = None  # the step last saved or restored
    self._manager = ocp.CheckpointManager(
        pathlib.Path(directory).absolute(),
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        ),
        handler_registry=ocp.handlers.create_default_handler_registry(
            arrays=ocp.handlers.StandardCheckpointHandler(),
            record=ocp.handlers.JsonCheckpointHandler(),
        ),
    )

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """Lets go of the directory."""
    self._manager.close()

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, if there is any."""
    return self._manager.latest_step()

  def save(self, state: TrainState, *, position: int) -> None:
    """Writes a checkpoint and returns when it is complete.

    The step that was last saved or restored is not written again.

    Args:
      state: what to save; nothing of it is consumed.
      position: where in the data the next update begins.

    Raises:
      ValueError: if the directory already goes as far as `state.step`.
    """
    step = int(state.step)
    if step == self._at:
      return
    latest = self.latest_step()
    if latest is not None and step <= latest:
      raise ValueError(
          f"step={step}: {self._manager.directory} already holds step {latest};"
          " resume from it or choose another directory"
      )
    record = {
        "config": self._config,
        "frozen": fingerprint(state.policy),
        "key_impl": str(jax.random.key_impl(state.key)),
        "model_config": _model_config(state),
        "position": position,
    }
    arrays = named_leaves(_saved(state))
    arrays["key"] = jax.random.key_data(state.key)
    self._manager.save(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays),
            record=ocp.args.JsonSave(record),
        ),
        force=True,  # when to save is the caller's decision alone
    )
    self._at = step

  def restore(self, template: TrainState) -> tuple[TrainState, int]:
    """Reads the newest checkpoint.

    Args:
      template: a state like the saved one. The result has its frozen weights;
        of the rest only shape, dtype and sharding are read, so that a
        `jax.ShapeDtypeStruct` with a sharding will do for an array.

    Returns:
      The state, in buffers that can be donated, and the position in the data.

    Raises:
      FileNotFoundError: if there is no checkpoint.
      ValueError: if it belongs to another config, model or base model, or its
        arrays are not those of the template; each difference is named.
    """
    step = self.latest_step()
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self._manager.directory}")
    record = self._checked_record(step, template)
    wanted = named_leaves(_saved(template))
    targets = {name: _target(name, leaf) for name, leaf in wanted.items()}
    arrays = self._manager.restore(
        step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(targets))
    )["arrays"]
    # One by one: the whole state is never live twice.
    leaves = {name: _donatable(arrays.pop(name)) for name in wanted}
    leaves["key"] = jax.random.wrap_key_data(
        leaves["key"], impl=record["key_impl"]
    )
    saved = jax.tree.unflatten(
        jax.tree.structure(_saved(template)), leaves.values()
    )
    policy = template.policy.replace(trainable=saved.pop("trainable"))
    self._at = step
    return TrainState(policy=policy, **saved), record["position"]

  def _checked_record(self, step: int, template: TrainState) -> dict[str, Any]:
    """Reads the JSON record, or raises ValueError saying what does not fit."""
    where = f"checkpoint {self._manager.directory / str(step)}"
    items = self._manager.item_metadata(step)
    _expect_names(f"{where}: items", items.keys(), ("arrays", "record"))
    record = self._manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
    )["record"]
    _expect_names(f"{where}: record", record, _RECORD)
    stored = dict(items["arrays"])
    if "key" in stored:  # it is stored as its data
      impl = record["key_impl"]
      stored["key"] = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    for what, then, now, but in (
        ("config", record["config"], self._config, self._may_change),
        ("model config", record["model_config"], _model_config(template), ()),
        ("arrays", specs(stored), specs(named_leaves(_saved(template))), ()),
        ("frozen weights", record["frozen"], fingerprint(template.policy), ()),
    ):
      if found := differences(then, now, names=("checkpoint", "now"), but=but):
        more = len(found) - _SHOWN
        lines = found[:_SHOWN] + [f"and {more} more"] * (more > 0)
        raise ValueError(f"{where}: other {what}:\n  " + "\n  ".join(lines))
    return record


def _saved(state: TrainState) -> dict[str, Any]:
  """Returns the part of a state that a checkpoint holds."""
  return {
      "trainable": state.policy.trainable,
      "opt_state": state.opt_state,
      "step": state.step,
      "key": state.key,
      "reference": state.reference,
  }


def _model_config(state: TrainState) -> dict[str, Any]:
  """Returns the model's config as JSON gives it back."""
  return _as_json(dataclasses.asdict(state.policy.config))


def _target(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
  """Says how an array is to be restored; a key is, as its data."""
  if isinstance(leaf, np.ndarray) or leaf.sharding is None:
    raise ValueError(
        f"template {name} has no sharding: want one for each array"
    )
  data = leaf
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    data = jax.eval_shape(jax.random.key_data, leaf)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _donatable(array: jax.Array) -> jax.Array:
  """Copies an array within a program; what orbax makes may not be donated."""
  return jax.jit(jnp.copy, out_shardings=array.sharding)(array)


def _expect_names(
    what: str, found: Collection[str], wanted: Collection[str]
) -> None:
  missing = sorted(set(wanted) - set(found))
  unknown = sorted(set(found) - set(wanted))
  if missing or unknown:
    raise ValueError(f"{what}: missing {missing}, unknown {unknown}")


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config` as JSON gives it back."""

  def refuse(value):
    raise ValueError(f"config holds {value!r}: want what JSON can hold")

  return json.loads(json.dumps(config, default=refuse))

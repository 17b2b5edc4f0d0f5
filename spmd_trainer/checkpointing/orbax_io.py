"""All that is Orbax: the manager that writes steps, and the reading of arrays onto a mesh.

Importing this module imports Orbax (0.4 s), so the rest of the package imports it when a checkpoint is first touched.

A checkpoint's arrays are one flat dictionary {path: array} in the item `state`. The structure of the state (NestedMaps,
optax' MaskedNodes, empty containers, None) is the model's to know and is not stored: it always comes from the model.
"""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing import records
from spmd_trainer.sharding.variables import VariableSpec, named_shardings

STATE_ITEM = "state"
TEMPORARY_SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX


class _QuietOrbax(logging.Filter):
    """Drops Orbax' log lines below WARNING, dozens per checkpoint, unless absl's verbosity asks for debugging."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line is to be logged."""
        from_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        return not from_orbax or record.levelno >= logging.WARNING or absl_logging.get_verbosity() >= absl_logging.DEBUG


absl_logging.get_absl_logger().addFilter(_QuietOrbax())


class Manager(ocp.CheckpointManager):
    """Orbax' manager, kept out of the preemption protocol, and with a hook for the end of a save.

    Orbax reports the step of a save to the preemption service from its background thread, when training is already some
    steps further. A SIGTERM that arrives then is agreed upon for a step that is past and never comes, and the signal is
    lost. The training loop alone talks to that service, and saves with force.

    Attributes:
      after_commit: called in the background, by every process, when a step is on disk and older ones are removed; not
        when the save failed.
    """

    after_commit: Callable[[], None] | None = None

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        # Orbax' own hook (post_finalization_callback) comes before the commit. Waiting in a thread instead would log the
        # traceback of a failed save twice.
        super()._finalize(*args, **kwargs)
        if self.after_commit is not None:
            self.after_commit()

    def reached_preemption(self, step: int) -> bool:
        """Returns False: see the class."""
        del step
        return False


def make_manager(
    directory: epath.Path,
    *,
    max_to_keep: int | None,
    keep_interval: datetime.timedelta | None,
    before_commit: Callable[[], None],
    after_commit: Callable[[], None],
) -> Manager:
    """Returns a manager that writes to `directory`, and removes what unfinished saves of dead runs left there.

    Args:
      directory: where the steps go.
      max_to_keep: how many of the newest steps stay; None for all.
      keep_interval: besides them, one step per this much time stays.
      before_commit: called on process 0 in the background when all files of a step are written and nobody sees it yet.
        If it raises, the step is never seen.
      after_commit: see `Manager`.
    """
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(STATE_ITEM, ocp.args.PyTreeSave, ocp.PyTreeCheckpointHandler())
    registry.add(records.RECORD_ITEM, ocp.args.JsonSave, ocp.JsonCheckpointHandler(filename=records.RECORD_FILE))
    options = ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep,
        keep_time_interval=keep_interval,
        create=True,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=before_commit),
        save_root_metadata=False,
    )
    manager = Manager(directory, options=options, handler_registry=registry)
    manager.after_commit = after_commit
    return manager


def save(manager: Manager, step: int, arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> None:
    """Starts to save a step. When it returns the arrays have been copied to the host: they may be donated.

    Arrays without elements are left out, which Orbax does not store; `read_arrays` makes them anew.
    """
    stored = {path: array for path, array in arrays.items() if array.size}
    items = ocp.args.Composite(
        **{STATE_ITEM: ocp.args.PyTreeSave(stored), records.RECORD_ITEM: ocp.args.JsonSave(record)}
    )
    manager.save(step, args=items, force=True)


def writing_dir(directory: epath.Path, step: int) -> epath.Path:
    """Returns where a step lies while it is written: a temporary directory, or (object stores) its final one."""
    temporary = directory / f"{step}{TEMPORARY_SUFFIX}"
    return temporary if temporary.exists() else directory / str(step)


def read_arrays(
    step_dir: epath.Path,
    saved: Mapping[str, records.SavedVariable],
    wanted: Mapping[str, VariableSpec],
    mesh: Mesh,
    *,
    source: Mapping[str, str] | None = None,
) -> dict[str, jax.Array]:
    """Reads variables onto a mesh. Each process reads the shards of its own devices.

    The caller has proved that logical shapes are equal: Orbax pads and truncates to any shape without a word.

    Args:
      step_dir: the step's directory.
      saved: the checkpoint's variables by path.
      wanted: the model's variables by path.
      mesh: the mesh to put them on.
      source: {wanted path: saved path} where they differ. A dtype that differs is converted to the wanted one.

    Returns:
      {wanted path: array at its padded shape}, zeros in the padding.
    """
    source = source or {path: path for path in wanted}
    shardings = named_shardings(dict(wanted), mesh)
    stored = {path: spec for path, spec in wanted.items() if math.prod(saved[source[path]].padded_shape)}
    arrays = _read_stored(step_dir, saved, stored, source, shardings) if stored else {}
    result = {}
    for path, spec in wanted.items():
        if path not in arrays:
            arrays[path] = jax.device_put(np.zeros(spec.padded_shape, spec.dtype), shardings[path])
        result[path] = arrays[path]
    for path, spec in wanted.items():
        # Only padding that was there already when the step was saved can hold anything but zeros.
        if any(pad and saved[source[path]].padded_shape[dim] > size for dim, (size, pad) in _padded_dims(spec)):
            result[path] = _with_zero_padding(result[path], spec)
    return result


def _read_stored(
    step_dir: epath.Path,
    saved: Mapping[str, records.SavedVariable],
    stored: Mapping[str, VariableSpec],
    source: Mapping[str, str],
    shardings: Mapping[str, NamedSharding],
) -> dict[str, jax.Array]:
    """One Orbax read of every saved path, then one more for each further model variable that takes the same path."""
    arrays: dict[str, jax.Array] = {}
    handler = ocp.PyTreeCheckpointHandler()
    rest = dict(stored)
    while rest:
        batch = {source[path]: path for path in reversed(rest)}
        args = {
            saved_path: _restore_args(saved[saved_path], rest.pop(path), shardings[path])
            for saved_path, path in batch.items()
        }
        # The item only names what to read: from a shape or an array Orbax would take a dtype to convert to.
        names = dict.fromkeys(args, 0)
        restore_args = ocp.args.PyTreeRestore(item=names, restore_args=args, partial_restore=True)
        read = handler.restore(step_dir / STATE_ITEM, args=restore_args)
        for saved_path, path in batch.items():
            # A key on one device comes back without its mesh.
            arrays[path] = jax.device_put(read[saved_path], shardings[path])
    return arrays


def _restore_args(saved: records.SavedVariable, spec: VariableSpec, sharding: NamedSharding) -> ocp.ArrayRestoreArgs:
    # Shape and dtype only where they change: padding, truncating and converting cost Orbax time for every shard.
    same_shape, same_dtype = saved.padded_shape == spec.padded_shape, saved.dtype == records.dtype_name(spec.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=sharding,
        global_shape=None if same_shape else spec.padded_shape,
        strict=same_shape,
        dtype=None if same_dtype else spec.dtype,
    )


def _padded_dims(spec: VariableSpec) -> enumerate[tuple[int, int]]:
    return enumerate(zip(spec.logical_shape, spec.paddings, strict=True))


def _with_zero_padding(array: jax.Array, spec: VariableSpec) -> jax.Array:
    """Returns the array with zeros outside its logical shape; the same object if that is what it holds.

    Shard by shard on the host: only shards at the rim are looked at, nothing is compiled, and no process needs another.
    """
    shards, changed = [], False
    for shard in array.addressable_shards:
        data = shard.data
        slabs = []
        for dim, (size, _) in _padded_dims(spec):
            inside = max(0, size - (shard.index[dim].start or 0))
            if inside < data.shape[dim]:
                slabs.append((slice(None),) * dim + (slice(inside, None),))
        host = np.asarray(data) if slabs else None
        if host is not None and any(host[slab].any() for slab in slabs):
            host = host.copy()
            for slab in slabs:
                host[slab] = 0
            data = jax.device_put(host, shard.device)
            changed = True
        shards.append(data)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards) if changed else array

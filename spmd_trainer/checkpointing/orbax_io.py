"""Writes steps and reads arrays with Orbax. Besides this module, only `unpadded_arrays` imports Orbax.

Importing this module imports Orbax (0.4 s), so the other modules import it only when a checkpoint is written or read.

A checkpoint's arrays are a tree of dictionaries in the item `state`, at their logical shapes: `layers/0/kernel` is
tree['layers']['0']['kernel']. Any Orbax program can read it. The other nodes of the state (NestedMaps, optax's MaskedNodes,
empty containers, None) are not stored: the model provides them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint._src.futures import future, synchronization

from spmd_trainer.checkpointing import input_states, records, steps
from spmd_trainer.checkpointing.agreement import SaveBarrier
from spmd_trainer.checkpointing.own_steps import STATE_ITEM
from spmd_trainer.checkpointing.retired_steps import StepDeleter
from spmd_trainer.checkpointing.unpadded_arrays import UnpaddedArrayHandler, pytree_handler
from spmd_trainer.sharding.variables import VariableSpec, named_shardings
from spmd_trainer.storage import is_remote

TEMPORARY_SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX


class _QuietOrbax(logging.Filter):
    """Drops Orbax's log lines below WARNING (dozens per checkpoint), unless absl's verbosity is DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        from_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        return not from_orbax or record.levelno >= logging.WARNING or absl_logging.get_verbosity() >= absl_logging.DEBUG


absl_logging.get_absl_logger().addFilter(_QuietOrbax())


class Manager(ocp.CheckpointManager):  # type: ignore[misc, unused-ignore]  # Orbax has no type information.
    """Orbax's CheckpointManager without its preemption protocol, and with a hook that is called at the end of a save.

    Orbax would report the step of a save to the preemption service from its background thread, when training is some steps
    ahead. If SIGTERM arrived then, the processes would agree to stop at a step that is already past, and the signal would be
    lost. So only the training loop talks to the preemption service, and it saves with `force`.

    The manager deletes old checkpoints with `StepDeleter`. If a save fails on one process, it fails on all.

    Attributes:
      after_commit: called in the background, by every process, when a checkpoint is on disk and older ones are deleted. It is
        not called if the save failed.
      deleter: deletes old checkpoints.
      arrays: the handler that writes the arrays.
    """

    after_commit: Callable[[], None] | None = None

    def __init__(
        self,
        directory: epath.Path,
        barrier: SaveBarrier,
        *,
        deleter: StepDeleter,
        arrays: UnpaddedArrayHandler,
        **kwargs: Any,
    ) -> None:
        super().__init__(directory, **kwargs)
        self._barrier = barrier
        self.deleter = self._checkpoint_deleter = deleter
        self.arrays = arrays

    def _wait_for_checkpointers(self) -> None:
        self._barrier.reporting_failure(super()._wait_for_checkpointers, self._end_waiting_threads)

    def _end_waiting_threads(self) -> None:
        """Releases the threads, here and on other processes, that would wait 300 s for a failed save to create directories."""
        # Orbax cancels a save only before it has failed.
        for writing in self._checkpointer._async_manager._commit_futures or ():
            writing.cancel()
        operation = synchronization.OperationIdGenerator.get_current_operation_id()
        signals = future.AwaitableSignalsContract.get_awaitable_signals_from_contract(operation)
        future.set_signals(signals, operation_id=operation)

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        # Orbax calls its own hook (post_finalization_callback) before the commit. Waiting in a thread of our own would
        # log the traceback of a failed save twice.
        super()._finalize(*args, **kwargs)
        if self.after_commit is not None:
            self.after_commit()

    def metrics(self, step: int) -> None:
        """Returns None: no metrics are saved. Orbax's own method would look for a metrics file in every step."""
        del step

    def reached_preemption(self, step: int) -> bool:
        """Returns False: the manager does not take part in preemption (see the class)."""
        del step
        return False


@dataclasses.dataclass(frozen=True)
class _ListedStep(ocp.path.step.Metadata):  # type: ignore[misc, unused-ignore]
    """A checkpoint on an object store, with its commit time from the directory listing. (Orbax would read a file of each.)"""

    committed: datetime.datetime

    @property
    def commit_timestamp(self) -> datetime.datetime:
        return self.committed


class _ListedSteps(ocp.path.step.NameFormat):  # type: ignore[misc, unused-ignore]
    """Finds all checkpoints on an object store by a single listing."""

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: epath.PathLike) -> Iterator[ocp.path.step.Metadata]:
        directory = epath.Path(base_path)
        for step, committed in steps.commit_times(directory).items():
            yield _ListedStep(step=step, path=steps.step_dir(directory, step), committed=committed)

    def find_step(self, base_path: epath.PathLike, step: int) -> ocp.path.step.Metadata:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"There is no step {step} in {base_path}.")


def make_manager(
    directory: epath.Path,
    *,
    max_to_keep: int | None,
    keep_interval: datetime.timedelta | None,
    before_commit: Callable[[], None],
    after_commit: Callable[[], None],
) -> Manager:
    """Returns a manager that writes to `directory`. On a file system, deletes unfinished saves that earlier runs left there.

    Args:
      directory: the directory of the checkpoints.
      max_to_keep: how many of the newest checkpoints to keep; None keeps all.
      keep_interval: of the older checkpoints, one per interval of this length is also kept; None keeps none of them.
      before_commit: called on process 0 in the background, after all files of a checkpoint are written and before it becomes
        visible. If it raises, the checkpoint never becomes visible.
      after_commit: see `Manager`.
    """
    registry = ocp.DefaultCheckpointHandlerRegistry()
    arrays = UnpaddedArrayHandler()
    registry.add(STATE_ITEM, ocp.args.PyTreeSave, pytree_handler(arrays))
    registry.add(records.RECORD_ITEM, ocp.args.JsonSave, ocp.JsonCheckpointHandler(filename=records.RECORD_FILE))
    registry.add(
        input_states.ITEM,
        ocp.args.JsonSave,
        ocp.JsonCheckpointHandler(
            filename=input_states.file_name(jax.process_index(), jax.process_count()),
            # Every process writes its own file.
            multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
        ),
    )
    barrier = SaveBarrier(f"writing to {directory}")
    on_object_store = is_remote(directory)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep,
        keep_time_interval=keep_interval,
        create=not on_object_store,  # object stores have no directories to create
        # On object stores, `steps.clean_up` deletes unfinished saves, by one listing.
        cleanup_tmp_directories=not on_object_store,
        step_name_format=_ListedSteps() if on_object_store else None,
        # Otherwise the training loop waits while Orbax looks for a directory of the new step's name.
        file_options=ocp.options.FileOptions(skip_sync_file_validations=on_object_store),
        async_options=ocp.AsyncOptions(
            post_finalization_callback=before_commit,
            barrier_sync_fn=barrier,
        ),
        # Object stores rename a directory file by file, which is not atomic.
        atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        if on_object_store
        else None,
        save_root_metadata=False,
    )
    manager = Manager(
        directory, barrier, deleter=StepDeleter(directory), arrays=arrays, options=options, handler_registry=registry
    )
    manager.after_commit = after_commit
    return manager


def save(
    manager: Manager,
    step: int,
    arrays: Mapping[str, jax.Array],
    record: records.Record,
    own_input_state: Mapping[str, object] | None = None,
) -> None:
    """Starts to save a checkpoint. When it returns, the arrays have been copied to the host and may be donated.

    Arrays without elements are left out, because Orbax does not store them; `read_arrays` creates them again.

    Args:
      manager: the manager of the directory.
      step: the step of the checkpoint.
      arrays: the arrays by path, at padded shapes.
      record: the JSON record of the checkpoint, which has the logical shapes.
      own_input_state: this process' position in the training input; None if the record has the position of all processes.
    """
    saved = records.saved_variables(record)
    stored = {saved[path].keys: array for path, array in arrays.items() if math.prod(saved[path].shape)}
    # The handler sees names that Orbax makes by joining the keys with dots.
    manager.arrays.logical_shapes = {
        ".".join(map(str, saved[path].keys)): saved[path].shape
        for path, x in arrays.items()
        if x.shape != saved[path].shape
    }
    items: dict[str, ocp.args.CheckpointArgs] = {
        STATE_ITEM: ocp.args.PyTreeSave(_tree(stored)),
        records.RECORD_ITEM: ocp.args.JsonSave(record),
    }
    if own_input_state is not None:
        items[input_states.ITEM] = ocp.args.JsonSave(own_input_state)
    manager.deleter.keep(step)
    manager.save(step, args=ocp.args.Composite(**items), force=True)


def discard(directory: epath.Path, step: int) -> None:
    """Deletes the temporary directory of a failed save. On object stores, the run's next launch deletes the remains."""
    temporary = directory / f"{step}{TEMPORARY_SUFFIX}"
    with contextlib.suppress(OSError):
        temporary.rmtree()


def writing_dir(directory: epath.Path, step: int) -> epath.Path:
    """Returns the directory of a checkpoint that is being written: a temporary one, or on object stores the final one."""
    temporary = directory / f"{step}{TEMPORARY_SUFFIX}"
    return temporary if temporary.exists() else directory / str(step)


def describe(tree_dir: epath.Path) -> dict[records.Keys, tuple[tuple[int, ...], str]]:
    """Returns {keys that lead to an array: (shape, name of the dtype)} of a tree that any Orbax program wrote."""
    leaves = jax.tree_util.tree_leaves_with_path(ocp.PyTreeCheckpointHandler().metadata(tree_dir).tree)
    return {
        _keys(keys): (
            tuple(x.shape),
            records.dtype_name(x.dtype),
        )
        for keys, x in leaves
        if isinstance(x, ocp.metadata.ArrayMetadata)
    }


def read_arrays(
    tree_dir: epath.Path,
    saved: Mapping[str, records.SavedVariable],
    wanted: Mapping[str, VariableSpec],
    mesh: Mesh,
    source: Mapping[str, str],
) -> dict[str, jax.Array]:
    """Reads variables onto a mesh. Each process reads the shards of its own devices.

    The caller must have checked that logical shapes are equal: Orbax silently pads and truncates to any shape.

    Args:
      tree_dir: the directory of the tree of arrays: `STATE_ITEM` of a step, or a tree that a different Orbax program wrote.
      saved: the checkpoint's variables by path.
      wanted: the model's variables by path. A saved array of a different dtype is converted.
      mesh: the mesh of the arrays.
      source: {wanted path: saved path} of all wanted variables.

    Returns:
      {wanted path: array at its padded shape}, with zeros in the padding.
    """
    shardings = named_shardings(dict(wanted), mesh)
    rest = {path: spec for path, spec in wanted.items() if math.prod(saved[source[path]].stored_shape)}
    arrays = {
        path: jax.device_put(np.zeros(spec.padded_shape, spec.dtype), shardings[path])
        for path, spec in wanted.items()
        if path not in rest
    }
    handler = ocp.PyTreeCheckpointHandler()
    # Reads every saved path once, then once more for each further model variable that takes the same path.
    while rest:
        batch = {saved[source[path]].keys: path for path in reversed(rest)}
        args = {
            keys: _restore_args(saved[source[path]], rest.pop(path), shardings[path]) for keys, path in batch.items()
        }
        read = handler.restore(tree_dir, args=_restore_request(handler, tree_dir, args))
        for keys, path in batch.items():
            # Orbax restores a PRNG key on one device without its mesh.
            arrays[path] = jax.device_put(functools.reduce(operator.getitem, keys, read), shardings[path])
    for path, spec in wanted.items():
        # Padding is zero unless it was read from the checkpoint.
        if any(pad and saved[source[path]].stored_shape[dim] > size for dim, (size, pad) in _padded_dims(spec)):
            arrays[path] = _with_zero_padding(arrays[path], spec)
    return {path: arrays[path] for path in wanted}


def read_on_host(tree_dir: epath.Path, key: str) -> dict[str, Any]:
    """Reads the arrays below the top-level key `key` of a tree of arrays, as NumPy arrays."""
    handler = ocp.PyTreeCheckpointHandler()
    part = {key: handler.metadata(tree_dir).tree[key]}
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
        item=jax.tree.map(lambda _: 0, part),
        restore_args=jax.tree.map(lambda _: as_numpy, part),
        partial_restore=True,
    )
    found: dict[str, Any] = handler.restore(tree_dir, args=args)[key]
    return found


def _restore_request(
    handler: ocp.PyTreeCheckpointHandler, tree_dir: epath.Path, args: Mapping[records.Keys, ocp.ArrayRestoreArgs]
) -> ocp.args.PyTreeRestore:
    """Returns the arguments with which Orbax reads these arrays.

    The argument `item` only names the arrays: if it held shapes or arrays, Orbax would convert to their dtypes.
    """
    if not any(isinstance(key, int) for keys in args for key in keys):
        return ocp.args.PyTreeRestore(
            item=_tree(dict.fromkeys(args, 0)), restore_args=_tree(args), partial_restore=True
        )
    # Single elements of a list can be read only with the structure of the whole tree.
    whole = handler.metadata(tree_dir).tree
    return ocp.args.PyTreeRestore(
        item=jax.tree_util.tree_map_with_path(lambda at, _: 0 if _keys(at) in args else ocp.PLACEHOLDER, whole),
        restore_args=jax.tree_util.tree_map_with_path(lambda at, _: args.get(_keys(at), ocp.RestoreArgs()), whole),
    )


def _keys(path: tuple[Any, ...]) -> records.Keys:
    return tuple(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key for key in path)


def _tree(leaves: Mapping[records.Keys, object]) -> Any:
    """Returns a tree of nested dictionaries from {keys that lead to a leaf: leaf}."""
    if () in leaves:
        return leaves[()]
    below: dict[str | int, dict[records.Keys, object]] = collections.defaultdict(dict)
    for (key, *rest), leaf in leaves.items():
        below[key][tuple(rest)] = leaf
    return {key: _tree(inner) for key, inner in below.items()}


def _restore_args(saved: records.SavedVariable, spec: VariableSpec, sharding: NamedSharding) -> ocp.ArrayRestoreArgs:
    # Give shape and dtype only where they change: padding, truncating and converting cost time for every shard.
    same_shape, same_dtype = saved.stored_shape == spec.padded_shape, saved.dtype == records.dtype_name(spec.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=sharding,
        global_shape=None if same_shape else spec.padded_shape,
        strict=same_shape,
        dtype=None if same_dtype else spec.dtype,
    )


def _padded_dims(spec: VariableSpec) -> enumerate[tuple[int, int]]:
    return enumerate(zip(spec.logical_shape, spec.paddings, strict=True))


def _with_zero_padding(array: jax.Array, spec: VariableSpec) -> jax.Array:
    """Returns the array with zeros outside its logical shape; the same object if its padding is zero already.

    Works shard by shard on the host: reads only shards that hold padding, compiles nothing, and needs no other process.
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

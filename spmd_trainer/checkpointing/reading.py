"""Reads one step onto a mesh, after checking its files, its record, and that its variables are those of the model."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import input_states, manifest, mismatch, records, step_files, steps
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointMismatchError, CheckpointReadError

if TYPE_CHECKING:
    from spmd_trainer.train_states import TrainState

# TensorStore raises ValueError for everything: its text tells a damaged file from storage that does not answer.
_DECODING_ERRORS = re.compile("DATA_LOSS|Error decoding")
_STORAGE_ERRORS = re.compile(
    "NOT_FOUND|OUT_OF_RANGE|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|PERMISSION_DENIED|UNAUTHENTICATED|"
    "Error (reading|opening|listing)"
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      state: the state, in the structure of the requested variables, at padded shapes on the requested mesh.
      step: the number of updates that the state has had.
      input_state: this process' position of the input, as it was given to `Checkpointer.save`; None if it was not asked for.
      metadata: the whole record, as `Checkpointer.read_metadata` returns it.
    """

    state: TrainState
    step: int
    input_state: dict[str, Any] | None
    metadata: records.Record


def read_step(
    directory: epath.Path, step: int, variables: TrainState, mesh: Mesh, *, partial: bool, with_input: bool
) -> Restored | str:
    """Checks a step and reads it. Called by every process; all of them return the same damage.

    Checksums are computed while arrays are read: with idle cores they cost no time.

    Args:
      directory: the directory of checkpoints.
      step: the step.
      variables: a TrainState (or another tree) of VariableSpecs: the state to read.
      mesh: the mesh of the arrays.
      partial: do not read saved variables that `variables` lacks.
      with_input: read the position of the input too.

    Returns:
      The restored checkpoint, or, if the step is damaged, the damage: wrong sizes, checksums or encoding.

    Raises:
      CheckpointMismatchError: the checkpoint's variables are not those of `variables`.
      CheckpointNotFoundError: there is no such step, or no longer.
      CheckpointReadError: storage does not answer, or refuses.
      DamagedCheckpointError: the record is damaged although its checksum is right.
    """
    step_dir = steps.step_dir(directory, step)
    listed: manifest.Manifest | None = None

    def read_manifest() -> str | None:
        nonlocal listed
        found = manifest.read(step_dir, step)
        if isinstance(found, str):
            return found
        listed = found
        return None

    if problem := agreed_problem(read_manifest):
        return problem
    assert listed is not None  # There is no problem.
    attempt = functools.partial(_read, directory, step, variables, mesh, partial, with_input)
    restored, error = None, None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        checked = pool.submit(manifest.contents_problem, step_dir, listed, jax.process_index(), jax.process_count())
        try:
            restored = attempt()
        except Exception as e:
            error = e
    # Checksums come first: an error of reading a damaged file says nothing about its cause.
    if problem := agreed_problem(checked.result):
        return problem

    def settle() -> str | None:
        nonlocal restored
        if error is not None:
            again = _read_again(error, attempt, step_dir)
            if isinstance(again, str):
                return again
            restored = again
        return None

    if problem := agreed_problem(settle):
        return problem
    assert restored is not None  # There is no error.
    return restored


def _read_again(error: Exception, attempt: Callable[[], Restored], step_dir: epath.Path) -> Restored | str:
    """Repeats a read whose files have the right checksums. Returns the checkpoint, or what is wrong with its encoding.

    Args:
      error: why the first attempt failed.
      attempt: reads the step.
      step_dir: the step's directory.

    Raises:
      CheckpointNotFoundError, CheckpointReadError: storage fails, or the step is gone.
      Exception: `error`, if it is about something else.
    """
    what = f"reading the arrays of {step_dir}"
    try:
        if not isinstance(error, OSError):
            raise error
        return step_files.read(what, attempt)
    except (FileNotFoundError, NotADirectoryError) as e:
        step_files.require_step(step_dir)
        raise CheckpointReadError(f"{what} failed: {e}") from e
    except Exception as e:
        if isinstance(e, CheckpointError) or not _DECODING_ERRORS.search(_full_text(e)):
            raise
        return f"an array cannot be decoded ({_full_text(e)})"


class _StorageError(OSError):
    """TensorStore could not read a file for a reason that is not in the file."""


def _full_text(error: BaseException) -> str:
    """Returns the text of an error and of those behind it, the first one first: Orbax hides TensorStore's behind its own."""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None and str(current) not in texts:
        texts.insert(0, str(current))
        current = current.__cause__ or current.__context__
    return " <- ".join(texts)


def _read(
    directory: epath.Path, step: int, variables: TrainState, mesh: Mesh, partial: bool, with_input: bool
) -> Restored:
    # Importing Orbax takes 0.4 s: not before a checkpoint is read.
    from spmd_trainer.checkpointing import orbax_io

    step_dir = steps.step_dir(directory, step)
    record = records.read(step_dir, step)
    saved = records.saved_variables(record)
    wanted = records.by_path(variables)
    compared = {path: variable for path, variable in saved.items() if path in wanted} if partial else saved
    in_model = {path: records.SavedVariable.from_spec(spec) for path, spec in wanted.items()}
    name = f"Checkpoint step {step} in {directory}"
    if message := mismatch.explain_adapters(saved, wanted, name) or mismatch.explain(compared, in_model, name):
        raise CheckpointMismatchError(message)
    input_state = input_states.read(step_dir, record) if with_input else None
    try:
        arrays = orbax_io.read_arrays(step_dir / orbax_io.STATE_ITEM, saved, wanted, mesh)
    except OSError:
        raise
    except Exception as error:
        text = _full_text(error)
        if _DECODING_ERRORS.search(text) or not _STORAGE_ERRORS.search(text):
            raise
        raise _StorageError(text) from error
    state = jax.tree.unflatten(jax.tree.structure(variables), arrays.values())
    return Restored(state, step, input_state, record)

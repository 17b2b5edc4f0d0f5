"""Opens and reads steps that this trainer saved. Opening checks the files without arrays; reading checks the array files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import input_states, manifest, records, step_files, steps
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    DamagedCheckpointError,
)
from spmd_trainer.checkpointing.sources import CheckpointSource

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState

STATE_ITEM = "state"
# TensorStore raises ValueError for all errors; the text distinguishes damaged files from failing storage.
_DECODING_ERRORS = re.compile("DATA_LOSS|Error decoding")
_STORAGE_ERRORS = re.compile(
    "NOT_FOUND|OUT_OF_RANGE|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|PERMISSION_DENIED|UNAUTHENTICATED|"
    "Error (reading|opening|listing)"
)


class DamagedFilesError(DamagedCheckpointError):
    """A checkpoint's files don't match its manifest, or can't be decoded. The message names the file: 'a/b is missing'."""


@dataclasses.dataclass(frozen=True)
class OwnStep(CheckpointSource):
    """A checkpoint that this trainer saved.

    Attributes:
      step_dir: the directory of the checkpoint.
      saved_record: the JSON record of the checkpoint.
      unchecked: the manifest of the array files, if their checksums have not been compared yet; otherwise None.
    """

    step_dir: epath.Path
    saved_record: records.Record
    unchecked: manifest.Manifest | None

    @property
    def label(self) -> str:
        """The beginning of a message about this checkpoint."""
        return f"Checkpoint {self.name}"

    def input_state(self) -> dict[str, Any] | None:
        """Returns the position from which this process resumes the training input; see `input_states.read`."""
        return input_states.read(self.step_dir, self.saved_record)

    def record(self, state: TrainState, specs: Mapping[str, VariableSpec]) -> records.Record:
        """Returns the JSON record that was saved with the state."""
        del state, specs
        return self.saved_record

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh; see `CheckpointSource.read`.

        Checksums are computed while arrays are read, which costs no time if processor cores are idle.

        Raises:
          DamagedFilesError: on every process, if one process found a wrong checksum or an array that can't be decoded.
          CheckpointNotFoundError: the step has been deleted.
        """
        # Importing Orbax takes 0.4 s: not before arrays are read.
        from spmd_trainer.checkpointing import orbax_io

        attempt = functools.partial(orbax_io.read_arrays, self.step_dir / STATE_ITEM, self.saved, wanted, mesh, source)
        arrays: dict[str, jax.Array] = {}
        error = None
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checked = pool.submit(self._contents_problem)
            try:
                with _storage_errors():
                    arrays.update(attempt())
            except Exception as raised:
                error = raised
        # Wrong checksums are reported first: the error from reading a damaged file does not tell its cause.
        _require(checked.result)

        def settle() -> str | None:
            again = {} if error is None else self._read_again(error, attempt)
            if isinstance(again, str):
                return again
            arrays.update(again)
            return None

        _require(settle)
        return arrays

    def variables_on_host(self) -> dict[str, Any]:
        """Returns the model's variables by collection, as nested dictionaries of NumPy arrays at logical shapes.

        Raises:
          CheckpointReadError: storage fails.
        """
        from spmd_trainer.checkpointing import orbax_io

        found: dict[str, Any] = step_files.read(
            f"reading the variables of {self.step_dir}",
            lambda: orbax_io.read_on_host(self.step_dir / STATE_ITEM, "mdl_vars"),
        )
        return found

    def checked(self) -> OwnStep:
        """Compares the checksums of the array files. Returns this checkpoint with `unchecked=None`. All processes must call it.

        Raises:
          DamagedFilesError, CheckpointNotFoundError: as `read`.
        """
        _require(self._contents_problem)
        return dataclasses.replace(self, unchecked=None)

    def _contents_problem(self) -> str | None:
        return None if self.unchecked is None else _share_problem(self.step_dir, self.unchecked)

    def _read_again(self, error: Exception, attempt: Callable[[], dict[str, jax.Array]]) -> dict[str, jax.Array] | str:
        """Reads the arrays again if `error`, which the first attempt raised, is a storage error. The files' checksums are right.

        Returns:
          The arrays by path; or the problem as a text, if an array can't be decoded.

        Raises:
          CheckpointNotFoundError: the step has been deleted.
          CheckpointReadError: storage fails.
          Exception: `error`, if it is neither a storage error nor a decoding error.
        """
        what = f"reading the arrays of {self.step_dir}"
        try:
            if not isinstance(error, OSError):
                raise error
            return step_files.read(what, _storage_errors()(attempt))
        except (FileNotFoundError, NotADirectoryError) as e:
            step_files.require_step(self.step_dir)
            raise CheckpointReadError(f"{what} failed: {e}") from e
        except Exception as e:
            if isinstance(e, CheckpointError) or not _DECODING_ERRORS.search(_full_text(e)):
                raise
            return f"an array cannot be decoded ({_full_text(e)})"


class _StorageError(OSError):
    """TensorStore could not read a file, for a reason outside the file's contents."""


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Context manager that converts TensorStore's storage errors to OSErrors, so that the read is retried."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = _full_text(error)
        if _DECODING_ERRORS.search(text) or not _STORAGE_ERRORS.search(text):
            raise
        raise _StorageError(text) from error


def _full_text(error: BaseException) -> str:
    """Returns the texts of an error and its causes, root cause first. (Orbax wraps TensorStore's errors in its own.)"""
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None and str(current) not in texts:
        texts.insert(0, str(current))
        current = current.__cause__ or current.__context__
    return " <- ".join(texts)


def open_step(directory: epath.Path, step: int) -> OwnStep:
    """Opens a checkpoint after checking the names and sizes of all files, and the contents of the files without arrays.

    All processes must call it; all of them find the same damage. `OwnStep.read` checks the contents of the array files.

    Raises:
      DamagedFilesError: files are missing, or differ from those that were written.
      DamagedCheckpointError: the record is damaged although its checksum is right, or a later version of the trainer wrote it.
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    step_dir = steps.step_dir(directory, step)
    opened: list[OwnStep] = []
    listed: list[manifest.Manifest] = []

    def check() -> str | None:
        found = manifest.read(step_dir, step)
        if isinstance(found, str):
            return found
        listed.append(found)
        return _share_problem(step_dir, _part(found, arrays=False))

    def read_record() -> str | None:
        try:
            record, unchecked = records.read(step_dir, step), _part(listed[0], arrays=True)
        except DamagedCheckpointError as error:  # if one process finds damage, all refuse the step
            return str(error)
        saved, name = records.saved_variables(record), f"step {step} in {directory}"
        opened.append(OwnStep(name, step, saved, record["metadata"], step_dir, record, unchecked))
        return None

    _require(check)
    if problem := agreed_problem(read_record):
        raise DamagedCheckpointError(problem)
    return opened[0]


def _require(check: Callable[[], str | None]) -> None:
    if problem := agreed_problem(check):
        raise DamagedFilesError(problem)


def _share_problem(step_dir: epath.Path, files: manifest.Manifest) -> str | None:
    """Returns the problem with the contents of this process' share of the files, or None. Each file is in one share."""
    return manifest.contents_problem(step_dir, files, jax.process_index(), jax.process_count())


def _part(listed: manifest.Manifest, *, arrays: bool) -> manifest.Manifest:
    """Returns the part of a manifest about the array files, or the part about all other files."""
    files = {n: entry for n, entry in listed["files"].items() if n.startswith(f"{STATE_ITEM}/") == arrays}
    part = listed.copy()
    part["files"] = files
    return part


def find_step(
    directory: epath.Path, step: int | None, check_contents: bool, asked: str = "init_from_checkpoint_rules"
) -> OwnStep:
    """Opens the given checkpoint step of a directory, or the newest undamaged one. All processes must call it.

    Args:
      directory: a run's `job_log_dir`, its `checkpoints`, or one step in it.
      step: the step. None takes the newest undamaged step, or the step that `directory` itself is.
      check_contents: True compares the checksums of the step's files; False compares sizes only.
      asked: the name of the setting that requests the step, for messages.

    Raises:
      CheckpointNotFoundError: there is no such step, or no undamaged one; or `directory` itself is a different step.
      DamagedCheckpointError: the given step is damaged.
    """
    name, own_step = decided_by_process_0(lambda: _locate(directory))
    if None not in (step, own_step) and step != own_step:
        raise CheckpointNotFoundError(
            f"{asked}: {directory} is step {own_step}, and step={step} asks for another one; give {name} with step={step}, or "
            "no step"
        )
    directory = epath.Path(name)
    step = own_step if own_step is not None else step
    for candidate in steps.agreed_newest_first(directory) if step is None else [step]:
        try:
            found = open_step(directory, candidate)
            return found.checked() if check_contents else found
        except CheckpointNotFoundError:
            if step is not None:
                raise
            # Otherwise it was deleted since it was listed.
        except DamagedCheckpointError as error:
            problem = str(error).removesuffix(".")
            if step is not None:
                raise DamagedCheckpointError(f"{asked}: step {step} in {directory} is refused: {problem}.") from error
            logging.warning("Checkpoint step %d in %s is refused: %s.", candidate, directory, problem)
    raise CheckpointNotFoundError(f"{asked}: no whole checkpoint in {directory}.")


def _locate(directory: epath.Path) -> tuple[str, int | None]:
    """Returns the directory that holds the steps, and the number of the step if `directory` itself is a step (else None)."""

    def look() -> tuple[str, int | None]:
        if directory.name.isdigit() and (directory / records.RECORD_ITEM).exists():
            return str(directory.parent), int(directory.name)
        below = directory / "checkpoints"
        return str(below if below.exists() else directory), None

    return step_files.read(f"looking for checkpoints in {directory}", look)

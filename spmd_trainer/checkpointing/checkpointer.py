"""Saves the train state while training goes on, and restores it onto any mesh."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer import multihost
from spmd_trainer.checkpointing import manifest, mismatch, records, state_checks, steps
from spmd_trainer.checkpointing.durations import Duration, parse_duration
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from spmd_trainer.checkpointing.save_times import SaveTimes

if TYPE_CHECKING:
    from spmd_trainer.checkpointing import orbax_io


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      state: the state, in the structure of the variables asked for, at padded shapes on the mesh asked for.
      step: the number of training steps taken.
      input_state: the position of the input as it was given to `save`.
      metadata: the whole record, as `Checkpointer.read_metadata` returns it.
    """

    state: Any
    step: int
    input_state: dict[str, Any] | None
    metadata: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run: one directory per step, each either whole or not seen at all.

    Every process of the job makes one and calls the same methods in the same order. Evaluation and decoding jobs, which
    follow a run from outside, open theirs with `read_only=True`.

    A step holds the arrays at padded shapes, as the devices hold them, each shard written by its owner; a JSON record
    (logical shapes, mesh, input position, the caller's metadata); and a list of all files with checksums, which is what
    makes a step "whole" (see `manifest` for what is checked when). A damaged step is never restored and never deleted:
    a run that continues from an older step moves it aside to `refused-STEP`, and says so.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        save_interval_steps: int = 1,
        save_max_to_keep: int | None = None,
        save_keep_interval_duration: Duration = "12h",
        read_only: bool = False,
        label: str = "step",
    ) -> None:
        """Opens a directory of checkpoints. Writes nothing yet.

        Args:
          directory: `job_log_dir/checkpoints`.
          save_interval_steps: `should_save` says yes at multiples of this.
          save_max_to_keep: how many of the newest steps stay; None keeps all.
          save_keep_interval_duration: besides the newest ones, a step stays when it is this much younger than the one
            kept before it: '12h', '90m', '1d12h', 45 (seconds), a timedelta; '' or None keeps the newest ones only.
          read_only: save nothing, move nothing.
          label: what the log calls a step of this directory, e.g. 'saving step 200'.

        Raises:
          ValueError: an interval, number or duration makes no sense.
        """
        if save_interval_steps < 1:
            raise ValueError(f"save_interval_steps must be at least 1, is {save_interval_steps}.")
        if save_max_to_keep is not None and save_max_to_keep < 1:
            raise ValueError(f"save_max_to_keep must be at least 1, or None to keep all, is {save_max_to_keep}.")
        self._directory = epath.Path(directory)
        self._save_interval_steps = save_interval_steps
        self._max_to_keep = save_max_to_keep
        self._keep_interval = parse_duration(save_keep_interval_duration)
        self._read_only = read_only
        self._label = label
        self._manager: orbax_io.Manager | None = None
        self._last_save: int | None = None
        self._times: SaveTimes | None = None
        self._failure: CheckpointError | None = None

    @property
    def directory(self) -> epath.Path:
        """Where the steps lie."""
        return self._directory

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if exc_type is None:
                raise
            logging.exception("A save failed too, while another error ended the run.")

    # --- Steps ---

    def all_steps(self) -> list[int]:
        """Returns the whole steps, oldest first, as far as names and sizes of files tell."""
        return [step for step in steps.present(self._directory) if steps.is_whole(self._directory, step)]

    def latest_step(self) -> int | None:
        """Returns the newest whole step, as far as names and sizes of files tell, or None. Logs newer damaged ones."""
        for step in reversed(steps.present(self._directory)):
            problem = manifest.quick_problem(steps.step_dir(self._directory, step), step)
            if problem is None:
                return step
            logging.warning("Checkpoint step %d in %s is no whole one: %s.", step, self._directory, problem)
        return None

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Returns the record of a step without reading an array.

        Its keys: `step`, `saved_at`, `mesh` (axes, devices, processes, platform), `versions`, `variables`
        ({path: {shape, dtype, padded_shape, spec}}, `shape` being the logical one), `input_state`, and `metadata`,
        which is what was given to `save`.

        Raises:
          CheckpointNotFoundError: there is no such step.
          DamagedCheckpointError: the record is damaged.
        """
        self._require(step)
        return records.read(steps.step_dir(self._directory, step), step)

    def _require(self, step: int) -> None:
        if not steps.step_dir(self._directory, step).exists():
            whole = self.all_steps()
            have = f"Whole steps there: {', '.join(map(str, whole))}." if whole else "There are none at all."
            raise CheckpointNotFoundError(f"No checkpoint of step {step} in {self._directory}. {have}")

    # --- Saving ---

    def should_save(self, step: int) -> bool:
        """Returns whether this step is due: a multiple of `save_interval_steps` that isn't there yet. Cheap."""
        if self._read_only or step % self._save_interval_steps:
            return False
        return step != self._last_save and not steps.is_whole(self._directory, step)

    def save(
        self,
        step: int,
        state: Any,
        variables: Any,
        *,
        input_state: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
        force: bool = False,
        check_finite: bool | Callable[[Any], Any] = False,
    ) -> bool:
        """Starts to save a step; writing goes on in the background. Called by every process.

        When it returns, the state may be donated to the next training step. A save that is still being written is
        waited for first.

        Args:
          step: the number of training steps taken.
          state: a tree of jax.Arrays at padded shapes, usually a TrainState.
          variables: the same tree with VariableSpecs.
          input_state: the position of the input, the same on every process: numbers, strings, bytes, lists, dicts.
          metadata: whatever else shall be found beside the arrays, e.g. the resolved config.
          force: save whether or not the step is due.
          check_finite: True to refuse a state that holds NaN or infinity, or a function of the state that returns
            whether it is good. It waits for the state to be computed.

        Returns:
          Whether a save was started: False when the step isn't due, or is already there.

        Raises:
          CheckpointError: an earlier save failed (its cause is chained and in the message), this one could not start,
            or the state doesn't fit `variables`.
          NonFiniteStateError: the state was refused; nothing was written.
        """
        if not force and not self.should_save(step):
            return False
        if self._read_only:
            raise CheckpointError(f"{self._directory} was opened read-only; step {step} was not saved.")
        times = SaveTimes(f"{self._label} {step}")
        self.wait_until_finished()
        if step == self._last_save or steps.is_whole(self._directory, step):
            logging.debug("Checkpoint step %d is already there.", step)
            return False
        times.begin()
        specs = records.by_path(variables)
        arrays = state_checks.arrays_by_path(state, variables, specs)
        state_checks.refuse_non_finite(step, state, arrays, check_finite)
        record = records.make(step, state, specs, input_state, metadata)
        manager = self._open_manager()
        self._last_save, self._times = step, times
        try:
            _orbax_io().save(manager, step, arrays, record)
        except Exception as e:
            self._fail(e)
        times.caller_goes_on()
        return True

    def wait_until_finished(self) -> None:
        """Returns when the save in progress is whole on disk.

        Raises:
          CheckpointError: it failed, now or earlier. Once a save has failed, no other is started.
        """
        if self._failure is not None:
            raise CheckpointError(str(self._failure)) from self._failure.__cause__
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as e:
                self._fail(e)

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads. Closing twice is the same as once.

        Raises:
          CheckpointError: the save in progress failed.
        """
        if self._manager is None:
            return
        try:
            self.wait_until_finished()
        finally:
            manager, self._manager = self._manager, None
            if self._failure is None:
                manager.close()

    def _open_manager(self) -> orbax_io.Manager:
        if self._manager is None:
            # Orbax takes every directory with a number for a good step, and would keep damaged ones instead of good.
            for step in steps.agreed_newest_first(self._directory):
                problem = manifest.quick_problem(steps.step_dir(self._directory, step), step)
                if multihost.first_problem(problem):
                    steps.move_aside(self._directory, step)
            self._manager = _orbax_io().make_manager(
                self._directory,
                max_to_keep=self._max_to_keep,
                keep_interval=self._keep_interval,
                before_commit=self._list_files,
                after_commit=self._is_on_disk,
            )
        return self._manager

    def _list_files(self) -> None:
        step = self._last_save
        if step is None:
            raise CheckpointError("A commit without a save.")
        manifest.write(_orbax_io().writing_dir(self._directory, step), step)

    def _is_on_disk(self) -> None:
        # The next save waits for this one, so the times are those of this step.
        if self._times is not None:
            self._times.is_on_disk()

    def _fail(self, cause: Exception) -> NoReturn:
        self._failure = CheckpointError(
            f"Saving checkpoint step {self._last_save} to {self._directory} failed: {type(cause).__name__}: {cause}\n"
            f"Nothing of it counts; the newest whole step is {self.latest_step()}. Check free space, quota and "
            "permissions there, then start the run again: it continues from that step."
        )
        raise self._failure from cause

    # --- Restoring ---

    def restore(self, variables: Any, mesh: Mesh, *, step: int | None = None, partial: bool = False) -> Restored:
        """Restores a step onto a mesh, whatever mesh, device count, process count and padding it was saved with.

        The logical region comes back bit for bit, padding is zero. Each process reads the shards of its own devices.
        Called by every process.

        Args:
          variables: a tree of VariableSpecs: the state to make.
          mesh: the mesh to put it on.
          step: the step to restore; None for the newest whole one, past damaged ones, each named in the log with its
            fault. The damaged ones are then moved aside, unless read-only.
          partial: leave saved variables that `variables` lacks unread, e.g. optimizer states in evaluation. What is
            asked for must be there all the same.

        Raises:
          CheckpointNotFoundError: no such step, or no whole one.
          CheckpointMismatchError: variables are missing, extra, reshaped or re-typed; lists them with the likely cause.
          DamagedCheckpointError: the step asked for is damaged.
        """
        self.wait_until_finished()
        self._last_save = None
        if step is not None:
            self._require(step)
            restored, problem = self._read_or_problem(step, variables, mesh, partial)
            if restored is None:
                raise DamagedCheckpointError(f"Checkpoint step {step} in {self._directory} is damaged: {problem}.")
            self._warn_of_newer(step)
            return restored
        refused: dict[int, str | None] = {}
        for candidate in steps.agreed_newest_first(self._directory):
            restored, refused[candidate] = self._read_or_problem(candidate, variables, mesh, partial)
            if restored is not None:
                del refused[candidate]
                self._set_refused_aside(restored.step, list(refused))
                return restored
            logging.warning("Checkpoint step %d in %s is refused: %s.", candidate, self._directory, refused[candidate])
            # Reads that Orbax abandoned end here, not in the middle of an import, which that can break (CPython gh-106176).
            gc.collect()
        found = "".join(f"\n  step {s} is refused: {why}" for s, why in refused.items()) or " It holds no steps."
        raise CheckpointNotFoundError(f"No whole checkpoint in {self._directory}.{found}")

    def _read_or_problem(
        self, step: int, variables: Any, mesh: Mesh, partial: bool
    ) -> tuple[Restored | None, str | None]:
        """Checks and reads a step. Damage found by checksum or by decoding an array is returned; the rest is raised.

        Checksums are worked out while arrays are read: where there are cores to spare they cost no time.
        """
        found = manifest.quick_problem(steps.step_dir(self._directory, step), step)
        if problem := multihost.first_problem(found):
            return None, problem
        restored, error = None, None
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            checked = pool.submit(steps.contents_problem, self._directory, step)
            try:
                restored = self._read(step, variables, mesh, partial)
            except Exception as e:
                error = e
        # What a damaged file made of the reading says nothing; the checksums go first.
        if problem := multihost.first_problem(checked.result()):
            return None, problem
        if error is not None and not re.search(
            "DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|Error reading|Error decoding", str(error)
        ):
            raise error
        if problem := multihost.first_problem(f"an array cannot be decoded ({error})" if error else None):
            return None, problem
        return restored, None

    def _read(self, step: int, variables: Any, mesh: Mesh, partial: bool) -> Restored:
        record = records.read(steps.step_dir(self._directory, step), step)
        saved = records.saved_variables(record)
        wanted = records.by_path(variables)
        compared = {path: variable for path, variable in saved.items() if path in wanted} if partial else saved
        checkpoint = f"Checkpoint step {step} in {self._directory}"
        message = mismatch.explain(
            compared, {p: records.SavedVariable.from_spec(s) for p, s in wanted.items()}, checkpoint
        )
        if message:
            raise CheckpointMismatchError(message)
        arrays = _orbax_io().read_arrays(steps.step_dir(self._directory, step), saved, wanted, mesh)
        state = jax.tree.unflatten(jax.tree.structure(variables), arrays.values())
        return Restored(state, step, record["input_state"], record)

    def _set_refused_aside(self, restored: int, refused: list[int]) -> None:
        if not refused:
            return
        logging.warning(
            "Restored step %d, the newest whole one, instead of %s.", restored, ", ".join(map(str, refused))
        )
        if not self._read_only:
            for step in refused:
                steps.move_aside(self._directory, step)
            if self._manager is not None:
                self._manager.reload()

    def _warn_of_newer(self, step: int) -> None:
        newer = [s for s in steps.present(self._directory) if s > step]
        if newer and not self._read_only:
            logging.warning(
                "Restoring step %d, and %s holds newer ones (%s). A run that goes on from here keeps those, and a "
                "later restart takes the newest: use another job_log_dir, or move them away.",
                step,
                self._directory,
                ", ".join(map(str, newer)),
            )


def _orbax_io() -> Any:
    """Orbax takes 0.4 s to import: not before a checkpoint is really written or read."""
    from spmd_trainer.checkpointing import orbax_io

    return orbax_io

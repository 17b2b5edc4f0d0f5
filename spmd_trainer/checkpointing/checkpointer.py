"""Saves the train state in the background while training continues, and restores it onto any mesh."""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer import multihost
from spmd_trainer.checkpointing import (
    input_states,
    manifest,
    records,
    retired_steps,
    saving,
    sources,
    steps,
)
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from spmd_trainer.checkpointing.own_steps import DamagedFilesError, open_step
from spmd_trainer.checkpointing.retired_steps import Duration, parse_duration
from spmd_trainer.checkpointing.sources import Restored

if TYPE_CHECKING:
    from spmd_trainer.checkpointing import orbax_io
    from spmd_trainer.train_states import TrainState


class _Layout(NamedTuple):
    variables: TrainState
    mesh: Mesh


class Checkpointer:
    """Saves and restores the checkpoints of one run. A step (checkpoint) is a directory that becomes visible when complete.

    Every process of the job creates a Checkpointer and calls the same methods in the same order. Evaluation and decoding
    jobs, which only read a run's checkpoints, open them with `read_only=True`.

    A step holds the arrays at logical shapes, each shard written by the process that owns it; a JSON record (logical shapes,
    mesh, input position, the caller's metadata); and a manifest that lists all files with sizes and checksums. A step is
    whole (undamaged) if its files match its manifest; the module `manifest` lists the checks. A damaged step is never restored
    and never deleted: a run that continues from an older step renames the damaged one to `refused-STEP` and logs this.

    Every method that reads storage raises CheckpointReadError if storage does not respond or denies access.
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
        """Opens a directory of checkpoints. Writes no file.

        Args:
          directory: `job_log_dir/checkpoints`.
          save_interval_steps: `should_save` returns True at multiples of this number of training steps.
          save_max_to_keep: how many of the newest steps to keep; None keeps all.
          save_keep_interval_duration: an older step is also kept if it was saved at least this long after the previous step
            that is kept: '12h', '90m', '1d12h', 45 (seconds), a timedelta. '' or None keeps the newest steps only.
          read_only: True saves nothing and renames nothing.
          label: the word for a checkpoint in log messages: with 'step', they read 'saving step 200'.

        Raises:
          ValueError: an interval, number or duration is invalid.
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
        # Steps that process 0 has seen, and those saved since. (Other processes may see different ones.) None: not listed yet.
        self._known: set[int] | None = None
        # Steps whose remains on an object store can't be deleted.
        self._blocked: set[int] = set()
        self._last_save: int | None = None
        self._times: saving.SaveTimes | None = None
        self._finished: collections.deque[int] = collections.deque()
        self._failure: CheckpointError | None = None

    @property
    def directory(self) -> epath.Path:
        """The directory that holds the steps."""
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
        """Returns the undamaged steps, oldest first, judged by the names and sizes of their files as this process sees them."""
        return steps.whole(self._directory)

    def latest_step(self) -> int | None:
        """Returns the newest undamaged checkpoint step or None, judged as in `all_steps`. Logs the damage of newer steps."""
        return steps.newest_whole(self._directory, log_damage=True)

    def holds_steps(self) -> bool:
        """Returns True if process 0 sees a checkpoint, damaged or not. Then the run must not start from scratch.

        All processes must call it. The remains of a killed save on an object store are not treated as a checkpoint.
        """
        there, committed = decided_by_process_0(functools.partial(steps.present_and_committed, self._directory))
        self._known = set(there)
        return committed

    def read_metadata(self, step: int) -> records.Record:
        """Returns the JSON record of a checkpoint without reading an array.

        Raises:
          CheckpointNotFoundError: the step does not exist.
          DamagedCheckpointError: the record is damaged.
        """
        steps.require(self._directory, step)
        return records.read(steps.step_dir(self._directory, step), step)

    # --- Saving ---

    def should_save(self, step: int) -> bool:
        """Returns True if a checkpoint is due: the step is a multiple of `save_interval_steps` and is not saved yet.

        Cheap enough to call at every training step. All processes must call it; all get the same answer.
        """
        if self._read_only or step % self._save_interval_steps:
            return False
        return not self._is_saved(step)

    def _is_saved(self, step: int) -> bool:
        """Returns True if this Checkpointer has saved the step, or if process 0 finds it undamaged."""
        if step == self._last_save:
            return True
        if self._known is None:
            self._known = set(steps.agreed_newest_first(self._directory))
        # The step may have been deleted since, as an old one.
        return step in self._known and decided_by_process_0(lambda: steps.is_whole(self._directory, step))

    def save(
        self,
        step: int,
        state: TrainState,
        variables: TrainState,
        *,
        input_state: Mapping[str, object] | None,
        metadata: Mapping[str, object],
        force: bool = False,
        check_finite: bool = False,
        shared_input_state: bool = True,
    ) -> bool:
        """Starts to save a checkpoint; writing continues in the background. All processes must call it.

        When it returns, the state may be donated to the next training step. If the previous save is still being written,
        waits for it.

        Args:
          step: the number of training updates that led to the state.
          state: a TrainState (or another tree) of jax.Arrays at padded shapes.
          variables: the same tree with VariableSpecs as leaves.
          input_state: this process' position in the training input, as numbers, strings, bytes, lists and dicts.
          metadata: further entries of the checkpoint's JSON record, e.g. the resolved config.
          force: True saves even if the step is not due.
          check_finite: True waits until the state is computed, and raises an error if it contains NaN or infinity.
          shared_input_state: True if `input_state` is valid for any number of processes; False saves one for each process.

        Returns:
          True if a save was started; False if the step is not due or exists already.

        Raises:
          CheckpointError: an earlier save failed (the message has its cause, which is chained), this save could not start, or
            the state does not match `variables`.
          NonFiniteStateError: `check_finite` found NaN or infinity; nothing was written.
        """
        if not force and not self.should_save(step):
            return False
        if self._read_only:
            raise CheckpointError(f"{self._directory} was opened read-only; step {step} was not saved.")
        times = saving.SaveTimes(what := f"{self._label} {step}")
        self.wait_until_finished()
        if self._is_saved(step):
            logging.debug("Checkpoint step %d exists already.", step)
            return False
        logging.info("saving %s", what)
        # Waits for late processes: the collectives of the first save would wait for 30 s only.
        multihost.barrier("the state is ready to be saved")
        specs = records.by_path(variables)
        arrays = saving.arrays_by_path(state, variables, specs)
        if check_finite:
            saving.refuse_non_finite(step, arrays)
        position, same = input_states.agree(input_state, shared=shared_input_state)
        record = records.make(step, state, specs, position, metadata, same_input_state=same)
        manager = self._open_manager()
        if step in self._blocked:
            raise CheckpointError(
                f"Step {step} cannot be saved: objects of an earlier save of it are left in {self._directory} and could not be "
                f"deleted. Delete {step}/ and {steps.DELETING_PREFIX}{step} there, then start again."
            )
        self._last_save, self._times = step, times
        if self._known is not None:
            self._known.add(step)
        # Here and below: importing Orbax takes 0.4 s, so it waits until a checkpoint is written or read.
        from spmd_trainer.checkpointing import orbax_io

        try:
            orbax_io.save(manager, step, arrays, record, None if same else {input_states.KEY: position})
        except Exception as e:
            self._fail(e)
        times.mark("copied")
        return True

    def wait_until_finished(self) -> None:
        """Waits until the save in progress is completely on disk.

        Raises:
          CheckpointError: this save or an earlier one failed. After a failure no other save is started.
        """
        if self._failure is not None:
            raise CheckpointError(str(self._failure)) from self._failure.__cause__
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as e:
                self._fail(e)

    def take_finished(self) -> list[int]:
        """Returns the steps that every process has completely saved since the last call of this method. Never waits."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads. A second call does nothing.

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
        from spmd_trainer.checkpointing import orbax_io

        if self._manager is None:
            # Orbax takes every directory named by a number for a good step: it would keep damaged steps, and delete good ones.
            retired_steps.move_all_aside(self._directory)
            self._blocked = set(decided_by_process_0(lambda: steps.clean_up(self._directory)))
            self._manager = orbax_io.make_manager(
                self._directory,
                max_to_keep=self._max_to_keep,
                keep_interval=self._keep_interval,
                before_commit=self._write_manifest,
                after_commit=self._mark_on_disk,
            )
        return self._manager

    def _write_manifest(self) -> None:
        from spmd_trainer.checkpointing import orbax_io

        step = self._last_save
        if step is None:
            raise CheckpointError("Orbax commits a step, but no save was started.")
        manifest.write(orbax_io.writing_dir(self._directory, step), step)

    def _mark_on_disk(self) -> None:
        # The next save waits for this one, so `_times` is still that of this step.
        if self._times is not None:
            self._times.mark("on disk")
        if self._last_save is not None:
            self._finished.append(self._last_save)

    def _fail(self, cause: Exception) -> NoReturn:
        self._failure = saving.error_of(self._directory, self._last_save, cause, self.latest_step)
        raise self._failure from cause

    # --- Restoring ---

    def restore(
        self,
        variables: TrainState,
        mesh: Mesh,
        *,
        step: int | None = None,
        partial: bool = False,
        with_input: bool = True,
    ) -> Restored:
        """Restores a checkpoint onto a mesh. It may have been saved with a different mesh, device or process count, or padding.

        The logical region is restored bit for bit; padding is zero. Each process reads its own shards, so all must call it.

        Args:
          variables: a TrainState (or another tree) of VariableSpecs: the state to restore.
          mesh: the mesh of the restored arrays.
          step: the step to restore. None takes the newest undamaged step; newer damaged steps are logged with their damage,
            and renamed unless this Checkpointer is read-only.
          partial: True ignores saved variables that `variables` lacks; see `sources.restore`.
          with_input: True also reads the input position, which a job with a different number of processes may be unable to do.

        Raises:
          CheckpointNotFoundError: the step does not exist, or there is no step.
          NoWholeCheckpointError: there are steps, and all of them are damaged.
          DamagedCheckpointError: the requested step is damaged.
          CheckpointMismatchError: see `sources.restore`.
          CheckpointReadError: storage does not respond or denies access. Nothing is renamed.
        """
        self.wait_until_finished()
        self._last_save = self._known = None
        if step is None:
            candidates = steps.agreed_newest_first(self._directory)
            self._known = set(candidates)
        else:
            candidates = [step]
            agreed_problem(lambda: steps.require(self._directory, step))
        layout, refused = _Layout(variables, mesh), dict[int, str]()
        for candidate in candidates:
            try:
                source = open_step(self._directory, candidate)
                restored = sources.restore(source, layout, partial=partial, with_input=with_input)
            except CheckpointNotFoundError:
                if step is not None:
                    raise
                logging.warning("Checkpoint step %d in %s was deleted before it was read.", candidate, self._directory)
            except DamagedFilesError as damage:
                if step is not None:
                    message = f"Checkpoint step {step} in {self._directory} is damaged: {damage}."
                    raise DamagedCheckpointError(message) from damage
                self._refuse(candidate, str(damage), refused)
            else:
                if step is None:
                    self._move_refused_aside(candidate, list(refused))
                elif not self._read_only:
                    steps.warn_of_newer(self._directory, step)
                return restored
            # Collects the coroutines of reads that Orbax abandoned: collected during an import, they can break it (CPython
            # gh-106176).
            gc.collect()
        raise retired_steps.none_whole(self._directory, refused, read_only=self._read_only)

    def _refuse(self, step: int, problem: str, refused: dict[int, str]) -> None:
        # The remains of a killed save on an object store are not a step; the next save deletes them.
        if decided_by_process_0(functools.partial(steps.is_committed, self._directory, step)):
            refused[step] = problem
            logging.warning("Checkpoint step %d in %s is refused: %s.", step, self._directory, problem)
        else:
            logging.warning("Checkpoint step %d in %s was not finished; it is left out.", step, self._directory)

    def _move_refused_aside(self, restored: int, refused: list[int]) -> None:
        if not refused:
            return
        logging.warning(
            "Restored step %d, the newest whole step, instead of %s.", restored, ", ".join(map(str, refused))
        )
        if not self._read_only:
            for step in refused:
                retired_steps.move_aside(self._directory, step)
            if self._manager is not None:
                self._manager.reload()

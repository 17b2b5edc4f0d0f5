"""Callbacks: objects that a training run calls at fixed points, e.g. after each step. Experiments and callers can add more.

`Callback` has one method for each of these points, and each method gets a `Run`: the run's state, mesh, task and directory. An
experiment adds callbacks as configs in `task.train.callbacks`, a caller as objects in `spmd_trainer.train(callbacks=[...])`.
`StepWatch` has further methods that the loop calls within each step.

The trainer's own callbacks serve as examples. Those of every run are in `training/`: `summaries.py`, `saving.py`,
`early_stopping.py` and `invalid_steps.py`. The others are optional: `watch/run.py` lists callbacks that monitor a run,
`watch/tracking/` has one that reports the run to experiment trackers (`--track`), and `lm_eval/` has one that an experiment can
add to evaluate the model every N steps. `training/callback_list.py` calls a run's callbacks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import jax
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import Packed, Scalars

if TYPE_CHECKING:
    from spmd_trainer.inputs.prefetch import Prefetcher
    from spmd_trainer.step.partitioner import Partitioner
    from spmd_trainer.tasks_lib import SingleTask
    from spmd_trainer.train_states import PyTree, TrainState
    from spmd_trainer.training.summary_writers import SummaryWriters

# The parts of a run's time.
PARTS = ("start", "compile", "input", "step", "save", "evaluation", "decode", "other")
# How a run ended: complete, with an error, or by a signal, after which the same command continues it.
Status: TypeAlias = Literal["finished", "failed", "stopped"]
# (state, key, batch) -> (new state, packed scalars). Donates the state.
StepFn: TypeAlias = "Callable[[TrainState, jax.Array, PyTree], tuple[TrainState, Packed]]"


class CallbackError(UserError):
    """A callback raised an exception; the message names the callback, its method and the step."""


class Run:
    """A training run: the object that callbacks get.

    Attributes:
      experiment: the experiment's full registered name.
      job_log_dir: the run's directory.
      task: the built task.
      partitioner: the partitioner on the run's mesh. An elastic run gets a new one when its devices change.
      batch: ShapeDtypeStructs of the global training batch, without padding.
      num_steps: the step at which training is complete.
      eval_names: names of the evaluation datasets.
      eval_averages: the averages that evaluation uses instead of the variables, e.g. 'ema', or 'none'. See `training.averages`.
      saves: True if the run saves checkpoints.
      summaries: writes scalars; see `SummaryWriters.write`. Only process 0 writes; the other processes discard the scalars.
      origin: where the run's initial variables came from; part of the metadata of its checkpoints.
      input: the training input. `input.state` is its position after the batch that training step `step` used.
      config_lines: the resolved config, one 'path: value' a line.
      began: `time.monotonic()` when the run began.
      activity: (current activity, e.g. 'training step 12'; `time.monotonic()` when the activity began).
      times: a `RunTimes`, which adds up the seconds that this process spends in each part of the run.
      first_step: the step of the state that was initialized or restored when this process started.
      step: the number of training steps that `state` has taken.
      dispatched: the batch of the step that was dispatched last; for `after_dispatch`.
      stop_reason: why training ends before `num_steps`; '' if it has not been stopped.
      waits_for_devices: function that returns True while the loop waits for a dispatched step. Thread-safe.
      step_watch: the `StepWatch` that the loop calls within each step.
      fail: function to call if the run hangs. It records the given error and calls every callback's `on_failure`. A different
        thread calls it, because the training loop may be blocked.
      hangs: True once the process is exiting because the run hangs. Later errors only result from the hang and aren't recorded.
    """

    def __init__(
        self,
        *,
        experiment: str,
        job_log_dir: epath.Path,
        task: SingleTask,
        partitioner: Partitioner,
        batch: PyTree,
        summaries: SummaryWriters,
        config_lines: Sequence[str],
        saves: bool,
        eval_names: Sequence[str] = (),
        eval_averages: str = "none",
    ):
        self.experiment = experiment
        self.job_log_dir = job_log_dir
        self.task = task
        self.partitioner = partitioner
        self.batch = batch
        self.summaries = summaries
        self.config_lines = config_lines
        self.saves = saves
        self.eval_names = tuple(eval_names)
        self.eval_averages = eval_averages
        self.origin: Mapping[str, object] = {}
        self.input: Prefetcher | None = None
        self.num_steps = int(task.train.num_train_steps)
        self.began = time.monotonic()
        self.times = RunTimes()
        self.first_step = 0
        self.step = 0
        self.dispatched: PyTree = None
        self._state: TrainState | None = None
        self.stop_reason = ""
        self.waits_for_devices: Callable[[], bool] = lambda: False
        self.step_watch = StepWatch()
        self.fail: Callable[[Exception], None] = lambda error: None
        self.hangs = False
        self.activity = ("start", self.began)
        self._logged: dict[str, float] = {}

    @property
    def state(self) -> TrainState:
        """The newest train state, whose arrays have padded shapes. Available from `on_start` on.

        `state.step` may be ahead of the step that `after_step` is called for. The next training step donates the state's buffers:
        read the state within a callback, don't keep it.
        """
        if self._state is None:
            raise RuntimeError("run.state is not there yet: it is restored or initialised between on_open and on_start")
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    @property
    def mesh(self) -> Mesh:
        return self.partitioner.mesh

    @property
    def num_rows(self) -> int:
        """Rows of the global training batch."""
        return int(jax.tree.leaves(self.batch)[0].shape[0])

    def begin(self, activity: str, part: str = "other") -> None:
        """Records that the current activity has ended and the next one begins. Cheap enough to call at every step.

        Args:
          activity: what the run does now; for messages.
          part: the part of the run, one of `PARTS`, that the activity's seconds are added to in `times`.
        """
        self.activity = (activity, self.times.begin(part))

    @property
    def is_complete(self) -> bool:
        """True if training is complete: the last step was taken, or `stop` was called."""
        return self.step >= self.num_steps or bool(self.stop_reason)

    def end(self, error: BaseException | None = None) -> Status:
        """Returns how the run has ended: 'finished', 'failed', or 'stopped' by a signal or Ctrl-C.

        Args:
          error: the exception that ended the run; None if there was none.
        """
        if error is not None:
            return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        return "finished" if self.is_complete else "stopped"

    def log(self, scalars: Mapping[str, float]) -> None:
        """Adds scalars to the training summary of the step that `after_step` is called for.

        Summaries are written at step 1 and at multiples of `task.train.summary_interval_steps`. Scalars logged at other steps are
        dropped, except those logged after the last summary, which are written when the run ends.
        """
        self._logged.update(scalars)

    def take_logged(self) -> dict[str, float]:
        """Returns and clears the scalars passed to `log` since the last call of `take_logged`."""
        logged, self._logged = self._logged, {}
        return logged

    def stop(self, reason: str) -> None:
        """Ends training after the step in progress, with a checkpoint and a last evaluation.

        With several processes, all of them must call this at the same step. They do so if the decision depends only on the
        scalars that `after_step` receives, because these are the same on all processes.

        Args:
          reason: a clause for the log, e.g. 'early_stopping_fn ended training'.
        """
        self.stop_reason = self.stop_reason or reason


class Turn(enum.IntEnum):
    """Position of a callback in the calling order. Callbacks that write files come after those that log scalars or stop a run."""

    FIRST = 0
    SAYS = 1
    WRITES = 2
    SENDS = 3  # sends the written data elsewhere, e.g. to a tracker
    LAST = 4


class Callback:
    """Base class of callbacks, which a training run calls at fixed points. Every method does nothing; override any of them.

    They are called in this order: the trainer's callbacks that monitor or stop the run; the experiment's callbacks
    (`task.train.callbacks`); the caller's (`spmd_trainer.train(callbacks=...)`); the trainer's that write summaries,
    checkpoints, times and the run's page; then the experiment trackers (`--track`). Every process calls its own callbacks.
    An exception in a callback ends the run; the error names the callback.

    On GPUs and TPUs, copies from a device to the host between two steps are refused unless they are explicit: in
    `after_dispatch` and `after_step`, read arrays with `jax.device_get` (JAX does not check this on CPU). `device_get`
    waits for the devices, so don't call it at every step.

    Attributes:
      turn: position of the callback in the calling order.
    """

    turn: ClassVar[Turn] = Turn.SAYS

    def on_open(self, run: Run) -> None:
        """Called first, before the state is restored or initialized and before the step is compiled."""

    def on_start(self, run: Run) -> None:
        """Called when `run.state` has been restored or initialized."""

    def after_dispatch(self, run: Run, step: int) -> None:
        """Called when a step has been dispatched. The devices are still computing it: don't wait for them."""

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Called when a step's scalars have arrived, usually while the devices work on a later step.

        Args:
          run: the run.
          step: the step, counted from 1.
          scalars: the step's scalars on the host, by name: 'loss', the task's metrics, the layers' summaries.
        """

    def before_save(self, run: Run, step: int) -> None:
        """Called before the state of `step` is saved."""

    def after_save(self, run: Run, step: int) -> None:
        """Called when the checkpoint of `step` is complete on disk, between two later steps or at the end of the run."""

    def after_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation during training.

        Args:
          run: the run.
          step: the step that was evaluated.
          metrics: {'DATASET/metric': mean over the dataset}.
        """

    def after_decode(self, run: Run, step: int, dataset: str, samples: Sequence[Mapping[str, object]]) -> None:
        """Called on process 0 after a decode during training, once for each dataset.

        Args:
          run: the run.
          step: the step that was decoded.
          dataset: the dataset's name.
          samples: the first 32 records at most, as in `decode_out/DATASET/step_N.jsonl`.
        """

    def asks_for_pause(self, run: Run, step: int) -> bool:
        """Returns True if training should pause after `step`. With several processes, all must return the same."""
        del run, step
        return False

    def on_pause(self, run: Run, step: int) -> None:
        """Called in each pause, after the step's save, evaluation and decode. Do long work here.

        Training pauses when a save, evaluation or decode is due, or when a callback requests a pause. The devices have finished
        `step`, and the duration of the pause is not counted when steps per second are computed.
        """

    def after_pause(self, run: Run, step: int) -> None:
        """Called before training starts, and before it continues after a pause or a change of devices or batch shape."""

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Called when an exception ends the run, including a second Ctrl-C. `on_end` is not called then."""

    def on_end(self, run: Run) -> None:
        """Called last, after training was completed or ended by a signal, when all checkpoints are on disk."""


class StepWatch:
    """Methods that the training loop calls within each step. They do nothing here; subclasses override them.

    A callback may set `run.step_watch` to an instance of a subclass in `on_open`. The loop calls `begin`, `took_input`,
    `dispatching`, `dispatched` and `waits` in this order for each step, and reports scalars through the function that `reports`
    returns. Times are in seconds, by `time.monotonic`.
    """

    def begin(self, began: float, for_others: float) -> None:
        """Called when the previous step has ended and the loop requests the next batch.

        Args:
          began: the time of this call, in seconds.
          for_others: total seconds since the run began in which this process's input waited for other processes' inputs.
        """

    def took_input(self, now: float, for_others: float) -> None:
        """Called when the batch has arrived, at the time `now`. `for_others`: the seconds described in `begin`, up to `now`."""

    def around(self, fn: StepFn, run: Run) -> StepFn:
        """Wraps the step function: returns the function that the loop calls instead of `fn`, to take step `run.step + 1`."""
        return fn

    def dispatching(self) -> None:
        """Called before the loop dispatches a step."""

    def dispatched(self, step: int, packed: Packed) -> None:
        """Called after the loop has dispatched `step`. `packed` has the step's scalars; the next step doesn't donate it."""

    def waits(self) -> None:
        """Called before the loop waits for the scalars of an older step."""

    def reports(self, report: Callable[[int, Scalars], object]) -> Callable[[int, Scalars], object]:
        """Wraps `report`: returns the function that the loop calls with a step and its scalars once they have arrived."""
        return report

    def end(self) -> None:
        """Called when a step has ended, e.g. before a pause. The time from this call to the next `begin` belongs to no step."""


class RunTimes:
    """Adds up the seconds that a process spends in each part of a run (`PARTS`). Exactly one part is active at any time.

    `begin` costs one clock reading and one addition, cheap enough to call at every step.

    Attributes:
      current: (active part, when it began). A single attribute, so that other threads see a consistent pair.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Makes 'start' the active part. `clock` returns the time in seconds."""
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.current = ("start", clock())

    def begin(self, part: str) -> float:
        """Ends the active part and begins `part`, one of `PARTS`. Returns the current time, at which the new part begins.

        Raises:
          KeyError: the part is unknown.
        """
        now = self._clock()
        before, since = self.current
        self._seconds[before] += now - since
        self._seconds[part] += 0.0
        self.current = (part, now)
        return now

    def seconds(self) -> dict[str, float]:
        """Returns {part: seconds so far}, the active part included. Thread-safe."""
        seconds, (part, since) = dict(self._seconds), self.current
        seconds[part] += self._clock() - since
        return seconds

"""`--mode=sweep`: runs the trials of a sweep one after the other, each in a separate process.

A trial that runs out of memory therefore doesn't stop the sweep. If a sweep is killed, the same command resumes it: trials that
have ended don't run again, and the trial that was running resumes from its newest checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence

from absl import logging

from spmd_trainer.errors import UserError, terminal
from spmd_trainer.experiment_modules import short_name
from spmd_trainer.settings import arguments
from spmd_trainer.sharding.messages import count_text, format_duration
from spmd_trainer.storage import access
from spmd_trainer.storage.lock import LockedError, locked
from spmd_trainer.sweeps import page, trials
from spmd_trainer.sweeps.callback import PARENT
from spmd_trainer.sweeps.settings import SweepConfig
from spmd_trainer.sweeps.trials import Sweep, Trial
from spmd_trainer.training.run_config import RunConfig

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_BEFORE_HANDING_ON = 2.0
# Number of last lines of a failed trial's output that are searched for the reason of the failure.
_LAST_LINES = 12
# The sweep stops if this number of trials at its beginning are all broken for the same reason.
_SAME_FAILURES = 3


def prepare(config: RunConfig) -> tuple[SweepConfig, Sweep]:
    """Checks the settings and opens the sweep's directory. Returns the argument for `run`.

    Does not initialize JAX's devices, because the processes of the trials use them.

    Raises:
      UserError: see `SweepConfig.resolved`; or the directory holds a different sweep or other files.
    """
    asked = config.of(SweepConfig)
    if asked.callbacks:
        raise UserError(
            "callbacks=[...] can't reach the processes of trials; add configs of them to task.train.callbacks"
        )
    if asked.experiment.name.startswith("__main__."):
        raise UserError(
            f"{asked.experiment.label} is defined in a notebook or a script, where the processes of trials can't import it; move "
            "it into a module"
        )
    sweep = asked.made
    access.check_writable("--job_log_dir", sweep.directory)
    sweep.open()
    return asked, sweep


def run(prepared: tuple[SweepConfig, Sweep]) -> list[Trial]:
    """Runs the trials that have not ended, writes the sweep's page after each, and prints the results.

    Returns all trials that have ended, including those that ended before the sweep was resumed.

    Raises:
      UserError: all trials are broken, or the first three are broken for the same reason.
      KeyboardInterrupt: after Ctrl-C, once the running trial has saved its state.
    """
    config, sweep = prepared
    with locked(sweep.directory), _Signals() as signals:
        known = {trial.number: trial for trial in sweep.trials()}
        left = [n for n in range(sweep.method.num_trials) if n not in known or not known[n].has_ended]
        if ended := sweep.method.num_trials - len(left):
            said = count_text(ended, "trial", "trials")
            logging.info("%s of %d %s ended before", said, sweep.method.num_trials, "has" if ended == 1 else "have")
        spent: list[float] = []
        for done, number in enumerate(left, start=1):
            began = time.monotonic()
            trial = _run_trial(config, sweep, number, signals)
            if not trial.has_ended:
                logging.info("stopped in trial %d; the same command goes on with it", number)
                break
            spent.append(time.monotonic() - began)
            _report(sweep, trial, sum(spent) / len(spent) * (len(left) - done))
            page.write(config, sweep)
            _stop_if_all_break(sweep, left[:done])
            if signals.asked:
                break
    if signals.asked == signal.SIGINT:
        raise KeyboardInterrupt
    ended_trials = [trial for trial in sweep.trials() if trial.has_ended]
    if len(ended_trials) == sweep.method.num_trials:
        _summarise(config, sweep, ended_trials)
    return ended_trials


def command(config: SweepConfig, sweep: Sweep, number: int) -> list[str]:
    return [
        f"--exp={short_name(sweep.experiment)}",
        "--mode=sweep",
        f"--job_log_dir={sweep.directory}",
        *arguments(SweepConfig, config.given()),
        *(f"--fdl.set={override}" for override in config.experiment.overrides),
        f"--trial={number}",
    ]


def _run_trial(config: SweepConfig, sweep: Sweep, number: int, signals: _Signals) -> Trial:
    _wait_for_earlier_start(sweep, number)
    trial = sweep.begin(number)
    if trial.has_ended:
        return trial  # completed by a process that an earlier sweep process started
    values = ", ".join(f"{path}={value!r}" for path, value in trial.values.items())
    logging.info("trial %d, of 0 to %d: %s", number, sweep.method.num_trials - 1, values)
    environment = {**os.environ, PARENT: str(os.getpid())}
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    # In a separate session, so that the trial's process gets Ctrl-C only once, forwarded by this process.
    with (
        subprocess.Popen(
            [sys.executable, "-m", "spmd_trainer.main", *command(config, sweep, number)],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process,
        signals.sent_to(process),
    ):
        for line in process.stderr or ():
            last.append(line.rstrip())
            signals.saw(line)
            terminal.write(f"  {line}", sys.stderr)
    trial = sweep.begin(number)
    # Exit status 0 but an unfinished trial: someone has sent a signal to its process, which has saved a checkpoint.
    if trial.has_ended or signals.asked or not process.returncode:
        return trial
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        reason = f"its process was killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
    else:
        text = " ".join(line for line in last if line and not line.lstrip().startswith("The traceback is in "))
        said = text.rpartition("spmd-trainer: ")[2]
        reason = f"{said[-500:]} (exit status {process.returncode})"
    trial = dataclasses.replace(trial, status=trials.BROKEN, reason=reason)
    sweep.write(trial)
    return trial


def _wait_for_earlier_start(sweep: Sweep, number: int) -> None:
    """Waits until no other process runs this trial. (The trial of a killed sweep may still be saving a checkpoint.)"""
    said = False
    while True:
        with contextlib.suppress(LockedError), locked(sweep.trial_directory(number)):
            return
        if not said:
            logging.info("waiting for the process of trial %d of an earlier start to end", number)
            said = True
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _report(sweep: Sweep, trial: Trial, seconds_left: float) -> None:
    best = sweep.best(sweep.trials())
    shown = "" if best is None else f"; the best so far is trial {best.number}, {best.value:.6g}"
    left = f"; about {format_duration(seconds_left)} left" if seconds_left else ""
    logging.info("%s%s%s", _outcome(sweep, trial), shown, left)


def _stop_if_all_break(sweep: Sweep, done: Sequence[int]) -> None:
    """Raises UserError if this process has run three trials (`done`), and all are broken for the same reason."""
    found = [trial for number in done if (trial := sweep.trial(number)) is not None and trial.status == trials.BROKEN]
    if len(done) == len(found) == _SAME_FAILURES and len({trial.reason for trial in found}) == 1:
        files = ", ".join(str(sweep.trial_file(number)) for number in done)
        raise UserError(
            f"the first {_SAME_FAILURES} trials are broken: {found[0].reason}\n"
            f"To run them again, delete {files} and give the same command"
        )


def _outcome(sweep: Sweep, trial: Trial) -> str:
    value = "" if trial.value is None else f", {sweep.metric.name} {trial.value:.6g} at step {trial.step}"
    reason = f": {trial.reason}" if trial.reason else ""
    return f"trial {trial.number} is {trial.status}{value}{reason}"


def _summarise(config: SweepConfig, sweep: Sweep, ended: Sequence[Trial]) -> None:
    """Prints the trials from best to worst, and a command that repeats the best one. Raises UserError if all are broken."""
    broken = [trial for trial in ended if trial.status == trials.BROKEN]
    if ended and len(broken) == len(ended):
        raise UserError(
            f"all {len(ended)} trials are broken, e.g. trial {broken[0].number}: {broken[0].reason}\nTo run it again, delete "
            f"{sweep.trial_file(broken[0].number)} and give the same command"
        )
    lines = []
    for trial in page.in_order(sweep, ended):
        values = ", ".join(f"{path.rpartition('.')[2]}={value!r}" for path, value in trial.values.items())
        lines.append(f"{_outcome(sweep, trial)} ({values})")
    own = "" if (best := sweep.best(ended)) is None else page.own_command(config, sweep, best)
    lines += ["the best one as a run of its own:", f"  {own}"] if own else []
    lines += [f"the page: {sweep.directory / page.FILE}"]
    terminal.write("".join(f"{line}\n" for line in lines))


class _Signals:
    """Forwards Ctrl-C, SIGTERM and SIGHUP to the running trial's process, which then saves a checkpoint and exits.

    A cluster's scheduler may send SIGTERM to the trial's process directly, and a second SIGTERM would end that process at once.
    So SIGTERM is forwarded after a delay, and only if the trial's process hasn't printed that it has received a signal.

    Attributes:
      asked: number of the first signal that this process received; None if it has received none.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_leaving = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    @contextlib.contextmanager
    def sent_to(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Context manager that forwards signals to `process`. A signal that was received before is forwarded, too."""
        self._process, self._is_leaving = process, False
        try:
            if self.asked is not None:
                process.send_signal(self.asked)
            yield
        finally:
            self._process = None

    def saw(self, line: str) -> None:
        """Notes whether `line`, printed by the trial's process, says that the process has received a signal."""
        self._is_leaving |= line.lstrip().startswith(("SIGINT:", "SIGTERM:", "SIGHUP:"))

    def _take(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        is_first, self.asked = self.asked is None, self.asked or number
        if number == signal.SIGINT or not is_first:
            self._hand_on(number)
        else:
            threading.Timer(_SECONDS_BEFORE_HANDING_ON, self._hand_on, [number, True]).start()

    def _hand_on(self, number: int, unless_leaving: bool = False) -> None:
        if self._process is not None and not (unless_leaving and self._is_leaving):
            self._process.send_signal(number)

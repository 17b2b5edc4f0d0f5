"""Compares a step of the training loop that is watched with one that isn't: wall and CPU time.

    python -m benchmarks.run_checks [--rounds 20] [--steps 25] [--json FILE]

Watched: the process beats, its parts of a step are measured with the watch of the devices that jobs of several processes have,
loss spikes are looked for, and the batches in flight are kept for a replay. Both are turns of one training run of
`speed_lm.SpeedLm`. Bar: 1.01 times the step without.

Then one comparison of all copies of the state (`--check_replicas_every`) is timed, as a share of 100 steps. Bar: 0.1%.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from unittest import mock

import jax
from jax.sharding import NamedSharding

from benchmarks import reporting, steady_step
from spmd_trainer.callbacks import Callback
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step.packing import Scalars
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import train
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.job import Job
from spmd_trainer.watch import run as watch_run
from spmd_trainer.watch.board import Board
from spmd_trainer.watch.device_watch import DeviceWatch
from spmd_trainer.watch.invalid_batches import InvalidBatches
from spmd_trainer.watch.loss_spikes import LossSpikes
from spmd_trainer.watch.replica_check import differences
from spmd_trainer.watch.step_parts import StepParts
from spmd_trainer.watch.watchdog import Watchdog

BAR = 1.01
BAR_COMPARISON = 0.001
COMPARED_EVERY = 100
CHECKS = (Watchdog, InvalidBatches, LossSpikes)
HOOKS = ("after_dispatch", "after_step")


class Turns:
    """Switches the checks of a run on and off in turns.

    Attributes:
      is_on: whether they are on now.
      times: of both kinds of turns.
    """

    def __init__(self, rounds: int, steps: int, warm_up: int):
        self.is_on = True
        self.times = {True: steady_step.Turns(), False: steady_step.Turns()}
        self._order = [on for _ in range(rounds) for on in random.sample((True, False), 2)]
        self._steps, self._warm_up, self._taken = steps, warm_up, 0
        self._began = steady_step.now()
        self._switched: list[Callable[[], None]] = []

    def on_switch(self, switch: Callable[[], None]) -> None:
        """Calls `switch` now and at the beginning of each turn."""
        self._switched.append(switch)
        switch()

    def after_dispatch(self, packed: object) -> None:
        """Counts a step, and ends a turn where it is time to: the devices are idle then."""
        self._taken += 1
        turn, within = divmod(self._taken - self._warm_up, self._steps)
        if turn < 0 or within:
            return
        jax.block_until_ready(packed)
        if turn:
            self.times[self._order[turn - 1]].add(self._began, self._steps)
        if turn < len(self._order):
            self.is_on = self._order[turn]
            for switch in self._switched:
                switch()
        self._began = steady_step.now()


def nothing(*args: object) -> None:
    """Measures nothing."""
    del args


class PartsInTurns(StepParts):
    """The `StepParts` of a run, which measure in turns."""

    def __init__(self, job: Job, turns: Turns):
        super().__init__(watch=DeviceWatch.of(job.partitioner.mesh.local_devices))
        self._turns = turns
        turns.on_switch(self._switch)

    def _switch(self) -> None:
        """Lends the methods that measure, or a function that doesn't, so that the loop calls them directly."""
        for name in ("begin", "took_input", "dispatching", "waits", "end"):
            setattr(self, name, getattr(super(), name) if self._turns.is_on else nothing)

    def reports(self, report: Callable[[int, Scalars], object]) -> Callable[[int, Scalars], None]:
        """Returns `report` with and without a clock, in turns."""
        on = super().reports(report)

        def in_turns(step: int, scalars: Scalars) -> None:
            (on if self._turns.is_on else report)(step, scalars)

        return in_turns

    def dispatched(self, step: int, packed: object) -> None:
        """Notes a step."""
        if self._turns.is_on:
            super().dispatched(step, packed)
        self._turns.after_dispatch(packed)


class CallbacksInTurns(CallbackList):
    """Calls the checks in their turns only."""

    def __init__(self, callbacks: Sequence[Callback], turns: Turns):
        super().__init__(callbacks)
        self._all = {hook: self._overriding[hook] for hook in HOOKS}
        self._turns = turns
        turns.on_switch(self._switch)

    def _switch(self) -> None:
        for hook, callbacks in self._all.items():
            others = [callback for callback in callbacks if not isinstance(callback, CHECKS)]
            self._overriding[hook] = callbacks if self._turns.is_on else others


def comparison_seconds(state: TrainState) -> float:
    """Returns the time of one comparison of all copies of a state, its program compiled."""
    leaves = {path: x for path, x in named_leaves(state) if isinstance(x.sharding, NamedSharding)}
    differences(leaves)
    began = time.perf_counter()
    differences(leaves)
    return time.perf_counter() - began


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=20)
    parser.add_argument("--steps", type=int, default=25, help="steps per turn")
    args = parser.parse_args()
    report = reporting.Report("run_checks", args.json)
    turns = Turns(args.rounds, args.steps, steady_step.WARM_UP)

    def when_on(method: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: method(*arguments) if turns.is_on else None

    with tempfile.TemporaryDirectory() as directory:
        job = steady_step.make_job(directory, steady_step.WARM_UP + 2 * args.rounds * args.steps + 1)
        with (
            mock.patch.object(watch_run, "StepParts", return_value=PartsInTurns(job, turns)),
            mock.patch.object(train, "CallbackList", lambda callbacks: CallbacksInTurns(callbacks, turns)),
            mock.patch.object(Board, "turn", when_on(Board.turn)),
            mock.patch.object(Watchdog, "_turn", when_on(Watchdog._turn)),
        ):
            state = train.train(job).state
    on, off = turns.times[True], turns.times[False]
    report.figure("step, watched", on.wall, "ms", scale=1e3)
    report.figure("step, not watched", off.wall, "ms", scale=1e3)
    report.ratio("step, watched / not", on.wall, off.wall, bar=BAR)
    report.ratio("CPU time of a step, watched / not", on.cpu, off.cpu, bar=BAR)
    took = [comparison_seconds(state) for _ in range(5)]
    report.figure("comparison of all copies of the state", took, "ms", scale=1e3)
    share = [seconds / (COMPARED_EVERY * statistics.median(off.wall)) for seconds in took]
    report.figure(f"the same, of {COMPARED_EVERY} steps (bar {BAR_COMPARISON:.1%})", share, "%", scale=100)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

"""What checkpoints cost a model of 100M parameters: the time that a save blocks training, and the time of a restore.

    python -m benchmarks.checkpoint [--rounds 5] [--restore_rounds 15] [--layers 8] [--json=FILE]

The model is `lm.stdlib.StdlibBytes`' with width 1024, on its mesh of 8 devices; its state, parameters and Adam's moments in
float32, is 1.2 GB. All in one process, in rounds, what is compared in random order within a round. Measured are

- a training step alone; how long `Checkpointer.save` keeps the loop from dispatching the next step, with the check for NaN
  and infinity and the resolved config, and of that the check alone; how long Orbax' own asynchronous save of a copy of
  these arrays does; the step beside the writing, which shares the processor with it where devices are host devices; and
  when the checkpoint is whole on disk.
- `Checkpointer.restore` of such files, checksums and record included, and Orbax' own restore of the same files onto the
  same shardings. The files are in the page cache for both.

The blocking time is a share of a step: whatever slows the machine slows both, and so it says something on a busy one too;
so does the processor's time for a restore.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from benchmarks import reporting
from spmd_trainer import experiment_registry
from spmd_trainer.checkpointing import Checkpointer, records, state_checks
from spmd_trainer.cli.launch import let_host_devices_stand_in
from spmd_trainer.experiments.lm.stdlib import StdlibBytes
from spmd_trainer.programs import train
from spmd_trainer.programs.job import Job, JobSettings
from spmd_trainer.sharding.variables import named_shardings

# Bars of the project: a save blocks for less than this share of a step; a restore has 0.8 of Orbax' speed or more.
BAR_BLOCKED, BAR_RESTORE = 0.05, 1 / 0.8


@experiment_registry.register
class StdlibBytes100M(StdlibBytes):
    """101M parameters."""

    NUM_LAYERS = 8
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16


class Training:
    """A run of the model, one step at a time.

    Attributes:
      job: its job.
      state: the state after the last step, computed.
    """

    def __init__(self, directory: epath.Path, layers: int):
        """Compiles the step and initialises the state."""
        StdlibBytes100M.NUM_LAYERS = layers
        let_host_devices_stand_in(StdlibBytes100M().task(), None)
        self.job = Job.from_settings(JobSettings(exp="StdlibBytes100M", job_log_dir=directory))
        self._compiled = train.compile_train_step(self.job)
        partitioner = self.job.partitioner
        shapes = partitioner.pad_inputs_shape_dtype(self.job.process_inputs_shape_dtype)
        batch = self.job.build_train_input().get_next_padded()
        self._batch = partitioner.preprocess_inputs(batch, partitioner.inputs_partition_spec(shapes))
        self._key = self.job.prng_key
        self.state = partitioner.initialize_train_state(self._key)

    @property
    def variables(self) -> Any:
        """The state's VariableSpecs."""
        return self.job.partitioner.metadata.variables

    def arrays(self) -> dict[str, jax.Array]:
        """The state's arrays by path."""
        arrays = state_checks.arrays_by_path(self.state, self.variables, records.by_path(self.variables))
        return {path: array for path, array in arrays.items() if array.size}

    def step(self) -> float:
        """Takes a step, and returns its seconds."""

        def take() -> None:
            self.state, _ = self._compiled.fn(self.state, self._key, self._batch)
            jax.block_until_ready(self.state)

        return seconds(take)

    def save(self, checkpoints: Checkpointer, number: int) -> None:
        """Starts to save the state as the training loop does."""
        checkpoints.save(
            number,
            self.state,
            self.variables,
            input_state={"state": None},
            metadata={"experiment": self.job.resolved.name, "config": self.job.config_lines()},
            force=True,
            check_finite=True,
        )


def seconds(call: Callable[[], object]) -> float:
    """Calls, and returns how long it took."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_saves(training: Training, directory: epath.Path, rounds: int) -> dict[str, list[float]]:
    """Times of saves and of the steps around them; the first round warms up."""
    times: dict[str, list[float]] = {}
    # Arrays that were copied to the host once are not copied again: what Orbax saves must be as new as what we save.
    copied = jax.jit(lambda state: jax.tree.map(jax.numpy.copy, state))
    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    with Checkpointer(directory / "checkpoints", save_max_to_keep=1, save_keep_interval_duration=None) as checkpoints:
        for number in range(rounds + 1):
            row = {"step alone": training.step()}

            def ours(row: dict[str, float] = row, number: int = number) -> None:
                started = time.perf_counter()
                training.save(checkpoints, number)
                row["save blocks"] = time.perf_counter() - started
                row["step beside the writing"] = training.step()
                checkpoints.wait_until_finished()
                row["whole on disk after"] = time.perf_counter() - started

            def raw(row: dict[str, float] = row) -> None:
                arrays = jax.block_until_ready(copied(training.arrays()))
                row["of it, check for NaN and infinity"] = seconds(
                    lambda: state_checks.refuse_non_finite(0, arrays, arrays, check=True)
                )
                args = ocp.args.PyTreeSave(arrays)
                row["Orbax' save blocks"] = seconds(lambda: orbax.save(directory / "raw", args=args, force=True))
                orbax.wait_until_finished()

            for measure in random.sample((ours, raw), 2):
                measure()
            _add(times, row, warm=number > 0)
    orbax.close()
    return times


def measure_restores(training: Training, directory: epath.Path, rounds: int) -> dict[str, list[float]]:
    """Times of restores of a checkpoint, and the processor's time for them; the first round warms up."""
    partitioner = training.job.partitioner
    shardings = named_shardings(records.by_path(training.variables), partitioner.mesh)
    args = {path: ocp.ArrayRestoreArgs(sharding=shardings[path]) for path in training.arrays()}
    times: dict[str, list[float]] = {}
    with Checkpointer(directory / "to_restore") as checkpoints:
        training.save(checkpoints, 0)
        checkpoints.wait_until_finished()

        def ours() -> None:
            jax.block_until_ready(checkpoints.restore(training.variables, partitioner.mesh).state)

        def raw() -> None:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                files = directory / "to_restore" / "0" / "state"
                jax.block_until_ready(orbax.restore(files, args=ocp.args.PyTreeRestore(restore_args=args)))

        kinds = {"restore, ours": ours, "restore, Orbax": raw}
        for number in range(rounds + 1):
            row = {}
            for kind in random.sample(list(kinds), len(kinds)):
                began = time.process_time()
                row[kind] = seconds(kinds[kind])
                row[f"{kind}, processor"] = time.process_time() - began
            _add(times, row, warm=number > 0)
    return times


def _add(times: dict[str, list[float]], row: dict[str, float], *, warm: bool) -> None:
    """Adds a round's times, and tells whoever waits."""
    sys.stderr.write("  ".join(f"{name} {value:.3f}" for name, value in sorted(row.items())) + "\n")
    for name, value in row.items():
        times.setdefault(name, []).extend([value] if warm else [])


def main() -> int:
    """Measures and prints."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--restore_rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=StdlibBytes100M.NUM_LAYERS, help="8 are 101M parameters")
    options = parser.parse_args()
    report = reporting.Report("checkpoint", options.json)
    with tempfile.TemporaryDirectory() as name:
        directory = epath.Path(name)
        training = Training(directory, options.layers)
        report.figure("parameters", training.job.partitioner.metadata.num_params())
        report.figure("state", sum(array.nbytes for array in training.arrays().values()), "MiB", scale=2**-20)
        restores = measure_restores(training, directory, options.restore_rounds)
        saves = measure_saves(training, directory, options.rounds)
    for title, values in (restores | saves).items():
        report.figure(title, values, "s")
    step = saves["step alone"]
    report.ratio("save blocks / step", saves["save blocks"], step, bar=BAR_BLOCKED)
    report.ratio("Orbax' save blocks / step", saves["Orbax' save blocks"], step)
    report.ratio("step beside the writing / step alone", saves["step beside the writing"], step)
    for what, bar in (("", BAR_RESTORE), (", processor", None)):
        ours, floor = restores[f"restore, ours{what}"], restores[f"restore, Orbax{what}"]
        report.ratio(f"time of a restore{what} / Orbax'", ours, floor, bar=bar)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

"""Cost of checkpoints of a model with 100M parameters: how long a save blocks training, and how long a restore takes.

    python -m benchmarks.checkpoint [--rounds 5] [--restore_rounds 15] [--layers 8] [--json=FILE]

The model is that of `lm.stdlib.StdlibBytes` with width 1024, on its mesh of 8 devices. The state (parameters and Adam's moments,
float32) is 1.2 GB. One process measures in rounds, with the alternatives in random order within a round:

- Saves: the time of a training step alone; the time that `Checkpointer.save` blocks the loop, including the check for NaN and
  infinity and the resolved config; the time of this check alone; the time that Orbax's own asynchronous save of a copy of these
  arrays blocks; the time of a step during the write (host devices share the CPU with it); and the time until the checkpoint
  is complete on disk.
- Restores: `Checkpointer.restore`, including checksums and record, and Orbax's own restore of the same files onto the same
  shardings. The files are in the page cache for both.

The blocking time is reported as a fraction of a step, and a restore also in CPU time: both are meaningful on a busy machine.
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
from spmd_trainer.checkpointing import Checkpointer, records, saving
from spmd_trainer.experiments.lm.stdlib import StdlibBytes
from spmd_trainer.sharding.variables import named_shardings
from spmd_trainer.training import start_up
from spmd_trainer.training.experiment_config import let_host_devices_stand_in
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

# The project's bars: a save blocks for less than this fraction of a step; a restore has at least 0.8 of Orbax's speed.
BAR_BLOCKED, BAR_RESTORE = 0.05, 1 / 0.8


@experiment_registry.register
class StdlibBytes100M(StdlibBytes):
    """101M parameters."""

    NUM_LAYERS = 8
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16


class Training:
    """A training run of the model, one step at a time.

    Attributes:
      job: the training job.
      state: the state after the last step, fully computed.
    """

    def __init__(self, directory: epath.Path, layers: int):
        """Compiles the step and initialises the state."""
        StdlibBytes100M.NUM_LAYERS = layers
        let_host_devices_stand_in(StdlibBytes100M().task(), None)
        self.job = Job.build(make_run_config("StdlibBytes100M", directory))
        self._compiled = start_up.compile_train_step(self.job)
        partitioner = self.job.partitioner
        batch = self.job.build_train_input().get_next_padded()
        self._batch = partitioner.layout.put(batch)
        self._key = self.job.prng_key
        self.state = partitioner.initialize_train_state(self._key)

    @property
    def variables(self) -> Any:
        """The state's VariableSpecs."""
        return self.job.partitioner.metadata.variables

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the state's arrays by path."""
        arrays = saving.arrays_by_path(self.state, self.variables, records.by_path(self.variables))
        return {path: array for path, array in arrays.items() if array.size}

    def step(self) -> float:
        """Takes a step and returns its seconds."""

        def take() -> None:
            self.state, _ = self._compiled.fn(self.state, self._key, self._batch)
            jax.block_until_ready(self.state)

        return seconds(take)

    def save(self, checkpoints: Checkpointer, number: int) -> None:
        """Starts saving the state as the training loop does."""
        checkpoints.save(
            number,
            self.state,
            self.variables,
            input_state={"state": None},
            metadata={"experiment": self.job.config.experiment.name, "config": self.job.config.experiment.lines()},
            force=True,
            check_finite=True,
        )


def seconds(call: Callable[[], object]) -> float:
    """Runs `call` and returns its seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_saves(training: Training, directory: epath.Path, rounds: int) -> dict[str, list[float]]:
    """Returns the times of saves and of the steps around them, after a warm-up round."""
    times: dict[str, list[float]] = {}
    # JAX caches an array's host copy: give Orbax fresh arrays, so that it has to copy them as our save does.
    copied = jax.jit(lambda state: jax.tree.map(jax.numpy.copy, state))
    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    with Checkpointer(directory / "checkpoints", save_max_to_keep=1, save_keep_interval_duration=None) as checkpoints:
        for number in range(rounds + 1):
            row = {"step alone": training.step()}

            def ours(row: dict[str, float] = row, number: int = number) -> None:
                started = time.perf_counter()
                training.save(checkpoints, number)
                row["save blocks"] = time.perf_counter() - started
                row["step during the write"] = training.step()
                checkpoints.wait_until_finished()
                row["complete on disk after"] = time.perf_counter() - started

            def raw(row: dict[str, float] = row) -> None:
                arrays = jax.block_until_ready(copied(training.arrays()))
                row["check for NaN and infinity"] = seconds(
                    lambda: saving.refuse_non_finite(0, arrays, arrays, check=True)
                )
                args = ocp.args.PyTreeSave(arrays)
                row["Orbax save blocks"] = seconds(lambda: orbax.save(directory / "raw", args=args, force=True))
                orbax.wait_until_finished()

            for measure in random.sample((ours, raw), 2):
                measure()
            _add(times, row, warm=number > 0)
    orbax.close()
    return times


def measure_restores(training: Training, directory: epath.Path, rounds: int) -> dict[str, list[float]]:
    """Returns the wall and CPU times of restores of a checkpoint, after a warm-up round."""
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
                row[f"{kind}, CPU"] = time.process_time() - began
            _add(times, row, warm=number > 0)
    return times


def _add(times: dict[str, list[float]], row: dict[str, float], *, warm: bool) -> None:
    """Logs a round's times to stderr, and records them if `warm`."""
    sys.stderr.write("  ".join(f"{name} {value:.3f}" for name, value in sorted(row.items())) + "\n")
    for name, value in row.items():
        times.setdefault(name, []).extend([value] if warm else [])


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--restore_rounds", type=int, default=15, help="measured restores of each kind")
    parser.add_argument(
        "--layers", type=int, default=StdlibBytes100M.NUM_LAYERS, help="number of layers; 8 layers are 101M parameters"
    )
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
    report.ratio("Orbax save blocks / step", saves["Orbax save blocks"], step)
    report.ratio("step during the write / step alone", saves["step during the write"], step)
    for clock, bar in (("", BAR_RESTORE), (", CPU", None)):
        ours, orbax = restores[f"restore, ours{clock}"], restores[f"restore, Orbax{clock}"]
        report.ratio(f"time of a restore{clock}, ours / Orbax", ours, orbax, bar=bar)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

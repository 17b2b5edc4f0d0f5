"""The callback that reports a run to trackers: Weights & Biases, MLflow, trackio, TensorBoard."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.callbacks import Callback, Run, Status, Turn
from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import installed_version
from spmd_trainer.experiment_modules import short_name
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.storage.run_files import PAGE
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.watch.tracking import base
from spmd_trainer.watch.tracking.base import Histogram, RunFacts, Tracker
from spmd_trainer.watch.tracking.feed import CLOSE_SECONDS, Feed, RunIds
from spmd_trainer.watch.tracking.settings import Settings, nested

_VERSIONS = ("spmd-trainer", "jax", "jaxlib", "praxis", "flax", "optax", "orbax-checkpoint", "numpy")
# Number of bins of a histogram.
_BINS = 64


class Tracking(Callback):
    """Reports a run's summaries, settings, decoded examples, page and status to trackers.

        task_p.train.callbacks = [Config(Tracking, trackers=["wandb", "mlflow"], project="my-project")]

    The flag `--track=wandb,mlflow` does the same with default settings. Only process 0 reports. A restarted run continues
    its history in each tracker; `tracking.json` stores the run's ids. If a tracker fails or hangs, records are lost and
    this is logged, but the run continues.
    """

    turn = Turn.SENDS

    def __init__(
        self,
        trackers: Sequence[str | Tracker] = (),
        *,
        project: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        histogram_interval_steps: int | None = None,
    ):
        """Checks the arguments.

        Args:
          trackers: names, as for `--track`, or `Tracker` objects.
          project: name of the group of runs that this run belongs to; None for the experiment's short name.
          name: the run's name; None for the name of its directory.
          tags: labels by which the run can be searched for.
          histogram_interval_steps: steps between two histograms of the variables, for trackers that show histograms;
            None for no histograms. Training pauses to compute them.

        Raises:
          UserError: a tracker is unknown, its package is not installed, or an argument is wrong.
        """
        if isinstance(trackers, str):
            raise UserError(f"Tracking: trackers={trackers!r} is one text; give a list of names, e.g. [{trackers!r}]")
        wrong = [tracker for tracker in trackers if not isinstance(tracker, str | Tracker)]
        if wrong:
            raise UserError(
                f"Tracking: trackers has {wrong[0]!r:.200}; give names or objects of classes that derive from Tracker"
            )
        self.names = tuple(tracker if isinstance(tracker, str) else type(tracker).__name__ for tracker in trackers)
        base.check([tracker for tracker in trackers if isinstance(tracker, str)], "Tracking")
        if histogram_interval_steps is not None and histogram_interval_steps < 1:
            raise UserError(f"Tracking: histogram_interval_steps={histogram_interval_steps}; give 1 or more, or None")
        self._trackers = [base.make(tracker) if isinstance(tracker, str) else tracker for tracker in trackers]
        self._project = project
        self._name = name
        self._tags = tuple(tags)
        self._interval = histogram_interval_steps
        self._feeds: list[Feed] = []
        self._histograms: tuple[Partitioner, VariableHistograms] | None = None

    def on_open(self, run: Run) -> None:
        """Raises UserError if one of the trackers can't track this run, e.g. because it has no login."""
        if not jax.process_index():
            for tracker in self._trackers:
                tracker.check(run.job_log_dir)

    def on_start(self, run: Run) -> None:
        """Opens the trackers, each on its own thread, and subscribes to the run's summaries."""
        if jax.process_index():
            return
        facts, ids = self._facts(run), RunIds(run.job_log_dir)
        self._feeds = [Feed(name, tracker) for name, tracker in zip(self.names, self._trackers, strict=True)]
        for feed in self._feeds:
            feed.start(facts, ids)
        run.summaries.listen(self._hear)

    def after_decode(self, run: Run, step: int, dataset: str, samples: Sequence[Mapping[str, object]]) -> None:
        del run
        for feed in self._feeds:
            feed.samples(step, dataset, samples)

    def asks_for_pause(self, run: Run, step: int) -> bool:
        del run
        return self._interval is not None and step % self._interval == 0

    def on_pause(self, run: Run, step: int) -> None:
        if not self.asks_for_pause(run, step):
            return
        run.begin(f"histograms at step {step}")
        if self._histograms is None or self._histograms[0] is not run.partitioner:
            self._histograms = run.partitioner, VariableHistograms(run.partitioner.metadata)
        histograms = {f"variables/{name}": made for name, made in self._histograms[1](run.state).items()}
        for feed in self._feeds:
            feed.histograms(step, histograms)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Reports that the run has failed, or that Ctrl-C has stopped it."""
        self._end(run, run.end(error))

    def on_end(self, run: Run) -> None:
        """Reports that the run is complete, or that a signal has stopped it, and waits for the trackers."""
        self._end(run, run.end())

    def _hear(self, name: str, step: int, scalars: Mapping[str, float], notes: Mapping[str, str]) -> None:
        del notes
        values = {f"{name}/{key}": value for key, value in scalars.items()}
        for feed in self._feeds:
            feed.scalars(step, values)

    def _end(self, run: Run, status: Status) -> None:
        feeds, self._feeds = self._feeds, []  # on_end may fail after this, and on_failure follows
        if not feeds:
            return
        page = run.job_log_dir / PAGE
        found = page if page.exists() else None
        for feed in feeds:
            feed.end(status, found)
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in feeds:
            feed.join(deadline - time.monotonic())

    def _facts(self, run: Run) -> RunFacts:
        about = _about(run)
        settings = nested(run.config_lines)
        settings["run"] = about
        text = [*run.config_lines, *(f"run.{name}: {value}" for name, value in about.items())]
        return RunFacts(
            name=self._name or run.job_log_dir.name,
            project=self._project or short_name(run.experiment),
            experiment=run.experiment,
            settings=settings,
            config_text="\n".join(text) + "\n",
            job_log_dir=run.job_log_dir,
            first_step=run.first_step,
            tags=self._tags,
        )


def of_run(callbacks: Sequence[Callback], track: Sequence[str]) -> list[Callback]:
    """Returns a list with one callback, for those trackers in `track` that `callbacks` don't use yet; [] if there are none.

    Args:
      callbacks: the experiment's and the caller's callbacks. Trackers that they use are not opened twice.
      track: names of the trackers given by `--track`.

    Raises:
      UserError: `callbacks` use two trackers with the same name. A run can have only one id per tracker name.
    """
    named = [name for callback in callbacks if isinstance(callback, Tracking) for name in callback.names]
    twice = [name for name in named if named.count(name) > 1]
    if twice:
        raise UserError(f"task.train.callbacks tracks with {twice[0]} twice; give each tracker once")
    more = [name for name in track if name not in named]
    return [Tracking(more)] if more else []


def _about(run: Run) -> Settings:
    """Returns the settings of a run that are not in its config, such as its mesh and versions."""
    devices = run.mesh.devices
    return {
        "job_log_dir": str(run.job_log_dir),
        "mesh": ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items()),
        "devices": devices.size,
        "device_kind": devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "global_batch_rows": run.num_rows,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _VERSIONS},
    }


class VariableHistograms:
    """Computes a histogram of each variable. Compiled once per mesh. All processes must call it together."""

    def __init__(self, metadata: Layout):
        """`metadata`: layout of the train state."""
        self._mesh = metadata.mesh

        def count(state: TrainState) -> PyTree:
            return jax.tree.map(_counts, metadata.slice(state).mdl_vars)

        self._count = jax.jit(count, out_shardings=NamedSharding(metadata.mesh, PartitionSpec()))

    def __call__(self, state: TrainState) -> dict[str, Histogram]:
        """Returns histograms of all floating-point variables by path, e.g. 'params/lm/softmax/w'. Waits for the devices.

        NaN and infinity are not counted. `state` is the train state on the mesh, with padded shapes.
        """
        with jax.set_mesh(self._mesh):
            found = jax.device_get(self._count(state))
        leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, tuple))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): _histogram(*leaf) for path, leaf in leaves if leaf
        }


def _counts(x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns a variable's minimum, maximum, and for each bin the number of values up to its upper edge; () for integers.

    One reduction per bin keeps the variable sharded. Sorting or flattening the variable would gather it.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ()
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    low = jnp.min(x, initial=jnp.inf, where=finite)
    high = jnp.max(x, initial=-jnp.inf, where=finite)
    steps = jnp.arange(1, _BINS + 1, dtype=jnp.float32) / _BINS
    edges = jnp.where(steps == 1, high, low + (high - low) * steps)
    at_most = jax.lax.map(lambda edge: jnp.sum(finite & (x <= edge), dtype=jnp.float32), edges)
    return low, high, at_most


def _histogram(low: np.ndarray, high: np.ndarray, at_most: np.ndarray) -> Histogram:
    counts = np.rint(np.diff(at_most.astype(np.float64), prepend=0.0)).astype(np.int64)
    # Without a finite value, low is infinity.
    begin, end = (float(low), float(high)) if np.isfinite(low) else (0.0, 0.0)
    if begin == end:  # bins need a width
        begin, end = begin - 0.5, end + 0.5
    return Histogram(counts, np.linspace(begin, end, _BINS + 1))

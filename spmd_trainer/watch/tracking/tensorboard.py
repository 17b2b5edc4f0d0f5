"""The tracker for TensorBoard. It adds the config and decoded examples (as texts), hyperparameters, pictures and histograms
to the trainer's summaries.

TensorBoard reads a directory's event files in alphabetical order, and never rereads a file once it has seen the next one.
In `summaries/train`, where the trainer's own event file grows, the tracker therefore writes only the config, the
hyperparameters and the status, before and after the trainer writes. TensorBoard shows these with the directory's
curves. Everything else goes into directories that the trainer doesn't write into.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.watch.tracking import samples as samples_lib
from spmd_trainer.watch.tracking.base import Histogram, RunFacts, StepScalars, Tracker
from spmd_trainer.watch.tracking.settings import flat

if TYPE_CHECKING:
    from spmd_trainer.training.event_files import EventFile


class TensorboardTracker(Tracker):
    """Writes event files below `JOB_LOG_DIR/summaries`."""

    # `scalars` does nothing, so few calls suffice.
    batch = 1000

    def open(self, facts: RunFacts) -> str:
        from spmd_trainer.training import event_files

        self._summaries = event_files
        self._root = facts.job_log_dir / "summaries"
        self._files: dict[str, EventFile] = {}
        self.where = f"tensorboard --logdir={self._root}"
        self._first_step = facts.first_step
        train = self._new_file("train")
        train.add(facts.first_step, event_files.text("config", textwrap.indent(facts.config_text, "    ")))
        hparams = {"experiment": facts.experiment, **flat(facts.settings)}
        train.add(0, event_files.hparams(hparams, trial=str(facts.job_log_dir), began=time.time()))
        train.flush()
        return facts.name

    def scalars(self, records: Sequence[StepScalars]) -> None:
        """No-op: the trainer writes scalars itself."""

    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        file = self._file(f"decode_{dataset}")
        file.add(step, self._summaries.text("samples", samples_lib.markdown(rows, dataset, step)))
        for name, array in samples_lib.pictures(rows):
            file.add(step, self._summaries.image(f"samples/{name}", samples_lib.png(array), array.shape[:2]))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        file = self._file("train_tracked")
        for name, histogram in histograms.items():
            file.add(step, self._summaries.histogram(name, histogram.counts, histogram.edges))

    def page(self, path: epath.Path) -> None:
        """No-op: the page is already in the run's directory, where the summaries are."""

    def close(self, status: Status) -> None:
        end = self._new_file("train")
        end.add(0, self._summaries.hparams_end(status))
        for file in (end, *self._files.values()):
            file.flush()

    def _file(self, name: str) -> EventFile:
        """Returns the event file in a directory that only the tracker writes into. Its values replace those of repeated steps."""
        if name not in self._files:
            self._files[name] = self._new_file(name, replaces_from=self._first_step + 1)
        return self._files[name]

    def _new_file(self, name: str, *, replaces_from: int | None = None) -> EventFile:
        from spmd_trainer.training.event_files import EventFile

        return EventFile(self._root / name, replaces_from=replaces_from)

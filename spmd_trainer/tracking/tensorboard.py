"""TensorBoard: what the trainer's summaries, which are always written, don't have.

Into the directories of the summaries go the config and decoded examples as texts, hyperparameters, pictures and histograms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer.tracking import samples as samples_lib
from spmd_trainer.tracking.base import Histogram, RunFacts, Status, StepScalars, Tracker
from spmd_trainer.tracking.settings import flat

if TYPE_CHECKING:
    from spmd_trainer.metrics.event_files import EventFile


class TensorboardTracker(Tracker):
    """Writes event files below `JOB_LOG_DIR/summaries`."""

    # Scalars are there already.
    batch = 1000

    def open(self, facts: RunFacts) -> str:
        """Writes the config and the hyperparameters."""
        from spmd_trainer.metrics import event_summaries

        self._summaries = event_summaries
        self._root = facts.job_log_dir / "summaries"
        self._files: dict[str, EventFile] = {}
        self.where = f"tensorboard --logdir={self._root}"
        train = self._file("train")
        train.add(facts.first_step, event_summaries.text("config", _as_code(facts.config_text)))
        hparams = {"experiment": facts.experiment, **flat(facts.settings)}
        train.add(0, event_summaries.hparams(hparams, trial=str(facts.job_log_dir), began=time.time()))
        return facts.name

    def scalars(self, records: Sequence[StepScalars]) -> None:
        """Does nothing: the trainer writes scalars itself."""

    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Writes the text 'samples', and pictures."""
        file = self._file(f"decode_{dataset}")
        file.add(step, self._summaries.text("samples", samples_lib.markdown(rows, dataset, step)))
        for name, array in samples_lib.pictures(rows):
            file.add(step, self._summaries.image(f"samples/{name}", samples_lib.png(array), array.shape[:2]))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes histograms under their names."""
        file = self._file("train")
        for name, histogram in histograms.items():
            file.add(step, self._summaries.histogram(name, histogram.counts, histogram.edges))

    def page(self, path: epath.Path) -> None:
        """Does nothing: the page is beside the summaries."""

    def close(self, status: Status) -> None:
        """Writes how the run ended."""
        file = self._file("train")
        file.add(0, self._summaries.hparams_end(status))
        for file in self._files.values():
            file.flush()

    def _file(self, name: str) -> EventFile:
        from spmd_trainer.metrics.event_files import EventFile

        if name not in self._files:
            self._files[name] = EventFile(self._root / name)
        return self._files[name]


def _as_code(text: str) -> str:
    """Returns a text as a block of code in Markdown, so that it is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())

"""The tracker for Weights & Biases. Needs the package wandb, which the extra `wandb` installs.

WANDB_MODE=offline only writes files, below `JOB_LOG_DIR/wandb`. Even if a run was restarted, `wandb sync` uploads all of
its files into one history. wandb's own environment variables work (WANDB_ENTITY, WANDB_BASE_URL, ...).

wandb counts its own steps, and silently drops a record whose step is below that of the previous record. But a run
restarted from an older checkpoint repeats training steps, and evaluations report earlier training steps. The training
step is therefore logged as a separate value, 'trainer/step', which is the x axis of all charts.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.errors import UserError
from spmd_trainer.watch.tracking import samples as samples_lib
from spmd_trainer.watch.tracking.base import Histogram, RunFacts, StepScalars, Tracker
from spmd_trainer.watch.tracking.feed import CLOSE_SECONDS

if TYPE_CHECKING:
    import wandb

STEP = "trainer/step"
_EXIT_CODES: dict[Status, int] = {"finished": 0, "failed": 1, "stopped": 0}


class LikeWandb(Tracker):
    """Base class of the trackers for W&B and trackio, whose packages have classes with the same names and arguments.

    Attributes:
      library: the imported package, wandb or trackio; set by `open`.
    """

    library: Any

    @abc.abstractmethod
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs {name: value} for a training step. Values are numbers, or `library` objects such as tables and images."""

    def scalars(self, records: Sequence[StepScalars]) -> None:
        for record in records:
            self.log(record.step, record.values)

    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Logs decoded examples as the table 'samples/DATASET', and their pictures as images."""
        columns, cells = samples_lib.table(rows, dataset, step)
        values: dict[str, Any] = {f"samples/{dataset}": self.library.Table(columns=[*columns], data=cells)}
        for name, array in samples_lib.pictures(rows):
            values[f"samples/{dataset}/{name}"] = self.library.Image(array)
        self.log(step, values)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        made = {
            name: self.library.Histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in histograms.items()
        }
        self.log(step, made)


class WandbTracker(LikeWandb):
    """Sends a run to W&B, or writes its offline files."""

    def check(self, job_log_dir: epath.Path) -> None:
        """Raises UserError if an online run has no login, because wandb would ask for it in the terminal."""
        del job_log_dir
        if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise UserError(
                "tracker wandb: there is no API key; run `wandb login`, or set WANDB_API_KEY, or set WANDB_MODE=offline to "
                "write files only"
            )

    def open(self, facts: RunFacts) -> str:
        """Starts wandb's own process, and begins or continues the run."""
        import wandb

        self.library = wandb
        self._run: wandb.Run = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.resume_id,
            resume="allow",
            config={"experiment": facts.experiment, **facts.settings},
            tags=list(facts.tags) or None,
            dir=os.environ.get("WANDB_DIR") or facts.local_dir,
            settings=wandb.Settings(
                # Keep wandb off the trainer's terminal: it neither prints to it nor records it.
                console="off",
                silent=True,
                # At exit, this process waits for wandb's process, which retries an unreachable server for minutes.
                finish_timeout=CLOSE_SECONDS,
                init_timeout=CLOSE_SECONDS,
                x_graphql_retry_max=3,
                x_graphql_timeout_seconds=10,
            ),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        directory = Path(self._run.dir).parent
        if self._run.offline:
            self.where = f"{directory}, offline; to upload it: wandb sync {directory.parent}/*-{self._run.id}"
        else:
            self.where = str(self._run.url)
        self._save("config.txt", facts.config_text)
        return str(self._run.id)

    def page(self, path: epath.Path) -> None:
        """Saves the page among the run's files, and logs it as HTML."""
        text = path.read_text()
        self._save(path.name, text)
        self._run.log({"page": self.library.Html(text, inject=False)})

    def close(self, status: Status) -> None:
        """Ends the run. W&B has only two statuses and shows a run stopped by a signal as finished."""
        self._run.summary["trainer/status"] = status
        self._run.finish(exit_code=_EXIT_CODES[status])

    def _save(self, name: str, text: str) -> None:
        path = Path(self._run.dir) / name
        path.write_text(text, encoding="utf-8")
        self._run.save(path, base_path=self._run.dir, policy="now")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, STEP: step})

"""The tracker for MLflow. Needs the package mlflow, which the extra `mlflow` installs.

MLFLOW_TRACKING_URI names a server, a database or Databricks. If it is not set, runs go to an SQLite file in
`JOB_LOG_DIR/mlruns`; `mlflow ui --backend-store-uri sqlite:///...` shows them.

MLflow's names allow only letters, digits and `_-. :/`, so the setting 'train_datasets[0].files' is the parameter
'train_datasets.0.files'. MLflow's parameters are immutable, so a setting that has changed in a restart becomes the tag
'changed/NAME'. The artifact `config.txt` has all current settings of the run under their own names.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from absl import logging
from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.errors import UserError
from spmd_trainer.storage import is_remote
from spmd_trainer.watch.tracking import samples as samples_lib
from spmd_trainer.watch.tracking.base import RunFacts, StepScalars, Tracker
from spmd_trainer.watch.tracking.settings import flat

if TYPE_CHECKING:
    from mlflow.entities import Experiment

URI = "MLFLOW_TRACKING_URI"
_STATUSES: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_UNKNOWN = re.compile(r"[^\w\-. :/]", re.ASCII)
# Limits of MLflow's servers: characters of a name, of a parameter and of a tag; metrics and parameters of one request.
_NAME, _PARAMETER, _TAG = 250, 6000, 5000
_METRICS, _PARAMETERS = 1000, 100
# Keep MLflow off the trainer's terminal: progress bars, database messages, the run's address.
_QUIET = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_Item = TypeVar("_Item")


class MlflowTracker(Tracker):
    """Sends a run to MLflow."""

    # Up to this many steps per request, because each request costs a round trip.
    batch = 100

    def check(self, job_log_dir: epath.Path) -> None:
        """Raises UserError if `job_log_dir` is in an object store and MLFLOW_TRACKING_URI is not set."""
        if is_remote(job_log_dir) and not os.environ.get(URI):
            raise UserError(
                f"tracker mlflow: set {URI}, e.g. to a server's address: MLflow's own files can't be in {job_log_dir}"
            )

    def open(self, facts: RunFacts) -> str:
        """Finds or creates the experiment and the run, and sends the settings."""
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        uri, artifacts = _where(facts)
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = self._resumed(facts.resume_id) or self._created(facts, artifacts)
        self.where = f"run {self._run_id} of experiment {facts.project} at {uri}"
        self._client.log_text(self._run_id, facts.config_text, "config.txt")
        self._send_settings({"experiment": facts.experiment, **flat(facts.settings)})
        return self._run_id

    def scalars(self, records: Sequence[StepScalars]) -> None:
        """Sends metrics in as few requests as MLflow allows."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), value, int(record.time * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)

    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Adds the rows to the table `samples/DATASET.json`, and logs their pictures as images for this step."""
        columns, cells = samples_lib.table(rows, dataset, step)
        data = {"step": [step] * len(rows), **{name: [row[i] for row in cells] for i, name in enumerate(columns)}}
        self._client.log_table(self._run_id, data, f"samples/{_name(dataset)}.json")
        for name, array in samples_lib.pictures(rows):
            key = f"samples/{_name(dataset)}/{_name(name)}"
            self._client.log_image(self._run_id, array, key=key, step=step, synchronous=True)

    def page(self, path: epath.Path) -> None:
        self._client.log_text(self._run_id, path.read_text(), path.name)

    def close(self, status: Status) -> None:
        """Ends the run. A run stopped by a signal has the status 'KILLED' until it continues."""
        self._client.set_terminated(self._run_id, _STATUSES[status])

    def _resumed(self, run_id: str | None) -> str | None:
        """Returns the id of the run to continue; None if it is a new run, or MLflow no longer has it."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logging.warning("tracker mlflow: run %s no longer exists; starting a new one", run_id)
            return None
        if run.info.lifecycle_stage != "active":
            logging.warning("tracker mlflow: run %s was deleted; a new one begins", run_id)
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _created(self, facts: RunFacts, artifacts: str | None) -> str:
        experiment = self._experiment(facts.project, artifacts).experiment_id
        tags = dict.fromkeys(facts.tags, "true")
        return str(self._client.create_run(experiment, run_name=facts.name, tags=tags).info.run_id)

    def _experiment(self, name: str, artifacts: str | None) -> Experiment:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found
        try:
            return self._client.get_experiment(self._client.create_experiment(name, artifact_location=artifacts))
        except MlflowException:
            # Another run has created it meanwhile.
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found

    def _send_settings(self, settings: Mapping[str, object]) -> None:
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._run_id).data.params
        values = {_name(name): _shortened(str(value), _PARAMETER) for name, value in settings.items()}
        new = [Param(name, value) for name, value in values.items() if name not in there]
        changed = [
            RunTag(_name(f"changed/{name}"), _shortened(value, _TAG))
            for name, value in values.items()
            if there.get(name, value) != value
        ]
        for params in _parts(new, _PARAMETERS):
            self._client.log_batch(self._run_id, params=params, synchronous=True)
        for tags in _parts(changed, _PARAMETERS):
            self._client.log_batch(self._run_id, tags=tags, synchronous=True)


def _where(facts: RunFacts) -> tuple[str, str | None]:
    """Returns (tracking URI, artifact location of a new experiment). The location is None for the server's default."""
    uri = os.environ.get(URI)
    if uri:
        return uri, None
    directory = Path(facts.job_log_dir).absolute() / "mlruns"
    directory.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{directory}/mlflow.db", (directory / "artifacts").as_uri()


def _name(name: str) -> str:
    """Returns a valid MLflow name: '[0]' becomes '.0', and other invalid characters '_'. A long name ends in a checksum."""
    known = _UNKNOWN.sub("_", re.sub(r"\[(\d+)\]", r".\1", name))
    return known if len(known) <= _NAME else f"{known[: _NAME - 9]}.{zlib.crc32(known.encode()):08x}"


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    end = f"... {len(text)} characters"
    return text[: length - len(end)] + end


def _parts(items: Sequence[_Item], size: int) -> Iterator[list[_Item]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])

"""Shows where every variable of an experiment lives, without training and without allocating anything."""

from __future__ import annotations

import sys

from absl import logging

from spmd_trainer import sharding
from spmd_trainer.programs.job import Job

_FORMATS = {"sharding_report.json": "json", "sharding_report.html": "html"}


def inspect_sharding(job: Job) -> None:
    """Prints the sharding report, and writes it as JSON and HTML into `job_log_dir`."""
    variables, mesh = job.partitioner.metadata.records(), job.partitioner.mesh
    sys.stdout.write(sharding.sharding_report(variables, mesh) + "\n")
    directory = job.settings.job_log_dir
    directory.mkdir(parents=True, exist_ok=True)
    for name, form in _FORMATS.items():
        (directory / name).write_text(sharding.sharding_report(variables, mesh, format=form))
        logging.info("wrote %s", directory / name)

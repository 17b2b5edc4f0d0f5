"""Shows where every variable of an experiment lives, without training and without allocating anything."""

from __future__ import annotations

import sys

from absl import logging
from etils import epath

from spmd_trainer.programs.job import MARKER, Job, write_report


def inspect_sharding(job: Job) -> None:
    """Prints the sharding report, and writes it as text, JSON and HTML where a directory was given."""
    report = job.sharding_report()
    sys.stdout.write(f"{report}\n")
    if job.settings.writes_reports:
        for path in write_report(report, report_directory(job)):
            logging.info("wrote %s", path)


def report_directory(job: Job) -> epath.Path:
    """Returns where reports go: the job's directory, or `inspect/` in it where a training run has its own reports there."""
    directory = job.settings.job_log_dir
    if (directory / MARKER).exists():
        directory /= "inspect"
    directory.mkdir(parents=True, exist_ok=True)
    return directory

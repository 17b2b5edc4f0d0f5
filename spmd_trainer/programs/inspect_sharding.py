"""Shows where every variable of an experiment lives, without training and without allocating anything."""

from __future__ import annotations

import sys

from absl import logging

from spmd_trainer.programs.job import Job, write_report


def inspect_sharding(job: Job) -> None:
    """Prints the sharding report, and writes it as text, JSON and HTML into `job_log_dir`."""
    report = job.sharding_report()
    sys.stdout.write(f"{report}\n")
    directory = job.settings.job_log_dir
    directory.mkdir(parents=True, exist_ok=True)
    for path in write_report(report, directory):
        logging.info("wrote %s", path)

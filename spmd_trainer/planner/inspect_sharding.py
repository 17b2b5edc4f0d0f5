"""`--mode=inspect`: reports how every variable and input of an experiment is split, without allocating anything."""

from __future__ import annotations

import sys

from absl import logging

from spmd_trainer.planner import plan
from spmd_trainer.training import attention_kernels, input_layouts
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_directory import report_directory, write_report


def inspect_job(job: Job) -> None:
    """Prints the sharding report and, if requested, the plan. If a directory was given, also writes both to files there."""
    report = job.sharding_report(_attention_lines(job), input_layouts.of_job(job))
    sys.stdout.write(f"{report}\n")
    if job.config.writes_reports:
        for path in write_report(report, report_directory(job.config.job_log_dir)):
            logging.info("wrote %s", path)
    if job.config.plan or job.config.topology:
        plan.write_plan(job)


def _attention_lines(job: Job) -> list[str]:
    """Returns the lines of the attention kernels; none if the forward pass can't be traced. The report doesn't need them."""
    try:
        return attention_kernels.of_forward_pass(job)
    except Exception as error:  # an experiment's own code may raise anything
        logging.warning("the report doesn't name the attention kernels: %s: %s", type(error).__name__, error)
        return []

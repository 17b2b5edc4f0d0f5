"""`--mode=inspect`: reports how every variable of an experiment is sharded, without allocating anything."""

from __future__ import annotations

import sys

from absl import logging

from spmd_trainer.programs import attention_kernels, plan
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.run_directory import report_directory, write_report


def inspect_job(job: Job) -> None:
    """Prints the sharding report and, if requested, the plan. If a directory was given, also writes both to files there."""
    report = job.sharding_report(attention_kernels.of_forward_pass(job))
    sys.stdout.write(f"{report}\n")
    if job.config.writes_reports:
        for path in write_report(report, report_directory(job.config.job_log_dir)):
            logging.info("wrote %s", path)
    if job.config.plan or job.config.topology:
        plan.write_plan(job)

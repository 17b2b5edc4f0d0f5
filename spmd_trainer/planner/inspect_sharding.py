"""`--mode=inspect`: reports how every variable and input of an experiment is sharded, without allocating anything."""

from __future__ import annotations

import dataclasses
import json

from absl import logging

from spmd_trainer.errors import UserError, terminal
from spmd_trainer.planner import plan, plan_page
from spmd_trainer.storage import files
from spmd_trainer.training import report_parts
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import ChipsConfig, InspectConfig
from spmd_trainer.training.run_directory import report_directory, write_report


def inspect_job(job: Job) -> None:
    """Prints the sharding report and, if requested, the plan. Writes them to files if the job has a directory for reports."""
    try:
        kernels = report_parts.of_forward_pass(job)
    except Exception as error:  # an experiment's own code may raise anything
        logging.warning("the report doesn't name the attention kernels: %s: %s", type(error).__name__, error)
        kernels = []
    report = job.sharding_report(kernels, report_parts.of_inputs(job))
    terminal.write(f"{report}\n")
    if job.config.writes_reports:
        for path in write_report(report, report_directory(job.config.job_log_dir)):
            logging.info("wrote %s", path)
    config = job.config.of(InspectConfig)
    if config.plan or config.topology:
        write_plan(job)


def write_plan(job: Job) -> None:
    """Prints the plan, and writes it to `plan.json` and `plan.html` if the job has a directory for reports.

    Raises:
      UserError: the step needs more memory than the topology's chips have, or can't be compiled for them.
    """
    logging.info("compiling the train step for %d chips", job.partitioner.mesh.size)
    result = plan.plan(job)
    terminal.write(plan.plan_text(result))
    if job.config.writes_reports:
        estimate = result.estimate.record() if result.estimate else None
        record = {
            **dataclasses.asdict(result),
            "total": result.total,
            "fits": result.fits,
            "topology": job.config.of(ChipsConfig).topology,
            "estimate": estimate,
        }
        memory = record.pop("memory_over_time")  # plan.html has all of it
        record["largest"] = memory["largest"] if memory else []
        path = report_directory(job.config.job_log_dir) / "plan.json"
        files.write_atomically(path, json.dumps(record, indent=1).splitlines())
        logging.info("wrote %s", path)
        plan_page.write_plan_page(job, result)
    if (problem := plan.misfit(result, job.config.of(ChipsConfig).topology)) is not None:
        raise UserError(problem)

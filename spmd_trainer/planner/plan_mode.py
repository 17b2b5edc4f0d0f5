"""`--mode=plan`: searches for the fastest settings, or for settings that make an experiment fit (`--search=memory`)."""

from __future__ import annotations

import dataclasses

from absl import logging

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.planner import memory_ladder, plan_candidates, plan_page, plan_report
from spmd_trainer.planner.plan_search import Search
from spmd_trainer.planner.topologies import topology_devices
from spmd_trainer.step import mesh_choice
from spmd_trainer.step.mesh_choice import mesh_over_slices
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import PlanConfig


def search(job: Job) -> None:
    """Runs the search, prints the best candidates, and writes `plan_search.json` if the job has a directory for reports.

    Raises:
      UserError: no candidate fits; or `--search` names 'memory' together with other settings.
    """
    config = job.config.of(PlanConfig)
    searched = config.search
    if "memory" in searched:
        if len(searched) > 1:
            raise UserError(
                f"--search={','.join(searched)}: memory is a search of its own, which tries remat, minibatches, mesh and batch "
                "too; give --search=memory"
            )
        memory_ladder.search(job)
        return
    found = Search(job, searched)
    store = plan_report.Store(job, searched)
    try:
        outcomes = found.run(config.budget, store)
    except KeyboardInterrupt:
        logging.info("interrupted; these are the candidates that are known")
        outcomes = found.outcomes
        for outcome in outcomes:
            if not outcome.is_known:
                outcome.not_reached = "the search was interrupted before it was compiled"
    store.write(outcomes)
    plan_page.write_search_page(job, outcomes, chip_memory=found.memory)
    if not any(outcome.seconds for outcome in outcomes):
        raise UserError(plan_report.nothing_fits(job, outcomes, found.memory))
    terminal.write(plan_report.report_text(job, outcomes))


def build_job(config: PlanConfig) -> Job:
    """Builds the job that a search starts from. If the experiment's own mesh doesn't fit the topology, chooses a different one.

    Raises:
      UserError: `--topology` is missing; or see `Job.build`.
    """
    if not config.topology:
        raise UserError("--mode=plan needs --topology=CHIP:SHAPE, e.g. v5e:16x16 or h100:32x8")
    try:
        return Job.build(config)
    except UserError:
        task = tasks_lib.build_task(config.experiment.task_p)
        declared = mesh_choice.declared_mesh(task.model)
        if config.mesh or not {"mesh", "memory"} & set(config.search) or declared is None:
            raise
        devices = topology_devices(config.topology, config.num_slices)
        # From large outer axes to large inner ones: outer axes shard the batch, which every model allows.
        for mesh in reversed(list(plan_candidates.meshes(tuple(declared.shape), len(devices), config.num_slices))):
            try:
                mesh_over_slices(dict(mesh), devices)
            except (ValueError, NotImplementedError):
                continue
            return Job.build(dataclasses.replace(config, mesh=mesh))
        raise

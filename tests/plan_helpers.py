"""Searches of `--mode=plan` on host devices that stand for eight H100s of one host."""

import math
import types

from spmd_trainer.planner import links, plan_report, plan_search, roofline
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

H100 = "NVIDIA H100 80GB HBM3"
EXPERIMENT = "lm.llama.TinyLlama"


def as_h100(monkeypatch):
    """Lets host devices stand for H100s. A test module makes a fixture of it."""
    machine = links.machine(H100)
    monkeypatch.setattr(links, "machine", lambda kind: machine)


def make_job(directory, **settings):
    return Job.build(make_run_config(EXPERIMENT, directory, mode="plan", **settings))


def run(job, *searched, budget=1000.0):
    found = plan_search.Search(job, searched)
    store = plan_report.Store(job, searched)
    return found.run(budget, store), store


def fake_plan(job):
    """A plan whose seconds and bytes depend on the mesh: the larger 'mdl', the slower and the smaller."""
    part = job.partitioner.mesh_shape()["mdl"]
    found = types.SimpleNamespace(
        shortest=float(part),
        middle=2.0 * part,
        longest=3.0 * part,
        collectives=[roofline.CollectiveTime("all-gather", ("mdl",), 1.0, "NVLink")],
    )
    return types.SimpleNamespace(
        total=2**30 // part,
        arguments=2**29 // part,
        temporaries=2**29 // part,
        outputs=0,
        padding=64,
        estimate=found,
        fits=True,
        memory=2**36,
        kind=H100,
        mesh=dict(job.partitioner.mesh_shape()),
        collectives=[{"kind": "all-gather", "axes": ["mdl"], "count": 2, "bytes": 1024}],
        memory_over_time=None,
    )


def program(directory):
    """Returns the hash of the program that a search in this process traces."""
    search = plan_search.Search(make_job(directory), ())
    search._trace_all(math.inf)
    return search.outcomes[0].program

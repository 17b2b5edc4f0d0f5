"""`make faults` on object stores: runs in a bucket get signals, failing requests, outages and revoked credentials.

Environment variables set the numbers of faults: FAULT_STORE_KILLS, FAULT_STORE_SIGTERMS, FAULT_OUTAGE_SECONDS; and FAULT_SEED.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import uuid

import pytest
from etils import epath
from proxy import Lasting, Proxy, some_fail

sys.path.append(str(pathlib.Path(__file__).parents[1] / "multiprocess"))
from faults import Chain, Table
from job_helpers import (
    STATUS_USER_ERROR,
    Settings,
    losses,
    records,
    run,
    started,
    steps_on_disk,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("storage_runs")]

KILLS = int(os.environ.get("FAULT_STORE_KILLS", "15"))
SIGTERMS = int(os.environ.get("FAULT_STORE_SIGTERMS", "5"))
OUTAGE_SECONDS = float(os.environ.get("FAULT_OUTAGE_SECONDS", "60"))
SEED = int(os.environ.get("FAULT_SEED", "0"))
MESH = "replica:1,data:2,mdl:1"
# A save takes seconds on these servers, and a step milliseconds.
FIELDS = {
    "num_train_steps": 60,
    "save_interval_steps": 10,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": 20,
    "log_train_output_interval_steps": 1,
}
# More steps than any chain reaches.
MANY_STEPS = {"num_train_steps": 3000}
REFERENCE_STEPS = 800
# See `faults.MOMENTS`. Every third kill is in a save.
KILL_MOMENTS = {
    "save": ("saving step", 0.5),
    "start": ("lm.stdlib.StdlibBytesTiny", 6.0),
    "train": ("training from step", 6.0),
}
# Sums are added in another order with another number of processes, and the difference grows with the steps.
TOLERANCE = 2e-3
# The requests that write checkpoints begin here; files of the run itself are not meant.
CHECKPOINT = re.compile(r"checkpoints(/|%2F)\d+", re.IGNORECASE)


@pytest.fixture(scope="module")
def table():
    """The table of results, printed at the end."""
    result = Table()
    yield result
    sys.stdout.write(f"\n{result}\n")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """A compilation cache directory for all jobs."""
    return str(tmp_path_factory.mktemp("jax_cache"))


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory, cache) -> pathlib.Path:
    """The directory of an uninterrupted run on disk."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    fields = FIELDS | {"num_train_steps": REFERENCE_STEPS, "save_interval_steps": REFERENCE_STEPS}
    run(Settings(directory, 1, cache, fields, mesh=MESH))
    return directory


class Store:
    """An object store behind a proxy. The test asks it directly, the jobs through the proxy."""

    def __init__(self, scheme: str, proxy: Proxy, environment: dict[str, str], cache: str):
        self.scheme = scheme
        self.proxy = proxy
        self._environment = environment
        self._cache = cache

    def settings(self, processes: int = 1, **fields: object) -> Settings:
        """Returns a run in a new directory, with these fields of `task.train`."""
        directory = epath.Path(f"{self.scheme}://bkt/{uuid.uuid4().hex}")
        return Settings(directory, processes, self._cache, FIELDS | fields, mesh=MESH, env=self._environment)

    @contextlib.contextmanager
    def failing(self, fault):
        """Makes the jobs' requests fail as `Proxy.fault` says."""
        self.proxy.fault = fault
        try:
            yield fault
        finally:
            self.proxy.fault = lambda method, path: None


@pytest.fixture(params=("gs", "s3"))
def store(request, address_of, use, cache):
    """Each of the object stores."""
    address = address_of(request.param)
    with Proxy(address) as proxy:
        environment = use(request.param, proxy.address)
        use(request.param, address)
        yield Store(request.param, proxy, environment, cache)


def report(table: Table, store: Store, fault: str, problems: list[str], processes: int = 1) -> None:
    """Adds a row, and fails the test if something was lost."""
    table.report(f"{store.scheme}: {fault}", problems, processes)
    assert not problems, "\n".join(problems)


def differences(settings: Settings, steps: int, reference: pathlib.Path) -> list[str]:
    """Returns how the losses of a run that took this many steps differ from those on disk."""
    got, want = losses(settings.directory), losses(reference)
    if got == {step: want[step] for step in range(1, steps + 1)}:
        return []
    wrong = [step for step in got if got[step] != want[step]]
    return [f"losses differ at steps {wrong[:5]}; {len(got)} steps were logged, not {steps}"]


def test_signals_at_random_times(store, table, cache, on_disk):
    chain = Chain(store.settings(**MANY_STEPS), losses(on_disk), 0.0, SEED, KILL_MOMENTS)
    lost = table.lost.total()
    saves = 0
    for number in range(KILLS):
        moment = list(KILL_MOMENTS)[number % len(KILL_MOMENTS)]
        hit, problems = chain.kill(1, moment)
        saves += hit == "async save"
        table.report(f"{store.scheme}: SIGKILL in {hit}", problems, 1)
    for number in range(SIGTERMS):
        hit, problems = chain.terminate(1, ("train", "save")[number % 2])
        table.report(f"{store.scheme}: SIGTERM in {hit}", problems, 1)
    assert table.lost.total() == lost, str(table)
    assert saves >= KILLS // 3, f"only {saves} of {KILLS} kills were in saves"
    assert max(losses(chain.directory)) <= REFERENCE_STEPS, "the run on disk has fewer steps than the chain"


def test_a_tenth_of_all_requests_fail(store, table, on_disk):
    settings = store.settings(num_train_steps=20)
    problems = []
    with store.failing(some_fail(0.1, seed=SEED)):
        for steps in (20, 40):
            run(dataclasses.replace(settings, fields=settings.fields | {"num_train_steps": steps}))
    if store.proxy.failed < 20:
        problems.append(f"only {store.proxy.failed} requests failed")
    report(table, store, "10% of requests fail", problems + differences(settings, 40, on_disk))


def writes_a_checkpoint(method: str, path: str) -> bool:
    """Returns True for a request that writes a file of a checkpoint."""
    return method in ("PUT", "POST") and CHECKPOINT.search(path) is not None


@pytest.mark.parametrize("begins", ["while training", "in a save"])
def test_an_outage(store, table, on_disk, begins):
    settings = store.settings()
    outage = Lasting(
        "cut", OUTAGE_SECONDS, at_request=writes_a_checkpoint if begins == "in a save" else lambda *_: False
    )
    with store.failing(outage), started(settings) as job:
        job.wait_for_line("saved step 10" if begins == "while training" else "training from step")
        if begins == "while training":
            outage.begin()
        statuses = job.finish()
    problems = [] if statuses == [0] and outage.begun.is_set() else [f"{statuses}\n{job.log()}"]
    if steps_on_disk(settings.directory)[-3:] != [40, 50, 60]:
        problems.append(f"steps {steps_on_disk(settings.directory)} are there")
    report(table, store, f"outage of {OUTAGE_SECONDS:.0f} s {begins}", problems + differences(settings, 60, on_disk))


@pytest.mark.parametrize("begins", ["while training", "in a save"])
def test_credentials_that_are_revoked(store, table, on_disk, begins):
    settings = store.settings(**MANY_STEPS)
    revoked = Lasting(403)
    with store.failing(revoked), started(settings) as job:
        job.wait_for_line("saved step 20" if begins == "while training" else "saving step 30")
        revoked.begin()
        before = steps_on_disk(settings.directory)
        statuses = job.finish()
    problems = [] if statuses == [STATUS_USER_ERROR] else [f"statuses {statuses}\n{job.log()}"]
    message = rf"spmd-trainer: {re.escape(os.fspath(settings.directory))}\S* can't be used: permission denied"
    if not re.search(message, job.logs[0]) or "Traceback" in job.logs[0]:
        problems.append(f"the message is not clear\n{job.log()}")
    last = before[-1] + 20
    again = run(dataclasses.replace(settings, fields=settings.fields | {"num_train_steps": last}))
    restored = [int(step) for step in re.findall(r"restored step (\d+) from", again.logs[0])]
    if not restored or restored[0] < before[-1]:
        problems.append(f"resumed from {restored}, and steps {before} were there")
    report(table, store, f"credentials revoked {begins}", problems + differences(settings, last, on_disk))


def test_two_processes(store, table, on_disk):
    chain = Chain(store.settings(2, **MANY_STEPS), losses(on_disk), TOLERANCE, SEED, KILL_MOMENTS)
    lost = table.lost.total()
    for moment in ("save", "train"):
        hit, problems = chain.kill(2, moment)
        table.report(f"{store.scheme}: SIGKILL to one of two in {hit}", problems, 2)
    hit, problems = chain.terminate(2, "save")
    table.report(f"{store.scheme}: SIGTERM to one of two in {hit}", problems, 2)
    for processes in (2, 1):
        last = steps_on_disk(chain.directory)[-1] + 10
        settings = chain.with_processes(processes)
        job = run(dataclasses.replace(settings, fields=settings.fields | {"num_train_steps": last}))
        curve = losses(chain.directory)
        good = list(curve) == list(range(1, last + 1)) and all(chain.expected(step) == curve[step] for step in curve)
        problems = [] if good and f"restored step {last - 10} from" in job.logs[0] else [job.log()]
        table.report(f"{store.scheme}: resumed after that", problems, processes)
    assert table.lost.total() == lost, str(table)


def test_evaluation_and_decode_follow_a_run(store, table, on_disk):
    settings = store.settings(eval_interval_steps=0)
    with contextlib.ExitStack() as jobs:
        training = jobs.enter_context(started(settings))
        training.wait_for_line("training from step")  # before that there is nothing to follow
        followers = [
            jobs.enter_context(started(dataclasses.replace(settings, flags=(f"--mode={mode}",))))
            for mode in ("eval", "decode")
        ]
        statuses = [job.finish()[0] for job in (training, *followers)]
    problems = [] if statuses == [0, 0, 0] else [job.log() for job in (training, *followers)]
    evaluated, want = records(settings.directory, "eval_heldout"), records(on_disk, "eval_heldout")
    if 60 not in evaluated:
        problems.append(f"steps {list(evaluated)} were evaluated")
    problems += [
        f"another result at step {step}"
        for step in evaluated
        if step in want and evaluated[step]["avg_xent"] != want[step]["avg_xent"]
    ]
    decoded = settings.directory / "decode_out" / "heldout_prompts" / "step_60.jsonl"
    if not decoded.exists() or len(decoded.read_text().splitlines()) != 5:
        problems.append("the last step was not decoded")
    report(table, store, "eval and decode follow", problems + differences(settings, 60, on_disk), 3)

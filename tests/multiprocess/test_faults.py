"""`make faults`: jobs of one, two and four real processes get SIGKILL, SIGTERM and damaged checkpoints.

Environment variables set the numbers of faults: FAULT_KILLS, FAULT_SIGTERMS, FAULT_CORRUPTIONS; and FAULT_SEED.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal

import pytest
from faults import EVAL_INTERVAL, MESHES, MOMENTS, ROWS, Chain
from job_helpers import RunningJob, Settings, Supervised, losses, records, run, started, steps_on_disk

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multiprocess")]

KILLS = int(os.environ.get("FAULT_KILLS", "50"))
SIGTERMS = int(os.environ.get("FAULT_SIGTERMS", "20"))
CORRUPTIONS = int(os.environ.get("FAULT_CORRUPTIONS", "10"))
SEED = int(os.environ.get("FAULT_SEED", "0"))
# More steps than any chain reaches.
STEPS = 3000
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": EVAL_INTERVAL,
    "log_train_output_interval_steps": 1,
}
# Sums are added in another order with another number of processes, and the difference grows with the steps.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache) -> dict[int, float]:
    """Losses of an uninterrupted run of one process, for more steps than any chain reaches."""
    fields = FIELDS | {"num_train_steps": 1200, "save_interval_steps": 600, "eval_interval_steps": 0}
    return losses(run(Settings(tmp_path_factory.mktemp("reference") / "run", 1, cache, fields)).settings.directory)


def test_kills_and_stops_at_random_times(table, cache, tmp_path):
    settings = Settings(tmp_path / "run", 1, cache, FIELDS, rows=ROWS)
    fields = FIELDS | {"num_train_steps": 200, "save_interval_steps": 200, "eval_interval_steps": 0}
    whole = dataclasses.replace(settings, directory=tmp_path / "whole", fields=fields, mesh=MESHES[1])
    chain = Chain(settings, losses(run(whole).settings.directory), TOLERANCE, SEED)
    moments = list(MOMENTS)
    lost = table.lost.total()
    for number in range(KILLS):
        processes = chain.random.choice([2, 2, 3, 4, 5])
        how = signal.SIGSTOP if number % 4 == 3 else signal.SIGKILL
        phase, problems = chain.kill(processes, moments[number % len(moments)], how)
        table.report(f"{how.name} in {phase}", problems, processes)
    assert table.lost.total() == lost, str(table)


def test_sigterms_at_random_times(reference, table, cache, tmp_path):
    chain = Chain(Settings(tmp_path / "run", 2, cache, FIELDS), reference, TOLERANCE, SEED)
    lost = table.lost.total()
    for number in range(SIGTERMS):
        processes = chain.random.choice([1, 2, 2]) if number % 10 else 4
        moment = ("train", "save", "evaluate")[number % 3]
        phase, problems = chain.terminate(processes, moment)
        table.report(f"SIGTERM in {phase}", problems, processes)
    assert table.lost.total() == lost, str(table)


# Orbax's own files in a step's directory that no restore reads: damage to them is harmless.
UNREAD = ("commit_success.txt", "_CHECKPOINT_METADATA")


def damage(run_directory, how: str, rng: random.Random) -> tuple[int, str]:
    """Damages one file of the newest checkpoint; returns its step and the file's path."""
    newest, older = steps_on_disk(run_directory)[-1], steps_on_disk(run_directory)[-2]
    root = run_directory / "checkpoints"
    files = sorted(
        p
        for p in (root / str(newest)).rglob("*")
        if p.is_file() and str(p.relative_to(root / str(newest))) not in UNREAD
    )
    big = sorted(files, key=lambda p: p.stat().st_size)[-3:]
    path = rng.choice(big if how in ("zeroed", "swapped") else files)
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "zeroed":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "deleted":
        path.unlink()
    elif how == "swapped":
        # Replaced by an undamaged file of an older step.
        others = [p for p in (root / str(older)).rglob("*") if p.is_file() and p.stat().st_size > 1000]
        shutil.copy(rng.choice(others), path)
    return newest, str(path.relative_to(root))


def test_damaged_checkpoints_are_refused_and_the_run_resumes_from_the_one_before(reference, table, cache, tmp_path):
    chain = Chain(Settings(tmp_path / "run", 2, cache, FIELDS), reference, TOLERANCE, SEED)
    lost = table.lost.total()
    chain.terminate(2, "save")
    for number in range(CORRUPTIONS):
        how = ("truncated", "zeroed", "deleted", "swapped")[number % 4]
        before = steps_on_disk(chain.directory)
        step, file = damage(chain.directory, how, chain.random)
        fields = FIELDS | {"num_train_steps": before[-1] + 6}
        processes = 1 + number % 2
        job = one_job(dataclasses.replace(chain.settings, processes=processes, fields=fields))
        problems = []
        if f"restored step {before[-2]} from" not in job.logs[0] or f"step {step} " not in job.logs[0]:
            problems.append(f"{file} of step {step}: the run did not resume from step {before[-2]}\n{job.log()}")
        if not list((chain.directory / "checkpoints").glob(f"refused-{step}*")):
            problems.append(f"step {step} was not moved aside")
        wrong = [s for s, loss in losses(chain.directory).items() if s in reference and loss != chain.expected(s)]
        problems += [f"losses differ at {wrong[:5]}"] if wrong else []
        table.report(f"corruption: {how}", problems, processes)
    assert table.lost.total() == lost, str(table)


def one_job(settings: Settings) -> RunningJob:
    with started(settings) as job:
        job.finish()
    return job


# (processes and mesh that save, processes and mesh that resume)
CHANGES = [
    ((2, "replica:1,data:4,mdl:2"), (1, "replica:1,data:2,mdl:1")),
    ((1, "replica:1,data:2,mdl:2"), (2, "replica:1,data:2,mdl:4")),
    ((4, "replica:1,data:4,mdl:2"), (2, "replica:1,data:1,mdl:2")),
    ((2, "replica:2,data:2,mdl:1"), (4, "replica:1,data:2,mdl:4")),
]


@pytest.mark.parametrize(("first", "then"), CHANGES, ids=[f"{a[0]}-{b[0]}" for a, b in CHANGES])
def test_a_run_resumes_on_another_mesh_and_number_of_processes(reference, table, cache, tmp_path, first, then):
    directory, problems = tmp_path / "run", []
    for (processes, mesh), steps in ((first, 10), (then, 20)):
        settings = Settings(directory, processes, cache, FIELDS | {"num_train_steps": steps}, mesh=mesh)
        job = one_job(settings)
        if f"finished: step {steps} of {steps}" not in job.logs[0]:
            problems.append(job.log())
    curve = losses(directory)
    wrong = [s for s, loss in curve.items() if loss != pytest.approx(reference[s], rel=TOLERANCE)]
    if wrong or list(curve) != list(range(1, 21)):
        problems.append(f"losses differ at steps {wrong}; steps logged: {list(curve)}")
    table.report(f"mesh change, {first[0]} to {then[0]} processes", problems, then[0])
    assert not problems


def test_padding_rows_of_two_processes_do_not_count(cache, tmp_path):
    # 3 rows per process on 4 devices: the padding row has no weight in training, evaluation and decode.
    fields = FIELDS | {"num_train_steps": 7}
    jobs = [run(Settings(tmp_path / str(n), n, cache, fields, rows=6)) for n in (1, 2)]
    one, two = (job.settings.directory for job in jobs)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert records(two, "eval_heldout")[7]["avg_xent"] == pytest.approx(
        records(one, "eval_heldout")[7]["avg_xent"], rel=1e-5
    )
    for job in jobs:
        run(dataclasses.replace(job.settings, flags=("--mode=decode_once",)))
    decoded = [
        [
            json.loads(line)
            for line in (path / "decode_out" / "heldout_prompts" / "step_7.jsonl").read_text().splitlines()
        ]
        for path in (one, two)
    ]
    prompts = [[(example["index"], example["prompt"]) for example in examples] for examples in decoded]
    assert prompts[0] == prompts[1]
    assert [index for index, _ in prompts[0]] == [0, 1, 2, 3, 4]
    assert [example["ids"] for example in decoded[0]] == [example["ids"] for example in decoded[1]]


def test_a_run_continues_after_an_ondemand_checkpoint(table, cache, tmp_path):
    fields = FIELDS | {
        "num_train_steps": 60,
        "save_interval_steps": 1000,
        "save_max_to_keep": 9,
        "eval_interval_steps": 0,
    }
    settings = Settings(tmp_path / "run", 2, cache, fields, flags=("--exit_after_ondemand_checkpoint=false",))
    with started(settings) as job:
        job.wait_for_line("training from step")
        job.send(signal.SIGTERM, 0)
        statuses = job.finish()
    saved = steps_on_disk(settings.directory)
    good = (
        statuses == [0, 0] and len(saved) == 3 and saved[0] == 0 and saved[2] == 60 and "then continue" in job.logs[0]
    )
    table.report("SIGTERM, save and go on", [] if good else [f"{statuses}, {saved}\n{job.log()}"], 2)
    assert good


def test_ctrl_c_to_one_process_ends_all_of_them_cleanly(table, cache, tmp_path):
    settings = Settings(tmp_path / "run", 2, cache, FIELDS, flags=("--exit_after_ondemand_checkpoint=false",))
    with started(settings) as job:
        job.wait_for_line("training from step")
        job.send(signal.SIGINT, 0)
        statuses = job.finish()
    good = statuses == [0, 0] and "then exit" in job.logs[1]
    table.report("Ctrl-C", [] if good else [f"{statuses}\n{job.log()}"], 2)
    assert good


@pytest.mark.parametrize("processes", [1, 2])
def test_ten_interruptions_change_no_loss(table, cache, tmp_path, processes):
    # More steps than ten interruptions allow; steps of two processes are slower.
    steps = 400 // processes
    fields = FIELDS | {"num_train_steps": steps, "eval_interval_steps": 0}
    whole = run(Settings(tmp_path / "whole", processes, cache, fields))
    want = losses(whole.settings.directory)
    chain = Chain(Settings(tmp_path / "run", processes, cache, fields), want, 0.0, SEED + processes)
    for number in range(10):
        interrupt, name = (chain.terminate, "SIGTERM") if number % 3 == 2 else (chain.kill, "SIGKILL")
        phase, problems = interrupt(processes, ("train", "save")[number % 2])
        table.report(f"{name} in {phase}, exact curve", problems, processes)
        assert steps_on_disk(chain.directory)[-1:] != [steps], "the run ended before its last interruption"
    run(chain.settings)
    problems = [] if losses(chain.directory) == want else ["the losses differ from those of the uninterrupted run"]
    table.report("loss curve after 10 interruptions", problems, processes)
    assert not problems
    assert not any(kind.endswith("exact curve") and count for kind, count in table.lost.items()), str(table)


def test_a_supervised_job_continues_with_the_remaining_processes(reference, table, cache, tmp_path):
    fields = FIELDS | {"num_train_steps": 100}
    settings = Supervised(tmp_path / "run", 2, cache, fields)
    with started(settings) as job:
        job.wait_for_line("saving step 8")
        supervisor = job.processes[0].pid
        trainers = pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        os.kill(int(trainers[1]), signal.SIGKILL)
        statuses = job.finish()
    problems = [] if statuses == [0] and "try 2 with 1 processes" in job.logs[0] else [f"{statuses}\n{job.log()}"]
    want = pytest.approx({step: loss for step, loss in reference.items() if step <= 100}, rel=TOLERANCE)
    problems += [] if losses(settings.directory) == want else ["the losses differ"]
    table.report("SIGKILL under the supervisor", problems, 2)
    assert not problems

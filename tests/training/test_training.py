"""The main road, for real: processes, files, kills. Mesh of 8, uneven vocabulary, resume, evaluation, decode."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

# One worker: what the runs share is made once.
pytestmark = pytest.mark.xdist_group("training")
TINY = "lm.stdlib.StdlibBytesTiny"
STEPS = 12
# Every step's loss is written, a checkpoint every third.
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": STEPS,
    "log_train_output_interval_steps": 4,
}


def command(directory: pathlib.Path, *args: str) -> list[str]:
    fields = [f"--fdl.set=task.train.{name}={value}" for name, value in FIELDS.items()]
    return [sys.executable, "-m", "spmd_trainer.main", f"--exp={TINY}", f"--job_log_dir={directory}", *fields, *args]


def environment() -> dict[str, str]:
    """The tests' own, less the eight devices: making them is the command's."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


def run(directory: pathlib.Path, *args: str) -> str:
    result = subprocess.run(command(directory, *args), capture_output=True, text=True, timeout=600, env=environment())
    assert result.returncode == 0, result.stderr
    return result.stderr


def metrics(directory: pathlib.Path, name: str) -> dict[int, dict[str, float]]:
    """The last record of each step: a resumed run writes the steps since its checkpoint again."""
    lines = (directory / "summaries" / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def losses(directory: pathlib.Path) -> list[float]:
    return [metrics(directory, "train")[step]["loss"] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[pathlib.Path, str]:
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    return directory, run(directory)


def test_loss_falls_and_progress_is_shown(uninterrupted):
    directory, log = uninterrupted
    curve = losses(directory)
    assert curve[-1] < curve[0] - 0.5
    line = next(line for line in log.splitlines() if f"step 8/{STEPS}" in line)
    for word in ("loss", "bits per byte", "tokens/s", "ms/step", "ETA"):
        assert word in line


def test_tensorboard_reads_the_event_files(uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, _ = uninterrupted
    for name, steps in (("train", list(range(1, STEPS + 1))), ("eval_heldout", [STEPS])):
        accumulator = EventAccumulator(str(directory / "summaries" / name), size_guidance={"tensors": 0})
        accumulator.Reload()
        tag = "loss" if name == "train" else "bits_per_byte"
        assert tag in accumulator.Tags()["tensors"] + accumulator.Tags()["scalars"]
        events = accumulator.Tensors(tag) if tag in accumulator.Tags()["tensors"] else accumulator.Scalars(tag)
        assert [event.step for event in events] == steps


@pytest.mark.full
def test_directory_says_what_the_run_was(uninterrupted):
    directory, _ = uninterrupted
    assert f"task.train.num_train_steps: {STEPS}" in (directory / "config.txt").read_text().splitlines()
    report = json.loads((directory / "sharding_report.json").read_text())
    assert "logits_ffn/linear/w" in json.dumps(report)
    assert sorted(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())[-1] == STEPS


def test_killed_and_started_again_the_curve_is_the_same_numbers(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    train_file = directory / "summaries" / "train" / "metrics.jsonl"
    process = subprocess.Popen(command(directory), stderr=subprocess.PIPE, text=True, env=environment())
    deadline = time.monotonic() + 300
    # Past the first whole checkpoint after step 0, somewhere in the middle of a step.
    while not (list((directory / "checkpoints").glob("[1-9]*")) and train_file.exists()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    log = run(directory)
    resumed = [line for line in log.splitlines() if "restored step" in line]
    assert len(resumed) <= 1
    assert losses(directory) == losses(uninterrupted[0])


@pytest.mark.full
def test_ctrl_c_saves_and_leaves_cleanly_and_the_run_goes_on(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    slow = command(directory, "--fdl.set=task.train.save_interval_steps=1000")
    process = subprocess.Popen(slow, stderr=subprocess.PIPE, text=True, env=environment())
    log = ""
    for line in process.stderr:
        log += line
        if "training from step" in line:
            process.send_signal(signal.SIGINT)
            break
    log += process.communicate(timeout=300)[1]
    assert process.returncode == 0, log
    assert "Traceback" not in log
    first, saved = sorted(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())
    assert first == 0
    log = run(directory)
    if saved < STEPS:
        assert f"restored step {saved} " in log
    assert losses(directory) == losses(uninterrupted[0])


def test_decode_once_continues_held_out_prompts(uninterrupted):
    directory, _ = uninterrupted
    run(directory, "--mode=decode_once")
    lines = (directory / "decode_out" / "heldout_prompts" / f"step_{STEPS}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["index"] for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert record["prompt"]
        assert 0 < len(record["ids"][0]) <= 6
        assert record["score"] < 0


@pytest.mark.full
def test_eval_job_gives_the_number_that_training_gave(uninterrupted, tmp_path):
    directory, _ = uninterrupted
    during = metrics(directory, "eval_heldout")[STEPS]["bits_per_byte"]
    # In a directory of its own: in the run's, it would find this step evaluated.
    run(tmp_path, "--mode=eval", f"--restore_checkpoint_dir={directory / 'checkpoints'}")
    assert metrics(tmp_path, "eval_heldout")[STEPS]["bits_per_byte"] == pytest.approx(during, rel=1e-6)

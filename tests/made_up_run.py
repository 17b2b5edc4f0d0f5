"""The directory of a run that never ran."""

import json
import pathlib

from page_checks import EVIL

EXPERIMENT = "spmd_trainer.experiments.lm.stdlib.StdlibBytesTiny"
PARTS = ("start", "compile", "input", "step", "save", "evaluation", "decode", "other")
LOG = f"""\
2026-01-05 10:00:00,001 INFO job.py:89] 25,799 parameters
2026-01-05 10:00:01,001 WARNING invalid_steps.py:120] step 12 is invalid: loss nan
2026-01-05 10:00:02,001 WARNING invalid_steps.py:120] step 37 is invalid: loss nan
2026-01-05 10:00:03,001 ERROR mine.py:7] a message {EVIL}
of two lines
2026-01-05 10:00:04,001 INFO train.py:9] going on
"""


def write_lines(path: pathlib.Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def times_line(start: float, first_step: int, step: int, **more) -> dict:
    seconds = dict.fromkeys(PARTS, 0.0) | {
        "start": 2.0,
        "compile": 8.0,
        "step": 1.0 * (step - first_step),
        "input": 5.0,
    }
    return {
        "start": start, "seconds": seconds, "steps": step - first_step, "first_step": first_step, "step": step,
        "time": start + sum(seconds.values()), **more,
    }  # fmt: skip


def report(mesh=(("replica", 1), ("data", 4), ("mdl", 2))) -> dict:
    variable = {
        "path": f"mdl_vars/params/w{EVIL}", "kind": "parameters", "dtype": "float32", "logical_shape": [30, 8],
        "padded_shape": [32, 8], "spec": [["data"], []], "spec_text": "P('data', None)", "bytes_per_device": 256,
        "padding_bytes": 64, "logical_bytes": 960, "reason": "split over data",
    }  # fmt: skip
    totals = {
        "num_variables": 1, "num_elements": 240, "num_split": 1, "num_replicated": 0, "num_padded": 1,
        "logical_bytes": 960, "padding_bytes": 64, "bytes_per_device": 256, "replicated_bytes_per_device": 0,
    }  # fmt: skip
    return {
        "about": {"experiment": EXPERIMENT, "jax": "0.10.2"},
        "mesh": {"axes": [{"name": name, "size": size} for name, size in mesh], "device_ids": list(range(8))},
        "totals": totals,
        "totals_by_kind": {"parameters": totals, "optimizer_state": dict.fromkeys(totals, 0)},
        "variables": [variable],
    }


def train_line(step: int, shift: float = 0.0, **more) -> dict:
    return {
        "step": step, "loss": 5.0 / (1 + 0.01 * step) + shift, "learning/lr": 1e-3, "learning/raw_grad_norm": 0.5,
        "invalid_steps": 0.0, "steps_per_sec": 10.0, "tokens_per_sec": 2560.0, "mfu": 0.41, "device_peak_bytes": 3.0 * 2**30,
        f"layer/{EVIL}": 0.1 * step, **more,
    }  # fmt: skip


def make_run(
    directory: pathlib.Path, *, shift: float = 0.0, rate: str = "0.005", extra_setting: str = ""
) -> pathlib.Path:
    """A run of 100 steps that was killed at step 60, began again at step 50, and has two invalid steps at 80."""
    directory.mkdir(parents=True)
    about = {
        "experiment": EXPERIMENT, "status": "running",
        "overrides": ["task.train.num_train_steps=100", f"NAME='{EVIL}'"], "parameters": 25799,
        "devices": {"count": 8, "kind": "cpu", "processes": 1}, "versions": {"python": "3.11.7", "jax": "0.10.2"},
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(about))
    settings = [
        f"task.train.learner.rate: {rate}",
        "task.train.num_train_steps: 100",
        "mesh: (replica=1, data=4, mdl=2)",
    ]
    settings += ["global batch rows: 8", *([extra_setting] if extra_setting else [])]
    (directory / "config.txt").write_text("\n".join(settings) + "\n")
    (directory / "config.0001.txt").write_text("\n".join(["task.train.learner.rate: 0.1", *settings[1:]]) + "\n")
    before = [train_line(step, 9.0) for step in range(10, 61, 10)]
    later = [train_line(step, shift, invalid_steps=2.0 * (step >= 80)) for step in range(60, 101, 10)]
    write_lines(directory / "summaries" / "train" / "metrics.jsonl", [*before, *later])
    evals = [
        {"step": s, "log_pplx": 4.0 - 0.01 * s, "accuracy": 0.005 * s, "eval_seconds": 1.0, "identity": "x"}
        for s in (50, 100)
    ]
    write_lines(directory / "summaries" / "eval_heldout" / "metrics.jsonl", evals)
    times = [times_line(1e9, 0, 40), times_line(1e9, 0, 60), times_line(1e9 + 3600, 50, 100, ended="finished")]
    write_lines(directory / "run_times.jsonl", times)
    (directory / "sharding_report.json").write_text(json.dumps(report()))
    (directory / "logs").mkdir()
    (directory / "logs" / "train.log").write_text(LOG, encoding="utf-8")
    for step in (50, 100):
        records = [{"index": n, "prompt": f"prompt {n} {EVIL}", "output": f"step {step} says {n}"} for n in range(3)]
        write_lines(directory / "decode_out" / "prompts" / f"step_{step}.jsonl", records)
    return directory

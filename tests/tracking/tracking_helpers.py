"""What tests of trackers share. Import it before any tracker's package: it keeps them from networks and home directories."""

import atexit
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from etils import epath

HOME = pathlib.Path(tempfile.mkdtemp(prefix="spmd-trainer-trackers-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
os.environ.update(
    WANDB_MODE="offline",
    WANDB_ERROR_REPORTING="false",
    WANDB_DATA_DIR=str(HOME / "wandb_data"),
    WANDB_CACHE_DIR=str(HOME / "wandb_cache"),
    WANDB_CONFIG_DIR=str(HOME / "wandb_config"),
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="true",
    TRACKIO_DIR=str(HOME / "trackio"),
)
for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
    os.environ.pop(name, None)

from spmd_trainer.watch.tracking.base import RunFacts, StepScalars  # noqa: E402
from spmd_trainer.watch.tracking.settings import nested  # noqa: E402

LINES = [
    "task.train.num_train_steps: 200",
    "task.model: LanguageModel",
    "task.model.name: 'lm'",
    "train_datasets[0].files: x",
]
# A decoded text with everything that tables and pages trip over, and one with a picture.
TEXTS = [
    {
        "prompt": "a|b",
        "output": "<b>`*x*`\nü",
        "outputs": ["<b>"],
        "score": -1.5,
        "scores": [-1.5],
        "ids": [[1, 2]],
        "index": 0,
    },
    {"prompt": "second", "output": "", "outputs": [""], "score": None, "scores": [None], "ids": [[]], "index": 1},
]
PICTURES = [{"index": 7, "image": [[[0.0], [1.0]], [[0.5], [None]], [[0.25], [1.0]]], "label": 3, "logits": [0.5, 1.5]}]


def facts(directory, **changes):
    settings = {
        "name": "mine",
        "project": "proj.ect",
        "experiment": "pkg.mod.Exp",
        "settings": nested(LINES),
        "config_text": "\n".join(LINES) + "\n",
        "job_log_dir": epath.Path(directory),
        "tags": ("first", "second"),
    }
    return RunFacts(**{**settings, **changes})


def record(step, **values):
    return StepScalars(step, {f"train/{name}": value for name, value in values.items()}, 1_700_000_000.0 + step)


def page(directory):
    path = epath.Path(directory) / "run.html"
    path.write_text("<!doctype html><title>my run</title>")
    return path


def wandb_records(directory):
    """All records of the run's .wandb files, the oldest first, as wandb's own reader prints them."""
    found = []
    for path in sorted(pathlib.Path(directory).glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([json.loads(line) for line in text.splitlines()])
    return found


def wandb_history(records):
    """{key: value} of each record of the history of one file."""
    return [entry["history"]["item"] for entry in records if entry["type"] == "history"]

"""Fine-tuning as users run it: the same losses on every mesh, and after being killed ten times. Runs by `make interop`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from etils import epath
from hf_models import DATA

from spmd_trainer import sharding
from spmd_trainer.step import pjit
from spmd_trainer.training import experiment_config, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.training.summary_writers import read_metrics

pytestmark = pytest.mark.slow
FOLDER = DATA / "llama_tokenizer"
MESHES = [(1, 1, 1), (1, 4, 2), (2, 2, 2), (1, 2, 3), (2, 1, 4)]
ADAPTERS = ["LORA_TARGETS=all-linear", "LORA_RANK=3", "LORA_DROPOUT=0.1"]
KILLS = 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training files of each experiment."""
    folder = tmp_path_factory.mktemp("files")
    chat = [
        {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(1, 8)
    ]
    pairs = [{"prompt": f"f{n}", "chosen": " return x", "rejected": f" raise {n}"} for n in range(7)]
    for name, rows in (("chat", chat), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("A trainer pads what a mesh does not divide. " * 20)
    return {
        "LoraFromFolder": [f"FILES={folder / 'text.txt'}", "VARIABLE_DTYPE=float32", *ADAPTERS],
        "ChatFromFolder": [f"FILES={folder / 'chat.jsonl'}", *ADAPTERS],
        "DpoFromFolder": [f"FILES={folder / 'pairs.jsonl'}", "REFERENCE=live", *ADAPTERS],
    }


def overrides(files, name, steps):
    return [
        *(f"FOLDER={FOLDER}", "SEQ_LEN=48", "GLOBAL_BATCH_SIZE=3", "LEARNING_RATE=1e-2", "EVAL_INTERVAL_STEPS=0"),
        *(f"NUM_TRAIN_STEPS={steps}", "task.train.summary_interval_steps=1"),
        *files[name],
    ]


def losses(directory):
    return [record["loss"] for _, record in sorted(read_metrics(epath.Path(directory), "train").items())]


@pytest.mark.parametrize("name", ["LoraFromFolder", "ChatFromFolder", "DpoFromFolder"])
def test_every_mesh_has_the_same_losses(name, files, tmp_path):
    found = []
    for mesh in MESHES:
        directory = tmp_path / "x".join(map(str, mesh))
        resolved = experiment_config.resolve(f"lm.finetune.{name}", overrides(files, name, 4))
        axes = list(zip(("replica", "data", "mdl"), mesh, strict=True))
        devices = int(np.prod(mesh))
        resolved.experiment.partitioner = lambda axes=axes, devices=devices: pjit.PjitPartitioner(
            sharding.create_device_mesh(axes, devices=jax.devices()[:devices])
        )
        train.train(Job.build(TrainConfig(resolved, epath.Path(directory))))
        found.append(losses(directory))
    assert found[0][-1] < found[0][0]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["LoraFromFolder", "DpoFromFolder"])
def test_killed_ten_times(name, files, tmp_path):
    """A run that is killed at random moments ends with the numbers of one that is not."""
    steps = 20 * (KILLS + 2)
    settings = [*overrides(files, name, steps), "CHECKPOINT_EVERY_N_STEPS=20", "task.train.save_max_to_keep=2"]

    def start(directory):
        flags = [f"--exp=lm.finetune.{name}", f"--job_log_dir={directory}", *(f"--fdl.set={x}" for x in settings)]
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        return subprocess.Popen([sys.executable, "-m", "spmd_trainer.main", *flags], env=environment)

    whole = tmp_path / "whole"
    assert start(whole).wait() == 0
    killed, rng, kills = tmp_path / "killed", random.Random(0), 0
    while kills < KILLS:
        before = set(killed.glob("checkpoints/*"))
        process = start(killed)
        while process.poll() is None and set(killed.glob("checkpoints/[0-9]*")) <= before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= KILLS // 2
    assert start(killed).wait() == 0
    assert losses(killed) == losses(whole)

"""Runs whose directory is in an object store: train, resume, evaluate, decode. `test_faults_on_stores.py` has the faults."""

import json
import os
import re
import subprocess
import sys

import pytest
from etils import epath
from facts import assert_names
from proxy import Proxy

from spmd_trainer.storage import append
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch.run_times import read_run_times

pytestmark = pytest.mark.xdist_group("storage_runs")  # one run on a disk is compared with all
COMMAND = ("--exp=lm.stdlib.StdlibBytesTiny", "--mesh=replica:1,data:2,mdl:1")
FIELDS = ("save_interval_steps=3", "eval_interval_steps=0", "summary_interval_steps=1")


def run(directory, environment, *args, steps=4, mode="train", cwd):
    command = [sys.executable, "-m", "spmd_trainer.main", *COMMAND, f"--job_log_dir={directory}", f"--mode={mode}"]
    command += [f"--fdl.set=task.train.{field}" for field in (*FIELDS, f"num_train_steps={steps}")]
    # The tests' own flags, less the eight devices: making them is the command's.
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    environment = {**os.environ, "XLA_FLAGS": flags, **environment}
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)


def succeed(*args, **kwargs):
    result = run(*args, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stderr


def losses(directory):
    return {step: record["loss"] for step, record in read_metrics(directory, "train").items()}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The losses of the same run on a disk, by step."""
    directory = tmp_path_factory.mktemp("run")
    succeed(directory / "run", {}, steps=6, cwd=directory)
    return losses(directory / "run")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_round(scheme, address_of, use, tmp_path, on_disk):
    environment = use(scheme, address_of(scheme))
    directory = epath.Path(f"{scheme}://bkt/round")
    succeed(directory, environment, steps=4, cwd=tmp_path)
    assert "restored step 4 from" in succeed(directory, environment, steps=6, cwd=tmp_path)
    assert losses(directory) == on_disk
    assert_names(succeed(directory, environment, steps=6, mode="eval", cwd=tmp_path), "eval heldout", "step 6")
    assert "log_pplx" in read_metrics(directory, "eval_heldout")[6]
    succeed(directory, environment, steps=6, mode="decode_once", cwd=tmp_path)
    assert len((directory / "decode_out/heldout_prompts/step_6.jsonl").read_text().splitlines()) == 5
    log = append.read_joined(directory / "logs" / "train.log")
    assert log.count("training from step") == 2
    assert [(start.first_step, start.step, start.ended) for start in read_run_times(directory)] == [
        (0, 4, "finished"),
        (4, 6, "finished"),
    ]
    written = (directory / "run.html").read_text()
    succeed(directory, environment, mode="page", cwd=tmp_path)
    for page in (written, (directory / "run.html").read_text()):
        data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
        assert data["runs"][0]["notes"] == []
        (loss,) = (chart for chart in data["charts"] if chart["key"] == "train/loss")
        assert (sum(loss["series"][0]["steps"]), loss["series"][0]["values"][-1]) == (6, on_disk[6])
    assert list(tmp_path.iterdir()) == []  # no folder 'gs:'
    assert not os.path.exists(f"/{scheme}")


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.full)])
def test_no_permission_is_status_2_before_anything_else(scheme, address_of, use, tmp_path):
    with Proxy(address_of(scheme)) as proxy:
        proxy.fault = lambda method, path: 403
        result = run(f"{scheme}://bkt/closed", use(scheme, proxy.address), cwd=tmp_path)
        assert len(proxy.requests) < 5
    assert result.returncode == 2, result.stderr
    assert_names(result.stderr, f"spmd-trainer: --job_log_dir={scheme}://bkt/closed", "permission denied")
    assert "Traceback" not in result.stderr

"""TensorBoard event files: TensorBoard reads what is written, and writing them needs no TensorFlow."""

import errno
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
from facts import raises_naming

from spmd_trainer.storage import append
from spmd_trainer.training import event_files
from spmd_trainer.training.summary_writers import SummaryError, SummaryWriters, read_metrics

STEPS = {1: {"loss": 1.5, "layers/0/norm": math.inf}, 3: {"loss": 2.5}, 4: {"loss": 0.25, "tokens": 7}}


def write(directory, steps):
    writers = SummaryWriters(directory)
    for step in steps:
        writers.write("train", step, STEPS[step], {"note": "for metrics.jsonl only"})
    writers.close()


def read_by_accumulator(directory):
    """{tag: {step: value}} as TensorBoard's Python reader sees the files."""
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    accumulator = event_accumulator.EventAccumulator(str(directory / "train"))
    accumulator.Reload()
    return {
        tag: {event.step: tensor_util.make_ndarray(event.tensor_proto).item() for event in accumulator.Tensors(tag)}
        for tag in accumulator.Tags()["tensors"]
    }


# In a process of its own: TensorBoard's server ends with the process that started it.
ASK_DATA_SERVER = """
import json, sys, time
from tensorboard import context
from tensorboard.data import server_ingester
from tensorboard.util import grpc_util

server = server_ingester.SubprocessServerDataIngester(
    server_binary=server_ingester.get_server_binary(),
    logdir=sys.argv[1],
    reload_interval=0,
    channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
)
server.start()
asked = {"experiment_id": "", "plugin_name": "scalars"}
while True:  # the server answers while it is still loading
    known = server.data_provider.list_scalars(context.RequestContext(), **asked)
    if {tag: series.max_step for tag, series in known.get("train", {}).items()} == json.loads(sys.argv[2]):
        break
    time.sleep(0.05)
runs = server.data_provider.read_scalars(context.RequestContext(), **asked, downsample=100)
print(json.dumps({tag: [(datum.step, datum.value) for datum in data] for tag, data in runs["train"].items()}))
"""


def read_by_data_server(directory):
    """{tag: {step: value}} as the server behind TensorBoard's scalars page sees the files."""
    last_steps = {tag: step for step, scalars in sorted(STEPS.items()) for tag in scalars}
    command = [sys.executable, "-c", ASK_DATA_SERVER, str(directory), json.dumps(last_steps)]
    answer = subprocess.run(command, check=True, timeout=100, stdout=subprocess.PIPE).stdout
    return {tag: dict(data) for tag, data in json.loads(answer).items()}


@pytest.mark.parametrize("read", [read_by_accumulator, read_by_data_server])
@pytest.mark.parametrize("files_before", [0, 9])
def test_tensorboard_reads_the_scalars(tmp_path, monkeypatch, read, files_before):
    # TensorBoard reads the files in the order of their names, and drops steps that come after a later one.
    monkeypatch.setattr(event_files, "_FILE_NUMBERS", itertools.count(files_before))
    summaries = tmp_path / "summaries"
    write(tmp_path, [1, 3])
    # A run that was started again writes a second file; TensorBoard shows both as one run.
    write(tmp_path, [4])
    assert len(list((summaries / "train").glob("events.out.tfevents.*"))) == 2
    assert read(summaries) == {"loss": {1: 1.5, 3: 2.5, 4: 0.25}, "layers/0/norm": {1: math.inf}, "tokens": {4: 7.0}}


@pytest.mark.parametrize("read", [read_by_accumulator, read_by_data_server])
def test_steps_that_are_taken_again_replace_the_first_ones(tmp_path, read):
    summaries = tmp_path / "summaries"
    write(tmp_path, [1, 3])
    writers = SummaryWriters(tmp_path)
    writers.replace_from("train", 2)  # the run begins again with the state of step 1
    writers.write("train", 3, {"loss": 9.0})
    writers.write("train", 4, STEPS[4])
    writers.write("eval_heldout", 4, {"loss": 1.0})
    writers.close()
    assert read(summaries) == {"loss": {1: 1.5, 3: 9.0, 4: 0.25}, "layers/0/norm": {1: math.inf}, "tokens": {4: 7.0}}
    assert read_metrics(tmp_path, "train")[3]["loss"] == 9.0


def test_steps_are_replaced_once_something_is_written(tmp_path):
    write(tmp_path, [1, 3])
    writers = SummaryWriters(tmp_path)
    writers.replace_from("train", 1)
    writers.close()
    assert sorted(read_by_accumulator(tmp_path / "summaries")["loss"]) == [1, 3]


def test_listeners_hear_what_is_written(tmp_path):
    heard = []
    writers = SummaryWriters(tmp_path)
    writers.write("train", 1, STEPS[1])
    writers.listen(lambda *about: heard.append(about))
    writers.write("eval_heldout", 3, STEPS[3], {"identity": "x"})
    writers.write("train", 3, {})
    writers.close()
    assert heard == [("eval_heldout", 3, STEPS[3], {"identity": "x"})]
    others = SummaryWriters(tmp_path, enabled=False)
    others.listen(lambda *about: heard.append(about))
    others.write("train", 4, STEPS[4])
    assert len(heard) == 1


def test_each_step_is_in_the_file_at_once(tmp_path):
    writers = SummaryWriters(tmp_path)
    for step in STEPS:
        writers.write("train", step, STEPS[step])
        writers.flush()
        assert sorted(read_by_accumulator(tmp_path / "summaries")["loss"]) == [n for n in STEPS if n <= step]
    writers.close()


def test_a_failed_write_is_raised_at_the_next_call(tmp_path):
    writers = SummaryWriters(tmp_path)
    (tmp_path / "summaries").write_text("a file where the directory should be")
    writers.write("train", 1, {"loss": 1.0})
    with raises_naming(SummaryError, tmp_path / "summaries", os.strerror(errno.ENOTDIR)):
        writers.flush()
    # Raised once: whoever catches it can still save a checkpoint, which flushes.
    writers.write("train", 2, {"loss": 1.0})
    writers.flush()
    writers.close()


@pytest.mark.full
@pytest.mark.parametrize("installed", [True, False])
def test_a_training_run_does_not_import_tensorflow(tmp_path, installed):
    code = f"""
import sys
if not {installed}:
    sys.modules["tensorflow"] = None  # importing it raises ModuleNotFoundError
import spmd_trainer as st
fields = ["task.train.num_train_steps=2", "task.train.summary_interval_steps=1"]
result = st.train("synthetic.structures.TinyLm", {str(tmp_path)!r}, overrides=fields)
assert "heldout/log_pplx" in result.metrics
assert sys.modules.get("tensorflow") is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert {1, 2} == set(read_by_accumulator(tmp_path / "summaries")["loss"])


class Disk:
    """Fails writes of growing files by script."""

    def __init__(self, monkeypatch, errors):
        self._errors = list(errors)
        real = append._LocalFile.write

        def write(file, data):
            if self._errors and (error := self._errors.pop(0)) is not None:
                raise error
            real(file, data)

        monkeypatch.setattr(append._LocalFile, "write", write)
        monkeypatch.setattr("spmd_trainer.storage.retry.time.sleep", lambda seconds: None)


def test_a_passing_error_is_a_warning(tmp_path, monkeypatch, caplog):
    error = OSError(errno.EIO, "Input/output error")
    Disk(monkeypatch, [None, error, error, None])
    write(tmp_path, [1, 3])
    assert sorted(read_metrics(tmp_path, "train")) == [1, 3]
    assert read_by_accumulator(tmp_path / "summaries")["loss"] == {1: 1.5, 3: 2.5}
    assert "failed (OSError: [Errno 5] Input/output error); attempt 2 of 5" in caplog.text


def test_a_full_disk_is_an_error_that_is_raised_once(tmp_path, monkeypatch):
    writers = SummaryWriters(tmp_path)
    writers.write("train", 1, STEPS[1])
    writers.flush()
    Disk(monkeypatch, [OSError(errno.ENOSPC, "No space left on device")] * 100)
    writers.write("train", 3, STEPS[3])
    with raises_naming(SummaryError, tmp_path / "summaries", os.strerror(errno.ENOSPC), "mended"):
        writers.flush()
    writers.write("train", 4, STEPS[4])
    writers.flush()
    writers.close()
    assert sorted(read_metrics(tmp_path, "train")) == [1]

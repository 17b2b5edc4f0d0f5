"""Event files with more than scalars, read back by TensorBoard's own reader."""

import io

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.plugins.hparams import api_pb2, metadata
from tracking_helpers import PICTURES, TEXTS, facts, record

from spmd_trainer.training.summary_writers import SummaryWriters
from spmd_trainer.watch.tracking.base import Histogram
from spmd_trainer.watch.tracking.tensorboard import TensorboardTracker


def read(directory):
    accumulator = event_accumulator.EventAccumulator(str(directory), size_guidance={event_accumulator.TENSORS: 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    tracker = TensorboardTracker()
    tracker.open(facts(directory, first_step=2))
    tracker.scalars([record(3, loss=2.0)])
    tracker.samples(3, "prompts", TEXTS)
    tracker.samples(3, "pictures", PICTURES)
    tracker.histograms(3, {"variables/w": Histogram(np.array([1, 2]), np.array([0.0, 0.5, 1.0]))})
    tracker.close("failed")
    return directory


def text(directory, tag):
    (event,) = read(directory).Tensors(tag)
    return event.step, event.tensor_proto.string_val[0].decode()


def test_the_config_is_a_text(tracked):
    step, content = text(tracked / "summaries/train", "config")
    assert step == 2
    assert "    task.train.num_train_steps: 200" in content.splitlines()


def test_samples_are_a_table_without_markup(tracked):
    step, content = text(tracked / "summaries/decode_prompts", "samples")
    assert step == 3
    head, _, first, second = content.splitlines()
    assert head == "| index | prompt | output | score |"
    assert first == r"| 0 | a\|b | \<b\>\`\*x\*\`↵ ü | -1.5 |"
    assert second == "| 1 | second |  | null |"


def test_pictures(tracked):
    from PIL import Image

    (event,) = read(tracked / "summaries/decode_pictures").Tensors("samples/image/7")
    width, height, png = event.tensor_proto.string_val
    assert (width, height) == (b"2", b"3")
    assert np.asarray(Image.open(io.BytesIO(png)))[:, :, 0].tolist() == [[0, 255], [128, 0], [64, 255]]


def test_histograms(tracked):
    (event,) = read(tracked / "summaries/train_tracked").Tensors("variables/w")
    buckets = np.frombuffer(event.tensor_proto.tensor_content, np.float64).reshape(-1, 3)
    assert buckets.tolist() == [[0.0, 0.5, 1.0], [0.5, 1.0, 2.0]]


def test_hyperparameters_and_status(tracked):
    found = read(tracked / "summaries/train").PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["task.train.num_train_steps"].number_value == 200
    assert start.hparams["experiment"].string_value == "pkg.mod.Exp"
    end = metadata.parse_session_end_info_plugin_data(found[metadata.SESSION_END_INFO_TAG])
    assert end.status == api_pb2.STATUS_FAILURE


def test_scalars_are_left_to_the_summaries(tracked):
    assert "train/loss" not in read(tracked / "summaries/train").Tags()["tensors"]


def test_a_reader_that_is_open_misses_nothing_of_the_trainer(tmp_path):
    tracker = TensorboardTracker()
    tracker.open(facts(tmp_path))
    summaries = SummaryWriters(tmp_path)
    summaries.write("train", 1, {"loss": 3.0})
    summaries.flush()
    both = [read(tmp_path / "summaries/train")]
    for step in (2, 3):
        tracker.histograms(step, {"variables/w": Histogram(np.array([1, 2]), np.array([0.0, 0.5, 1.0]))})
        both += [read(tmp_path / "summaries/train_tracked")] if step == 2 else []
        summaries.write("train", step, {"loss": 3.0 - step})
        summaries.flush()
        for reader in both:
            reader.Reload()
    summaries.close()
    train, own = both
    assert [event.step for event in train.Tensors("loss")] == [1, 2, 3]
    assert [event.step for event in own.Tensors("variables/w")] == [2, 3]


def test_histograms_of_steps_that_are_taken_again_are_replaced(tmp_path):
    for first_step, steps in ((0, (2, 4)), (2, (3, 4))):
        tracker = TensorboardTracker()
        tracker.open(facts(tmp_path, first_step=first_step))
        for step in steps:
            tracker.histograms(step, {"variables/w": Histogram(np.array([1, 2]), np.array([0.0, 0.5, 1.0]))})
    shown = plugin_event_accumulator.EventAccumulator(
        str(tmp_path / "summaries/train_tracked")
    )  # TensorBoard's own pages
    shown.Reload()
    assert [event.step for event in shown.Tensors("variables/w")] == [2, 3, 4]

"""Batch and sequence-length ramps: the rows of step n follow from n alone, through kills, stages and input classes."""

import json
import shutil
import types
from typing import NamedTuple

import jax
import numpy as np
import pytest
from absl import logging as absl_logging
from etils import epath
from facts import assert_names, raises_naming
from praxis import pax_fiddle
from praxis.py_utils import NestedMap
from process_helpers import run_processes
from trained_helpers import make_job

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import cut_rows
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.examples import ArrayInput
from spmd_trainer.inputs.grain_input import GrainInput, GrainStreamInput
from spmd_trainer.inputs.synthetic import SyntheticLmInput
from spmd_trainer.inputs.text import TextInput
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.schedules import PiecewiseByTokens
from spmd_trainer.training import ramps, train
from spmd_trainer.training.ramps import Stage

Config = pax_fiddle.Config
RAMP = "task.train.batch_ramp={0: 2, 2: 5}"
LENGTHS = "task.train.sequence_ramp={0: 8, 3: 32}"
STEPS = 5
ROWS = {0: 2, 1: 2, 2: 5, 3: 5, 4: 5}


def ramp_job(directory, *fields, mesh=(1, 3, 1), **arguments):
    """The tiny language model, whose rows have 32 tokens; meshes on which most stages leave rows over."""
    fields = (
        f"task.train.num_train_steps={STEPS}",
        "task.train.save_interval_steps=1",
        "task.train.save_max_to_keep=9",
        "task.train.summary_interval_steps=1",
        *fields,
    )
    return make_job(directory, mesh=mesh, fields=fields, **arguments)


def losses(directory):
    lines = (directory / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


class Trained(NamedTuple):
    """A run without a kill: its directory, the tokens of each batch that was put on the devices, and its log."""

    directory: epath.Path
    seen: list[np.ndarray]
    log: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Through two stages of rows and two of lengths: three stages."""
    directory, seen, lines, put = epath.Path(tmp_path_factory.mktemp("whole")), [], [], Layout.put

    def noting(self, batch):
        seen.append(np.array(batch["ids"]))
        return put(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "put", noting)
        patch.setattr(
            absl_logging, "info", lambda text, *about, **_: lines.append(str(text) % about if about else str(text))
        )
        train.train(ramp_job(directory, RAMP, LENGTHS))
    return Trained(directory, seen, "\n".join(lines))


@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 3, 4))])
def test_a_run_that_goes_on_from_any_step_has_the_losses_of_one_that_was_not_killed(step, whole, tmp_path):
    shutil.copytree(whole.directory / "checkpoints" / str(step), tmp_path / "checkpoints" / str(step))
    train.train(ramp_job(tmp_path, RAMP, LENGTHS))
    found, expected = losses(tmp_path), losses(whole.directory)
    assert list(found) == list(range(step + 1, STEPS + 1))
    assert found == {number: expected[number] for number in found}  # bit for bit


def test_every_row_is_trained_on_once_in_the_shapes_of_the_stages(whole):
    job = ramp_job("/nonexistent")
    data = job.build_input(job.config.experiment.config.train_datasets[0])
    stream = np.concatenate([data.get_next()["ids"] for _ in range(4)])
    first = 0
    for step, rows in ROWS.items():
        expected = stream[first : first + rows].reshape(-1, 8 if step < 3 else 32)
        # Batches that were ready when a stage ended were dropped.
        assert any(batch.shape == expected.shape and (batch == expected).all() for batch in whole.seen), step
        first += rows
    assert_names(whole.log, "training from step 0 to 5, with 2 rows, rows of 8 tokens from step 0", "compiling ahead")
    assert_names(whole.log, "goes on with 5 rows, rows of 32 tokens from step 3")
    for line in (whole.directory / "summaries/train/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens = ROWS[record["step"] - 1] * 32
        if "tokens_per_sec" in record:
            assert record["tokens_per_sec"] == pytest.approx(record["steps_per_sec"] * tokens)


_IN_PROCESSES = """
from trained_helpers import make_job
from spmd_trainer.training import train
directory, steps = arguments
fields = ("task.train.save_interval_steps=1", "task.train.summary_interval_steps=1", f"task.train.num_train_steps={steps}",
          "task.train.batch_ramp={0: 2, 2: 6}", "task.train.sequence_ramp={0: 16, 3: 32}", "task.train.save_max_to_keep=9")
train.train(make_job(directory, mesh=(1, 4, 1), fields=fields))
"""


@pytest.mark.full
def test_two_processes_train_a_ramp_and_one_goes_on(tmp_path):
    """Two rows on four devices in two processes, then six: rows are added on each process in both stages."""
    for done in run_processes(_IN_PROCESSES, tmp_path / "two", 4, devices=2, timeout=300):
        assert done.returncode == 0, done.stderr
    fields = ("task.train.batch_ramp={0: 2, 2: 6}", "task.train.sequence_ramp={0: 16, 3: 32}")
    train.train(ramp_job(tmp_path / "one", *fields, "task.train.num_train_steps=4", mesh=(1, 4, 1)))
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert list(two) == list(one) == [1, 2, 3, 4]
    assert two == pytest.approx(one, rel=1e-5)
    for later in (3, 4):
        shutil.rmtree(tmp_path / "two" / "checkpoints" / str(later))
    shutil.copytree(tmp_path / "two" / "checkpoints", tmp_path / "on" / "checkpoints")
    train.train(ramp_job(tmp_path / "on", *fields, "task.train.num_train_steps=4", mesh=(1, 4, 1)))
    assert losses(tmp_path / "on") == pytest.approx({step: one[step] for step in (3, 4)}, rel=1e-5)


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs(tmp_path):
    """{name: config of a training input with 64 different rows or more}."""
    (tmp_path / "text.txt").write_text("".join(f"{number:05d} " for number in range(2000)))
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} " * (1 + number % 7)}) + "\n" for number in range(400))
    )
    common = {"name": "train", "is_training": True, "batch_size": 2, "input_random_seed": 3}
    corpus = Documents(str(tmp_path / "lines.jsonl"))
    return {
        "text": Config(TextInput, files=[str(tmp_path / "text.txt")], seq_len=16, **common),
        "synthetic": Config(SyntheticLmInput, seq_len=16, vocab_size=50, **common),
        "corpus": Config(CorpusInput, source=corpus, seq_len=16, window_rows=5, **common),
        "corpus, split": Config(CorpusInput, source=corpus, seq_len=16, window_rows=5, packing="split", **common),
        "arrays": Config(ArrayInput, arrays={"x": np.arange(100)}, **common),
        "grain": Config(GrainInput, dataset=grain_numbers, **common),
    }


def grain_numbers():
    import grain

    return grain.MapDataset.range(100).map(lambda number: {"x": np.int32(number)})


def numbers_of(batch):
    return np.asarray(batch["ids"] if "ids" in batch else batch["x"]).reshape(len(batch["eval_sample_weights"]), -1)


@pytest.mark.parametrize("name", ["text", "synthetic", "corpus", "corpus, split", "arrays", "grain"])
def test_an_input_goes_on_with_the_next_row_at_any_batch_size(name, tmp_path):
    config = inputs(tmp_path)[name]
    data = pax_fiddle.build(config)
    assert data.takes_any_batch_size
    stream = np.concatenate([numbers_of(data.get_next()) for _ in range(16)])
    first, state = 0, None
    for step in range(8):
        stage = ramps.stage_at(ramps.stages_of(train_p(batch_ramp={0: 1, 2: 3, 5: 4})), step)
        # A process that is killed after each step, and two processes that share the rows.
        data = pax_fiddle.build(ramps.with_rows(config.clone(), stage, 1))
        if state is not None:
            data.set_state(state)
        batch = numbers_of(data.get_next())
        np.testing.assert_array_equal(batch, stream[first : first + stage.rows])
        first, state = first + stage.rows, data.get_state()
    assert first == 2 * 1 + 3 * 3 + 3 * 4


def train_p(**ramps):
    return types.SimpleNamespace(**{"batch_ramp": None, "sequence_ramp": None, **ramps})


def test_two_processes_share_the_rows_of_each_stage(tmp_path):
    config = inputs(tmp_path)["text"]
    data = pax_fiddle.build(config)
    stream = np.concatenate([numbers_of(data.get_next()) for _ in range(4)])
    states = [None, None]
    first = 0
    for rows in (2, 4):
        parts = []
        for process in range(2):
            own = config.clone().set(num_infeed_hosts=2, infeed_host_index=process)
            built = pax_fiddle.build(ramps.with_rows(own, Stage(0, rows, None), 2))
            if states[process] is not None:
                built.set_state(states[process])
            parts.append(numbers_of(built.get_next()))
            states[process] = built.get_state()
        np.testing.assert_array_equal(np.concatenate(parts), stream[first : first + rows])
        first += rows


def test_rows_are_cut_without_losing_a_token():
    """Two segments and padding, cut in the middle of the second."""
    row = {
        "ids": [[9, 1, 2, 9, 3, 4, 5, 0]],
        "labels": [[1, 2, 7, 3, 4, 5, 6, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 2, 2, 0]],
        "segment_pos": [[0, 1, 2, 0, 1, 2, 3, 0]],
        "paddings": [[0.0] * 7 + [1.0]],
        "weights": [[1.0] * 7 + [0.0]],
        "eval_sample_weights": [1.0],
    }
    cut = cut_rows(NestedMap({name: np.array(x) for name, x in row.items()}), 4)
    assert cut.ids.tolist() == [[9, 1, 2, 9], [3, 4, 5, 0]]
    assert cut.labels.tolist() == [[1, 2, 7, 3], [4, 5, 6, 0]]
    assert cut.segment_pos.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert cut.weights.sum() == 7
    assert cut_rows(cut, 1).eval_sample_weights.tolist() == [1, 1, 1, 1, 1, 1, 1, 0]


# --- what doesn't go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        (["task.train.batch_ramp={1: 2}"], ["batch_ramp", "{0: value"]),
        (["task.train.batch_ramp={0: 0}"], ["batch_ramp", "{0: value"]),
        (["task.train.sequence_ramp={0: 5}"], ["sequence_ramp", 5, 32]),
    ],
)
def test_ramps_that_are_none_are_refused(fields, facts, tmp_path):
    with raises_naming(UserError, *facts):
        ramp_job(tmp_path, *fields)


def test_inputs_that_cannot_are_refused_by_name(tmp_path):
    stage = Stage(0, 2, None)
    with raises_naming(UserError, "GrainStreamInput", "'stream'", "TextInput", "CorpusInput"):
        ramps.with_rows(Config(GrainStreamInput, name="stream"), stage, 1)
    config = inputs(tmp_path)["corpus"].clone().set(segment_len={0: 8, 10: 16})
    with raises_naming(UserError, "batch_ramp", "segment_len", "'train'"):
        ramps.check_input(pax_fiddle.build(config), [stage, Stage(4, 4, None)])
    with raises_naming(UserError, "3 processes", "4 rows"):
        ramps.shapes_in(Stage(0, 4, None), {}, 3)


def test_a_schedule_by_tokens_counts_those_of_each_stage(tmp_path):
    def customize(config):
        config.task.train.learner.optimizer.lr_schedule = Config(
            PiecewiseByTokens, tokens=[0, 1000], values=[0.0, 1.0], tokens_per_step=64
        )

    with raises_naming(UserError, "tokens_per_step", "64", "{0: 64, 2: 160}"):
        ramp_job(tmp_path, RAMP, customize=customize)


def test_values_by_tokens_at_twenty_steps_of_a_ramp():
    """Sizes of steps change in the middle of a line, at its end, and after it."""
    sizes = {0: 10, 5: 20, 12: 40, 18: 5}
    of_step = [next(sizes[first] for first in reversed(sizes) if first <= step) for step in range(25)]
    counts = np.concatenate([[0], np.cumsum(of_step)])
    tokens, values = [30, 190, 190, 400], [1.0, 3.0, 2.0, 0.5]
    schedule = pax_fiddle.build(Config(PiecewiseByTokens, tokens=tokens, values=values, tokens_per_step=sizes))
    found = jax.vmap(schedule.value_at)(np.arange(25))
    for step in range(25):
        left = max((i for i, count in enumerate(tokens) if count <= counts[step]), default=None)
        if left is None or left == 3:
            expected = values[0] if left is None else values[-1]
        else:
            share = (counts[step] - tokens[left]) / (tokens[left + 1] - tokens[left])
            expected = values[left] + share * (values[left + 1] - values[left])
        assert found[step] == pytest.approx(expected, rel=1e-5), step


def test_the_time_left_counts_rows():
    stages = ramps.stages_of(train_p(batch_ramp={0: 2, 10: 4, 20: 8}))
    assert ramps.steps_left(stages, 0, 30) == (10 * 2 + 10 * 4 + 10 * 8) / 2
    assert ramps.steps_left(stages, 15, 30) == (5 * 4 + 10 * 8) / 4
    assert ramps.steps_left(stages, 25, 30) == 5
    assert ramps.steps_left(stages, 3, 15) == (7 * 2 + 5 * 4) / 2
    assert ramps.steps_left((), 3, 15) == 12

"""An input that doesn't give what its specs declare is refused at its first batch, leaf by leaf."""

import json
import threading

import jax
import numpy as np
import pytest
from facts import missing_facts, raises_naming
from praxis import base_input, pax_fiddle
from praxis.py_utils import NestedMap
from trained_helpers import STEPS, make_job, trained

from spmd_trainer.errors import UserError
from spmd_trainer.tasks.lm import input_generator
from spmd_trainer.training import dataset_batches, evaluate, start_up, train
from spmd_trainer.training.dataset_batches import _num_batches
from spmd_trainer.training.job import Job
from spmd_trainer.training.summary_writers import read_metrics

pytestmark = pytest.mark.xdist_group("trained")

DECLARED = NestedMap(
    ids=jax.ShapeDtypeStruct((4, 8), np.int32), image=NestedMap(pixels=jax.ShapeDtypeStruct((4, 3), np.float32))
)


def batch(**changes):
    return NestedMap(ids=np.zeros((4, 8), np.int32), image=NestedMap(pixels=np.zeros((4, 3), np.float32)), **changes)


def test_what_is_declared_passes():
    dataset_batches.check_specs("x", batch(), DECLARED)


@pytest.mark.parametrize(
    ("change", "field", "facts"),
    [
        (lambda b: b.update(ids=b.ids.astype(np.int64)), "ids", ("is int64 [4, 8]", "as int32 [4, 8]")),
        (lambda b: b.update(ids=b.ids[:, :7]), "ids", ("is int32 [4, 7]", "as int32 [4, 8]")),
        (lambda b: b.image.pop("pixels"), "image/pixels", ("missing", "as float32 [4, 3]")),
        (lambda b: b.update(more=np.zeros(4, np.float32)), "more", ("float32 [4]", "not declared")),
    ],
)
def test_each_difference_is_named(change, field, facts):
    given = batch()
    change(given)
    with raises_naming(UserError, "first batch", "input 'x'", field, *facts) as error:
        dataset_batches.check_specs("x", given, DECLARED)
    assert set(missing_facts(str(error.value), "ids", "image/pixels", "more")) == {"ids", "image/pixels", "more"} - {
        field
    }


def test_a_long_list_is_cut():
    given = NestedMap({f"leaf{i}": np.zeros(1) for i in range(9)})
    with pytest.raises(UserError, match="and 4 more"):
        dataset_batches.check_specs("x", given, NestedMap())


class Casts:
    """An input whose labels have another dtype than is declared."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def get_next_padded(self):
        given = self._source.get_next_padded()
        return NestedMap({**given, "labels": given.labels.astype(np.int64)})


def cast_inputs(monkeypatch):
    """Makes every job's inputs give labels of another dtype than is declared."""
    build = Job.build_input
    monkeypatch.setattr(Job, "build_input", lambda job, input_p: Casts(build(job, input_p)))


@pytest.mark.full
def test_training_and_evaluation_refuse_such_an_input_unless_told_not_to_look(tmp_path, monkeypatch):
    checkpoints = trained() / "checkpoints"
    cast_inputs(monkeypatch)
    fields = ("task.train.num_train_steps=1", "task.train.eval_interval_steps=0")
    job = make_job(tmp_path / "a", mesh=(1, 1, 1), fields=fields, enable_checkpoint_saving=False)
    with raises_naming(UserError, "first batch", "'stdlib_train'", "labels is int64 [8, 32]", "as int32"):
        train.train(job)
    fields = (*fields, "task.train.enforce_input_specs=False")
    unchecked = make_job(tmp_path / "b", mesh=(1, 1, 1), fields=fields, enable_checkpoint_saving=False)
    assert train.train(unchecked).step == 1

    job = make_job(tmp_path / "c", mesh=(1, 1, 1), restore_checkpoint_dir=checkpoints, mode="eval")
    with raises_naming(UserError, "first batch", "'heldout'", "labels is int64 [8, 32]"):
        evaluate.evaluate_checkpoints(job)


def test_a_training_input_is_refused_before_the_step_is_compiled(tmp_path, monkeypatch):
    cast_inputs(monkeypatch)
    job = make_job(tmp_path, mesh=(1, 1, 1), enable_checkpoint_saving=False)
    refused, compiled = threading.Event(), threading.Event()

    def compile_train_step(job):
        refused.wait(60)
        compiled.set()

    monkeypatch.setattr(start_up, "compile_train_step", compile_train_step)
    with raises_naming(UserError, "first batch", "'stdlib_train'", "labels is int64"):
        train.train(job)
    assert not compiled.is_set()
    refused.set()


@pytest.mark.parametrize("interval", [2, 0])
def test_a_file_to_evaluate_that_cannot_be_read_is_refused_at_the_start(tmp_path, monkeypatch, interval):
    bad = tmp_path / "heldout.jsonl"
    bad.write_text('{"body": "no text"}\n')
    good = tmp_path / "train.jsonl"
    good.write_text('{"text": "a text"}\n')
    fields = (
        f"FILES={str(good)!r}",
        f"EVAL_FILES={str(bad)!r}",
        "NUM_LAYERS=1",
        "MODEL_DIMS=8",
        "NUM_HEADS=2",
        "HIDDEN_DIMS=8",
        "MAX_SEQ_LEN=8",
        f"task.train.eval_interval_steps={interval}",
    )
    job = make_job(tmp_path / "run", exp="lm.own_text.OwnText", mesh=(1, 1, 1), fields=fields)
    read = threading.Event()

    def compile_train_step(job):
        read.wait(60 if interval else 0)
        raise UserError("the compiler was waited for")

    monkeypatch.setattr(start_up, "compile_train_step", compile_train_step)
    facts = (
        ("'heldout'", "heldout.jsonl:1", "'text'") if interval else ("compiler",)
    )  # it is not read if it isn't evaluated
    with raises_naming(UserError, *facts):
        train.train(job)
    read.set()
    # Nothing of this start is taken by later commands: it has not begun to train.
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert {"overrides", "settings"}.isdisjoint(record)


class PlainPaxInput(base_input.BaseInput):
    """Two batches, without input_specs() of its own and with praxis' padding: zeros."""

    def __post_init__(self):
        super().__post_init__()
        self._given = 0

    def get_next(self):
        if self._given == 2:
            raise StopIteration
        self._given += 1
        rows = np.random.default_rng(self._given).integers(1, 256, (8, 32)).astype(np.int32)
        ones = np.ones((8, 32), np.float32)
        return NestedMap(
            ids=rows,
            labels=np.roll(rows, -1, 1),
            paddings=0 * ones,
            weights=ones,
            segment_ids=np.ones((8, 32), np.int32),
            segment_pos=np.tile(np.arange(32, dtype=np.int32), (8, 1)),
            eval_sample_weights=np.ones(8, np.float32),
        )

    def reset(self):
        super().reset()
        self._given = 0


def plain_pax(config):
    config.eval_datasets = [pax_fiddle.Config(PlainPaxInput, name="heldout", batch_size=8, is_training=False)]


@pytest.mark.parametrize(("customize", "kept"), [(lambda config: None, True), (plain_pax, False)])
def test_the_input_that_the_start_has_checked_is_evaluated_from_its_beginning(tmp_path, monkeypatch, customize, kept):
    fields = ["task.train.eval_interval_steps=2"]
    job = make_job(tmp_path, mesh=(1, 1, 1), customize=customize, fields=fields)
    (input_p,) = job.config.experiment.config.eval_datasets
    wanted = job.build_input(input_p)
    start_up._check_datasets(job)
    checked = dict(job._kept)
    assert len(checked) == kept
    found = evaluate.EvalDataset(job, input_p, 0)
    assert list(checked.values()) == ([found._input] if kept else [])
    assert not job._kept  # another one is built anew
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, found._input.get_next_padded(), wanted.get_next_padded())


@pytest.mark.full
@pytest.mark.parametrize("customize", [lambda config: None, plain_pax])
def test_rows_that_batch_padding_size_adds_are_no_difference(tmp_path, customize):
    def evaluated(directory, rows):
        def padded(config):
            customize(config)
            config.eval_datasets[0].batch_padding_size = rows

        job = make_job(directory, restore_checkpoint_dir=trained() / "checkpoints", mode="eval", customize=padded)
        evaluate.evaluate_checkpoints(job)
        record = read_metrics(directory, "eval_heldout")[STEPS]
        return {name: record[name] for name in ("log_pplx", "num_predictions", "eval_batches")}

    assert evaluated(tmp_path / "padded", 8) == evaluated(tmp_path / "bare", 0)


@pytest.mark.parametrize(("given", "known"), [(3, 3), (0, None), (-1, None), (None, None)])
def test_no_limit_of_a_pax_input_is_no_number_of_batches(given, known):
    input_p = input_generator.SyntheticLmData.HParams()
    input_p.batch_size, input_p.seq_len = 4, 6
    adaptor = base_input.LingvoInputAdaptor(input=input_p, is_training=False, num_batches=given, reset_for_eval=True)
    assert _num_batches(adaptor) == known


@pytest.mark.parametrize(("given", "known"), [(3, 3), (0, 2), (-1, 2), (None, 2)])
def test_a_pax_input_that_never_ends_gives_as_many_batches_as_it_says(given, known):
    """Without `reset_for_eval`, as in Pax. Before, an evaluation on random data never ended."""
    input_p = input_generator.SyntheticLmData.HParams()
    input_p.batch_size, input_p.seq_len = 4, 6
    adaptor = base_input.LingvoInputAdaptor(
        input=input_p, is_training=False, num_batches=given, reset_for_eval=False, eval_loop_num_batches=2
    )
    assert _num_batches(adaptor) == known

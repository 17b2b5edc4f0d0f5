"""Evaluating trained checkpoints: following a run, exact numbers on any mesh, restarts, early stopping, what is refused."""

import json
import math

import hypothesis
import numpy as np
import pytest
from etils import epath
from facts import raises_naming
from hypothesis import strategies as st
from praxis import pax_fiddle
from trained_helpers import STEPS, logits, make_job, read_lines, restored, trained

from spmd_trainer.checkpointing import CheckpointMismatchError, CheckpointNotFoundError, steps
from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import WeightedMean
from spmd_trainer.training import checkpoints, evaluate, train
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("trained")

# Not metrics of the model.
TIMING = {"eval_batches", "eval_seconds"}


def eval_job(directory, **arguments):
    return make_job(directory, **{"restore_checkpoint_dir": trained() / "checkpoints", "mode": "eval", **arguments})


def evaluated(directory, **arguments):
    evaluate.evaluate_checkpoints(eval_job(directory, **arguments))
    return read_metrics(directory, "eval_heldout")


def numbers(record):
    return {key: value for key, value in record.items() if key not in TIMING | {"step", "identity"}}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    """Metrics, and the outputs of each example, on one device, one example a batch."""
    directory = tmp_path_factory.mktemp("one_by_one")
    fields = ("eval_datasets[0].batch_size=1", "task.evaluate.per_example_outputs=True")
    record = evaluated(directory, mesh=(1, 1, 1), fields=fields)[STEPS]
    return numbers(record), read_lines(directory / f"eval_out/heldout/step_{STEPS}.jsonl")


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ((1, 4, 2), 7),
        pytest.param((2, 2, 2), 8, marks=pytest.mark.full),
        pytest.param((1, 1, 1), 19, marks=pytest.mark.full),
    ],
)
def test_metrics_are_those_of_one_device_and_batch_1(one_by_one, mesh, rows, tmp_path):
    fields = (f"eval_datasets[0].batch_size={rows}", "task.evaluate.per_example_outputs=True")
    record = evaluated(tmp_path, mesh=mesh, fields=fields)[STEPS]
    metrics, examples = one_by_one
    assert numbers(record) == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    ours = read_lines(tmp_path / f"eval_out/heldout/step_{STEPS}.jsonl")
    assert [row["index"] for row in ours] == list(range(19)) == [row["index"] for row in examples]
    assert [row["labels"] for row in ours] == [row["labels"] for row in examples]
    np.testing.assert_allclose([row["scores"] for row in ours], [row["scores"] for row in examples], rtol=1e-5)


@pytest.mark.full
def test_bits_per_byte_is_what_the_logits_give_by_hand(one_by_one):
    job, state = restored((1, 1, 1))
    data = job.build_input(job.config.experiment.config.eval_datasets[0])
    nats, tokens = 0.0, 0.0
    for _ in range(data.num_batches):
        batch = data.get_next()
        scores = np.asarray(logits(job, state, batch.ids), np.float64)
        shifted = scores - scores.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        picked = np.take_along_axis(logprobs, batch.labels[..., None], -1)[..., 0]
        nats -= (picked * batch.weights).sum()
        tokens += batch.weights.sum()
    assert tokens == 19 * 32
    assert one_by_one[0]["bits_per_byte"] == pytest.approx(nats / tokens / math.log(2), abs=1e-5)
    assert one_by_one[0]["num_predictions"] == tokens


@pytest.mark.full
def test_a_restart_evaluates_nothing_twice_and_a_change_is_evaluated(tmp_path):
    def add_second(config):
        second = config.eval_datasets[0].clone()
        config.eval_datasets.append(second.set(name="second", max_windows=3))

    evaluated(tmp_path, customize=add_second)
    evaluated(tmp_path, customize=add_second, mesh=(1, 2, 2))
    for name in ("heldout", "second"):
        lines = (tmp_path / "summaries" / f"eval_{name}" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [STEPS]
    assert read_metrics(tmp_path, "eval_second")[STEPS]["num_predictions"] == 96
    evaluated(tmp_path, fields=("eval_datasets[0].max_windows=2",))
    assert read_metrics(tmp_path, "eval_heldout")[STEPS]["num_predictions"] == 64


def test_a_line_that_a_kill_cut_off_is_no_evaluation(tmp_path):
    writers = SummaryWriters(tmp_path)
    writers.write("eval_x", 1, {"a": 1.0})
    writers.close()
    with (tmp_path / "summaries/eval_x/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a')
    writers = SummaryWriters(tmp_path)
    writers.write("eval_x", 3, {"a": 3.0}, {"note": "text"})
    writers.close()
    assert read_metrics(tmp_path, "eval_x") == {1: {"step": 1, "a": 1.0}, 3: {"step": 3, "a": 3.0, "note": "text"}}


@pytest.mark.full
def test_each_checkpoint_is_evaluated_as_it_appears(tmp_path, monkeypatch):
    """A training run and an evaluation job side by side, in step with each other."""
    run, job_dir = tmp_path / "run", tmp_path / "job"
    run.mkdir()
    (run / "experiment.json").write_text("{}")
    source, target = trained() / "checkpoints", run / "checkpoints"
    target.mkdir()
    pending = [4, 8, 12]

    def one_more(seconds):
        """Instead of waiting, the training run saves its next checkpoint."""
        (target / str(pending[0])).symlink_to(source / str(pending[0]))
        pending.pop(0)

    monkeypatch.setattr(steps.time, "sleep", one_more)
    records = evaluated(job_dir, restore_checkpoint_dir=epath.Path(target))
    assert sorted(records) == [4, 8, 12]
    assert records[12]["bits_per_byte"] < records[4]["bits_per_byte"]


@pytest.mark.full
def test_following_ends_where_training_ended_early(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "8").symlink_to(trained() / "checkpoints" / "8")
    (run / "run.json").write_text('{"status": "finished", "last_step": 8}')
    assert sorted(evaluated(tmp_path / "job", restore_checkpoint_dir=epath.Path(run / "checkpoints"))) == [8]


def test_training_says_where_it_ended():
    record = json.loads((trained() / "run.json").read_text())
    assert (record["status"], record["last_step"]) == ("finished", STEPS)


def stopping_job(directory, *, patience, steps=10, fields=()):
    """A learning rate so high that held-out loss rises: it is best at the first evaluation."""

    def customize(config):
        config.task.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx", patience=patience)
        config.task.train.learner.optimizer.learning_rate = 5.0

    fields = (f"task.train.num_train_steps={steps}", "task.train.eval_interval_steps=1", *fields)
    return make_job(directory, fields=fields, customize=customize)


@pytest.mark.full
def test_early_stopping_keeps_the_best_checkpoint_and_survives_a_restart(tmp_path):
    train.train(stopping_job(tmp_path, patience=2))
    records = read_metrics(tmp_path, "eval_heldout")
    losses = [records[step]["log_pplx"] for step in sorted(records)]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == best + 2 < 10
    assert [path.name for path in (tmp_path / "best").iterdir() if path.name.isdigit()] == [str(best)]
    assert json.loads((tmp_path / "run.json").read_text())["last_step"] == best + 2

    train.train(stopping_job(tmp_path, patience=2))
    assert len(read_metrics(tmp_path, "eval_heldout")) == best + 2
    job = eval_job(tmp_path / "job", restore_checkpoint_dir=epath.Path(tmp_path / "best"))
    restored = checkpoints.restore_for_inference(job, "none")
    step, state = restored.step, restored.state
    assert step == best
    metrics = evaluate.Evaluations(job, SummaryWriters(tmp_path / "job")).run(state, step)
    assert metrics["heldout/log_pplx"] == pytest.approx(losses[best - 1], rel=1e-6)


def test_all_processes_have_the_results_that_process_0_finds(tmp_path, monkeypatch):
    """Each may see another metrics.jsonl: on the first process's disk, or in a store that shows new files late."""
    job = eval_job(tmp_path)
    found = checkpoints.restore_for_inference(job, "none")
    own = {name: {found.step: {"log_pplx": 9.0, "identity": name}} for name in ("eval_train", "eval_heldout")}
    seen = {name: {"step": found.step, "log_pplx": 2.5, "identity": "the same"} for name in own}

    def of_process_0(decide):
        record = decide()
        assert record in ({"log_pplx": 9.0, "identity": name} for name in own)
        return seen[record["identity"]]

    monkeypatch.setattr(evaluate, "read_metrics", lambda directory, name: own[name])
    monkeypatch.setattr(evaluate, "decided_by_process_0", of_process_0)
    monkeypatch.setattr(evaluate.EvalDataset, "fingerprint", lambda self, state: "the same")
    monkeypatch.setattr(evaluate.EvalDataset, "evaluate", lambda *args: pytest.fail("it was evaluated again"))
    run = evaluate.Evaluations(job, SummaryWriters(tmp_path)).run
    results = run(found.state, found.step, next_batch=lambda: pytest.fail("a batch was taken again"))
    assert results == {"train/log_pplx": 2.5, "heldout/log_pplx": 2.5}


def test_early_stopping_counts():
    stopping = EarlyStopping(metric="a/b", mode="max", patience=2, min_delta=0.5)
    told = [stopping({"a/b": value}, "eval", step, False) for step, value in enumerate([1.0, 1.4, 2.0, 2.1, math.nan])]
    assert told == [False, False, False, False, True]
    with raises_naming(ValueError, "EarlyStopping.metric", "'a/b'", "['c/d']"):
        stopping({"c/d": 1.0}, "eval", 9, False)
    for fields, message in (
        ({"metric": "loss"}, "DATASET/metric"),
        ({"metric": "a/b", "mode": "best"}, "'min' or 'max'"),
    ):
        with pytest.raises(ValueError, match=message):
            EarlyStopping(**fields)


@pytest.mark.full
def test_ema_variables_are_evaluated_where_asked(tmp_path):
    job = make_job(tmp_path, exp="synthetic.structures.TinyEma", fields=("task.train.num_train_steps=4",))
    train.train(job)
    numbers_of = {}
    for name in ("True", "False"):
        fields = ("task.train.num_train_steps=4", f"task.train.eval_use_ema_states={name}")
        job = make_job(tmp_path, exp="synthetic.structures.TinyEma", fields=fields, mode="eval")
        evaluate.evaluate_checkpoints(job)
        numbers_of[name] = read_metrics(tmp_path, "eval_heldout")[4]["log_pplx"]
    assert numbers_of["True"] != numbers_of["False"]


def test_ema_without_averages_is_refused(tmp_path):
    with raises_naming(UserError, "EMA variables", "no ema_decay"):
        evaluated(tmp_path, fields=("task.train.eval_use_ema_states=True",))


def test_directories_without_a_run_are_refused(tmp_path):
    for directory in ("nothing", "job"):
        (tmp_path / "job").mkdir(exist_ok=True)
        run = tmp_path / directory
        with raises_naming(
            UserError,
            f"no checkpoint in {run}/checkpoints",
            "no training run",
            "--job_log_dir",
            "--restore_checkpoint_dir",
        ):
            evaluated(tmp_path / "out", restore_checkpoint_dir=epath.Path(run / "checkpoints"))


@pytest.mark.full
def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with raises_naming(CheckpointNotFoundError, "step 5", trained() / "checkpoints", "0, 4, 8, 12"):
        evaluated(tmp_path, restore_checkpoint_step=5)
    assert sorted(evaluated(tmp_path, restore_checkpoint_step=8)) == [8]


def test_another_experiments_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointMismatchError, match="params/lm"):
        evaluated(tmp_path, exp="synthetic.structures.TinyLm")


def test_an_empty_dataset_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.EvalDataset, "_batches", lambda self: iter(()))
    with raises_naming(UserError, "evaluation dataset heldout", "empty"):
        evaluated(tmp_path)


@hypothesis.given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 9)), min_size=1, max_size=30), st.integers(1, 7)
)
def test_a_mean_does_not_depend_on_the_batches(examples, size):
    """Batches as a step gives them: the mean over their examples, and the weight."""
    in_batches, at_once = WeightedMean(), WeightedMean()
    for mean, step in ((in_batches, size), (at_once, len(examples))):
        for start in range(0, len(examples), step):
            values, weights = np.array(examples[start : start + step], np.float64).T
            total = weights.sum()
            # A batch that holds padding alone has no mean.
            value = (values * weights).sum() / total if total else math.nan
            mean.add({"x": value, "num_predictions": total}, {"x": total, "num_predictions": 1.0})
    assert in_batches.result() == pytest.approx(at_once.result(), rel=1e-9, abs=1e-9)
    assert at_once.result()["num_predictions"] == sum(weight for _, weight in examples)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.randoms())
@pytest.mark.full
def test_variables_are_known_by_their_bits_whatever_the_padding(rows, columns, below, right, random):
    x = np.array([[random.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)], np.float32)
    whole = checksum({"w": x})
    assert checksum({"w": np.pad(x, ((0, below), (0, right)))}) == whole
    changed = x.copy()
    row, column = random.randrange(rows), random.randrange(columns)
    changed[row, column] = np.nextafter(changed[row, column], np.float32(2))
    assert checksum({"w": changed}) != whole

"""Averages over several steps for summaries: which steps count, weights, restarts, errors, and a whole run."""

import pytest
from etils import epath
from facts import raises_naming
from trained_helpers import make_job

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import Scalars, SummaryNames
from spmd_trainer.training import train
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.invalid_steps import InvalidSteps
from spmd_trainer.training.summaries import StepAverages, Summaries
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics
from spmd_trainer.watch import progress
from spmd_trainer.watch.progress import ProgressLines

pytestmark = pytest.mark.xdist_group("trained")

NAMES = SummaryNames(["layer/norm"])


def scalars(loss, value, weight, norm):
    return Scalars(loss, {"x": value}, {"x": weight}, NAMES, [norm])


STEPS = {1: scalars(1.0, 2.0, 1.0, 10.0), 2: scalars(2.0, 4.0, 3.0, 20.0), 3: scalars(6.0, 8.0, 0.0, 60.0)}


def taken(every, steps=(1, 2, 3)):
    averages = StepAverages(every, 10)
    for step in steps:
        averages.add(step, STEPS[step])
    return averages.take(STEPS[3])


def test_none_writes_the_step_itself():
    assert taken(None) == {"loss": 6.0, "x": 8.0, "layer/norm": 60.0}


def test_weighted_scalars_are_averaged_by_their_weights_and_all_else_over_the_steps():
    # (2 * 1 + 4 * 3) / 4; the third step has no weight.
    assert taken(1) == {"loss": 3.0, "x": 3.5, "layer/norm": 30.0}


def test_only_every_nth_step_counts():
    assert taken(2) == {"loss": 2.0, "x": 4.0, "layer/norm": 20.0}


def test_a_summary_right_after_a_restart_has_the_step_itself():
    assert taken(2, steps=(3,)) == {"loss": 6.0, "x": 8.0, "layer/norm": 60.0}


def test_each_summary_begins_anew():
    averages = StepAverages(1, 10)
    averages.add(1, STEPS[1])
    averages.take(STEPS[1])
    averages.add(2, STEPS[2])
    assert averages.take(STEPS[2])["loss"] == 2.0


def test_a_weight_that_is_zero_throughout_divides_nothing():
    assert taken(1, steps=(3,))["x"] == 8.0


@pytest.mark.parametrize("every", [0, 11])
def test_intervals_that_leave_summaries_empty_are_refused(every):
    with raises_naming(UserError, f"summary_accumulate_interval_steps={every}", "between 1", 10):
        StepAverages(every, 10)


def run_of(directory, *fields):
    """A run without a loop: a test calls its callbacks itself."""
    job = make_job(directory, mesh=(1, 1, 1), fields=fields)
    return Run(
        experiment="any",
        job_log_dir=epath.Path(directory),
        task=job.task,
        partitioner=job.partitioner,
        batch=job.inputs_shape_dtype,
        summaries=SummaryWriters(directory),
        config_lines=(),
        saves=False,
    )


class LogsAtTheEnd(Callback):
    """Logs what is only known when the run ends."""

    def on_end(self, run):
        run.log({"mine/at_the_end": 7.0})


def written(directory, run, steps, *callbacks):
    """What a run of so many steps writes, {step: record}; each step logs its own number as 'mine/STEP' too."""
    calls = CallbackList([*callbacks, Summaries()])
    calls.call("on_open", run)
    for step in range(1, steps + 1):
        run.log({"mine/step": float(step), f"mine/{step}": 1.0})
        calls.call("after_step", run, step, Scalars(float(step), {}, {}, SummaryNames([]), []))
    calls.call("on_end", run)
    run.summaries.close()
    return {
        step: {name: value for name, value in record.items() if name == "loss" or name.startswith("mine/")}
        for step, record in read_metrics(directory, "train").items()
    }


def test_the_last_step_has_a_summary_of_what_was_logged_after_the_one_before(tmp_path):
    got = written(tmp_path, run_of(tmp_path, "task.train.summary_interval_steps=3"), 5)
    assert got == {
        1: {"loss": 1.0, "mine/step": 1.0, "mine/1": 1.0},  # where a curve begins
        3: {"loss": 3.0, "mine/step": 3.0, "mine/3": 1.0},
        5: {"loss": 5.0, "mine/step": 5.0, "mine/4": 1.0, "mine/5": 1.0},
    }


def test_the_losses_of_progress_lines_between_summaries_are_written_too(tmp_path, monkeypatch):
    class Lines(ProgressLines):
        def after_step(self, run, step, scalars):
            if step == 1:
                self.after_pause(run, 0)
            super().after_step(run, step, scalars)

    monkeypatch.setattr(progress, "LONGEST_SILENCE", 0.0)
    run = run_of(tmp_path, "task.train.summary_interval_steps=100", "task.train.num_train_steps=4")
    got = written(tmp_path, run, 4, Lines())
    assert {step: record["loss"] for step, record in got.items()} == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


@pytest.mark.full
def test_a_run_that_ends_at_a_summary_writes_no_other(tmp_path):
    run = run_of(tmp_path, "task.train.summary_interval_steps=2")
    assert sorted(written(tmp_path, run, 4)) == [1, 2, 4]
    assert len((tmp_path / "summaries/train/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.full
def test_what_is_logged_at_the_end_joins_the_last_steps_summary(tmp_path):
    got = written(tmp_path, run_of(tmp_path, "task.train.summary_interval_steps=2"), 4, LogsAtTheEnd())
    assert got[4] == {"loss": 4.0, "mine/step": 4.0, "mine/4": 1.0, "mine/at_the_end": 7.0}


@pytest.mark.full
def test_a_run_that_takes_no_step_writes_no_summary(tmp_path):
    assert written(tmp_path, run_of(tmp_path), 0, LogsAtTheEnd()) == {}


def test_steps_that_were_skipped_are_counted_and_left_out_of_the_average(tmp_path):
    fields = ("task.train.summary_interval_steps=3", "task.train.summary_accumulate_interval_steps=1")
    run = run_of(tmp_path, *fields)
    callbacks = CallbackList([InvalidSteps(), Summaries()])
    callbacks.call("on_open", run)
    names = SummaryNames(["learning/is_valid_step", "layer/norm"])
    nan = float("nan")
    steps = {1: (2.0, 1.0, 10.0), 2: (nan, 0.0, nan), 3: (4.0, 1.0, 30.0), 4: (nan, 0.0, nan), 5: (5.0, 0.0, 1e9)}
    for step, (loss, valid, norm) in {**steps, 6: (7.0, 1.0, 70.0)}.items():
        callbacks.call("after_step", run, step, Scalars(loss, {"x": loss}, {"x": 1.0}, names, [valid, norm]))
    run.summaries.close()
    averages = {
        step: {name: record[name] for name in ("loss", "x", "layer/norm", "invalid_steps")}
        for step, record in read_metrics(tmp_path, "train").items()
    }
    assert averages == {
        1: {"loss": 2.0, "x": 2.0, "layer/norm": 10.0, "invalid_steps": 0},  # its own; the average has it too
        3: {"loss": 3.0, "x": 3.0, "layer/norm": 20.0, "invalid_steps": 1},
        6: {"loss": 7.0, "x": 7.0, "layer/norm": 70.0, "invalid_steps": 3},
    }


@pytest.mark.full
def test_a_run_writes_the_averages_of_its_steps(tmp_path):
    fields = ("task.train.num_train_steps=4", "task.train.summary_interval_steps={}")

    def records(directory, interval, *more):
        job = make_job(
            directory,
            mesh=(1, 1, 1),
            fields=(fields[0], fields[1].format(interval), *more),
            enable_checkpoint_saving=False,
        )
        train.train(job)
        return read_metrics(directory, "train")

    each = records(tmp_path / "each", 1)
    averaged = records(tmp_path / "averaged", 2, "task.train.summary_accumulate_interval_steps=1")
    assert sorted(averaged) == [1, 2, 4]
    for step in (2, 4):
        # Every row of this data weighs the same.
        for name in ("loss", "avg_xent", "learning/raw_grad_norm"):
            assert averaged[step][name] == pytest.approx((each[step - 1][name] + each[step][name]) / 2, rel=1e-6), name
    assert each[2]["loss"] != pytest.approx(averaged[2]["loss"], rel=1e-3)

"""How a run begins and ends: what it says, what it evaluates when no interval ends there, and what it gives back."""

import json
import os
import re
import signal

import numpy as np
import pytest
from praxis import pax_fiddle
from trained_helpers import make_job

from spmd_trainer.training import decode, elastic, evaluate, train
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.summary_writers import read_metrics

# One worker: what these tests share is compiled once.
pytestmark = pytest.mark.xdist_group("trained")

STEPS = 5
# No interval ends at the last step.
FIELDS = (
    f"task.train.num_train_steps={STEPS}",
    "task.train.save_interval_steps=4",
    "task.train.eval_interval_steps=2",
    "task.train.decode_interval_steps=2",
    "task.train.decode_start_after_n_steps=3",
    "task.train.log_train_output_interval_steps=4",
    "eval_datasets[0].max_windows=4",
    "decode_datasets[0].num_prompts=2",
)


def trained_lines(caplog, directory, fields=(), **arguments):
    """Trains on one device; returns the result and the lines of the log."""
    caplog.clear()
    job = make_job(directory, mesh=(1, 1, 1), fields=(*FIELDS, *fields), decode_during_train=True, **arguments)
    with caplog.at_level("INFO", logger="absl"):
        result = train.train(job)
    return result, caplog.messages


def evaluated(directory):
    """Steps in the order in which they were evaluated, repetitions included."""
    lines = (directory / "summaries" / "eval_heldout" / "metrics.jsonl").read_text().splitlines()
    return [int(re.search(r'"step": (\d+)', line)[1]) for line in lines]


def place(lines, pattern):
    found = [number for number, line in enumerate(lines) if re.search(pattern, line)]
    assert len(found) == 1, (pattern, lines)
    return found[0]


def test_a_run_says_what_it_does_and_ends_with_an_evaluation_and_a_decode(tmp_path, caplog):
    result, lines = trained_lines(caplog, tmp_path)
    assert evaluated(tmp_path) == [2, 4, STEPS]
    decoded = sorted(path.name for path in (tmp_path / "decode_out" / "heldout_prompts").glob("*.jsonl"))
    assert decoded == ["step_4.jsonl", "step_5.jsonl"]
    order = [
        r"initialising .*: 15 variables; .*[\d.]+ KiB per device",
        r"initialising .* took ",
        r"training from step 0 to 5",
        r"first step .*loss \d\.\d{4}, .* after the start",
        r"saving step 4",
        r"eval heldout .*step 4: ",
        # The last save doesn't wait for the last evaluation.
        r"^saving step 5",
        r"^eval heldout .*step 5: ",
        r"finished: step 5 of 5 in .*, loss \d\.\d{4}$",
        r"last evaluation, .*step 5: heldout: .*bits_per_byte",
        rf"results in {tmp_path}: checkpoints/ \(steps 0, 4, 5\), summaries/, decode_out/",
        rf"tensorboard --logdir {tmp_path}/summaries",
        rf"to decode: .* --job_log_dir={tmp_path} --mode=decode_once$",
    ]
    # The last step is evaluated already.
    assert not [line for line in lines if "to evaluate:" in line]
    places = [place(lines, pattern) for pattern in order]
    assert places == sorted(places)
    assert place(lines, r"^compiling .*train step \.\.\.") < place(lines, "^compiling .*train step took")
    assert place(lines, "^saved step 5 in ") < place(lines, "finished:")

    record = read_metrics(tmp_path, "eval_heldout")[STEPS]
    assert (result.step, result.job_log_dir) == (STEPS, tmp_path)
    assert int(result.state.step) == STEPS
    assert result.metrics["heldout/log_pplx"] == record["log_pplx"]
    assert result.metrics["loss"] == pytest.approx(result.metrics["total_loss"])

    # Started again, it says that it is finished, and does nothing twice.
    again, lines = trained_lines(caplog, tmp_path)
    assert place(lines, "already finished .*step 5 of 5") < place(lines, "eval heldout .*step 5 .*already")
    assert not [line for line in lines if re.search("^saving|^finished|first step|compiling", line)]
    assert evaluated(tmp_path) == [2, 4, STEPS]
    assert again.metrics["heldout/log_pplx"] == record["log_pplx"]
    assert again.step == STEPS


def interrupt_at(monkeypatch, step):
    """Ctrl-C while that step is taken."""

    def changed_devices(job, current):
        if current == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(elastic, "changed_devices", changed_devices)


@pytest.mark.full
def test_an_interrupted_run_evaluates_nothing_more_until_it_is_started_again(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        result, lines = trained_lines(caplog, tmp_path)
    assert (result.step, evaluated(tmp_path)) == (3, [2])
    place(lines, r"^stopped .*step 3 of 5 .*signal, loss .*; the same command")
    assert not [line for line in lines if "finished" in line]

    with monkeypatch.context() as patch:
        interrupt_at(patch, STEPS)
        _, lines = trained_lines(caplog, tmp_path)
    assert evaluated(tmp_path) == [2, 4]
    place(lines, "restored step 3 from ")
    place(lines, "^finished: step 5 of 5")

    _, lines = trained_lines(caplog, tmp_path)
    place(lines, "already finished .*step 5 of 5")
    assert evaluated(tmp_path) == [2, 4, STEPS]
    assert (tmp_path / "decode_out" / "heldout_prompts" / "step_5.jsonl").exists()


@pytest.mark.full
def test_evaluation_that_is_switched_off_is_off_at_the_end_too(tmp_path, caplog):
    _, lines = trained_lines(caplog, tmp_path, eval_on_test=False, enable_checkpoint_saving=False)
    assert not (tmp_path / "summaries" / "eval_heldout").exists()
    assert not [line for line in lines if "saving" in line or "--mode=" in line]


@pytest.mark.full
def test_where_the_input_ends_training_is_complete_and_evaluated(tmp_path, caplog):
    def three_batches(config):
        config.train_datasets[0] = config.eval_datasets[0].clone().set(name="short", max_windows=3, batch_size=1)

    result, lines = trained_lines(caplog, tmp_path, customize=three_batches)
    assert (result.step, evaluated(tmp_path)) == (3, [2, 3])
    assert place(lines, "^saving step 3") < place(lines, "^eval heldout .*step 3: ")
    place(lines, r"^finished: step 3 of 5 in .* \(.*training input .*ended\)")


@pytest.mark.full
def test_an_early_stop_is_said_and_its_best_checkpoint_is_saved_though_a_kill_came_before(tmp_path, caplog):
    def stops(config):
        config.task.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx", patience=1)
        config.task.train.learner.optimizer.learning_rate = 5.0

    fields = ("task.train.eval_interval_steps=1", "task.train.decode_interval_steps=None")
    result, lines = trained_lines(caplog, tmp_path, fields, customize=stops)
    records = read_metrics(tmp_path, "eval_heldout")
    best = min(records, key=lambda step: records[step]["log_pplx"])
    assert result.step == best + 1 < STEPS
    place(lines, rf"^finished: step {result.step} of 5 in .* \(early_stopping_fn ended training\)")
    place(lines, rf"^saved .*best checkpoint .*step {best} in ")
    place(lines, rf"results in .*best/ \(step {best}\)")
    _, lines = trained_lines(caplog, tmp_path, fields, customize=stops)
    place(lines, rf"already finished .*step {result.step} of 5: early_stopping_fn")
    assert not [line for line in lines if "compiling" in line]


@pytest.mark.full
def test_the_best_checkpoint_of_the_last_step_is_made_up_for(tmp_path, caplog):
    """As after a kill between the last evaluation and the save of the best checkpoint."""

    def watches(config):
        config.task.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx")

    fields = ("task.train.decode_interval_steps=None",)
    trained_lines(caplog, tmp_path, fields, customize=watches)
    losses = [record["log_pplx"] for _, record in sorted(read_metrics(tmp_path, "eval_heldout").items())]
    assert int(np.argmin(losses)) == len(losses) - 1
    assert (tmp_path / "best" / str(STEPS)).exists()
    (tmp_path / "best" / str(STEPS)).rename(tmp_path / "lost")
    trained_lines(caplog, tmp_path, fields, customize=watches)
    assert (tmp_path / "best" / str(STEPS)).exists()


@pytest.mark.full
@pytest.mark.parametrize(("what", "program"), [("evaluation", evaluate.EvalDataset), ("decode", decode.DecodeDataset)])
def test_a_signal_interrupts_what_is_done_at_the_end_and_the_same_command_makes_up_for_it(
    tmp_path, caplog, monkeypatch, what, program
):
    fields = ("task.train.eval_interval_steps=100", "eval_datasets[0].batch_size=2", "decode_datasets[0].batch_size=1")
    fields += ("task.train.decode_interval_steps=100",)
    batches_of = program._batches

    def batches(self):
        for batch in batches_of(self):
            yield batch
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(program, "_batches", batches)
        result, lines = trained_lines(caplog, tmp_path, fields)
    place(lines, rf"^finished: step 5 of 5 in .*, loss .*; .*final {what} .*interrupted, .*same command")
    place(lines, "^saved step 5 in ")
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    decoded = tmp_path / "decode_out" / "heldout_prompts" / "step_5.jsonl"
    assert not decoded.exists()
    assert (tmp_path / "summaries" / "eval_heldout").exists() == (what == "decode")
    assert ("heldout/log_pplx" in result.metrics) == (what == "decode")

    _, lines = trained_lines(caplog, tmp_path, fields)
    place(lines, "already finished .*step 5 of 5")
    assert evaluated(tmp_path) == [STEPS]
    assert len(decoded.read_text().splitlines()) == 2
    assert not [line for line in lines if "interrupted" in line]


@pytest.mark.full
def test_the_training_batch_is_evaluated_at_the_end_where_there_is_nothing_else(tmp_path, caplog):
    def without_datasets(config):
        config.eval_datasets.clear()
        config.task.train.eval_skip_train = False
        config.task.metrics = lambda scalars: type(scalars)({**scalars, "more/xent": scalars["avg_xent"]})

    result, lines = trained_lines(caplog, tmp_path, customize=without_datasets)
    assert sorted(read_metrics(tmp_path, "eval_train")) == [2, 4, STEPS]
    assert result.metrics["train/log_pplx"] == read_metrics(tmp_path, "eval_train")[STEPS]["log_pplx"]
    # Scalars of training steps are no datasets, slash or not.
    place(lines, "^last evaluation, .*step 5: train: [^;/]*more/xent [^;/]*$")


def watches_the_training_batch(config):
    config.task.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="train/log_pplx")
    config.task.train.eval_skip_train = False


@pytest.mark.full
def test_a_run_started_at_its_last_step_evaluates_the_next_training_batch_once(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, STEPS)
        _, lines = trained_lines(caplog, tmp_path, customize=watches_the_training_batch)
    place(lines, "^finished: step 5 of 5 .*; .*final evaluation .*interrupted")
    assert sorted(read_metrics(tmp_path, "eval_train")) == [2, 4]
    result, _ = trained_lines(caplog, tmp_path, customize=watches_the_training_batch)
    records = read_metrics(tmp_path, "eval_train")
    assert sorted(records) == [2, 4, STEPS]
    losses = {step: record["log_pplx"] for step, record in records.items()}
    assert [path.name for path in (tmp_path / "best").iterdir() if path.name.isdigit()] == [
        str(min(losses, key=losses.get))
    ]
    again, lines = trained_lines(caplog, tmp_path, customize=watches_the_training_batch)
    place(lines, "^eval train .*step 5 .*already")
    assert again.metrics["train/log_pplx"] == result.metrics["train/log_pplx"] == losses[STEPS]


@pytest.mark.full
def test_without_a_training_batch_to_evaluate_nothing_is_asked_about_it(tmp_path, caplog, monkeypatch):
    def three_batches(config):
        watches_the_training_batch(config)
        config.train_datasets[0] = config.eval_datasets[0].clone().set(name="short", max_windows=3, batch_size=1)

    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        trained_lines(caplog, tmp_path, customize=three_batches)
    _, lines = trained_lines(caplog, tmp_path, customize=three_batches)
    place(lines, r"^finished: step 3 of 5 in .* \(.*training input .*ended\)")
    place(lines, "^early_stopping_fn is not .*training input")
    assert evaluated(tmp_path) == [2, 3]

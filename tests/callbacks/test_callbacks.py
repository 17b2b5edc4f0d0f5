"""A user's own callbacks: when each method is called, what it may do, and what becomes of its errors."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest
from etils import epath
from facts import assert_names, raises_naming
from praxis import pax_fiddle
from trained_helpers import TINY, make_job

from spmd_trainer.callbacks import Callback, CallbackError
from spmd_trainer.checkpointing import steps
from spmd_trainer.cli import launch, log_lines
from spmd_trainer.errors import UserError
from spmd_trainer.training import evaluate, saving, train
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.run_directory import failure
from spmd_trainer.training.summaries import Summaries
from spmd_trainer.training.summary_writers import SummaryError

# One worker: what these tests share is compiled once.
pytestmark = pytest.mark.xdist_group("trained")

FIELDS = (
    "task.train.num_train_steps=5",
    "task.train.save_interval_steps=2",
    "task.train.eval_interval_steps=3",
    "task.train.summary_interval_steps=1",
    "eval_datasets[0].max_windows=4",
)


class Recorder(Callback):
    """Notes each call."""

    def __init__(self):
        self.calls = []

    def on_open(self, run):
        with pytest.raises(RuntimeError, match="between on_open and on_start"):
            run.state  # noqa: B018
        self.calls.append(("on_open", run.step))

    def on_start(self, run):
        assert int(run.state.step) == run.step == run.first_step
        self.calls.append(("on_start", run.step))

    def after_dispatch(self, run, step):
        assert run.step == step
        self.calls.append(("after_dispatch", step))

    def after_step(self, run, step, scalars):
        assert isinstance(scalars["loss"], float)
        assert scalars["loss"] == pytest.approx(scalars["total_loss"])
        assert "learning/raw_grad_norm" in scalars
        self.calls.append(("after_step", step))

    def before_save(self, run, step):
        assert not steps.is_whole(run.job_log_dir / "checkpoints", step)
        self.calls.append(("before_save", step))

    def after_save(self, run, step):
        assert steps.is_whole(run.job_log_dir / "checkpoints", step)
        self.calls.append(("after_save", step))

    def after_eval(self, run, step, metrics):
        assert metrics["heldout/log_pplx"] > 0
        self.calls.append(("after_eval", step))

    def on_failure(self, run, error):
        self.calls.append(("on_failure", str(error)))

    def on_end(self, run):
        self.calls.append(("on_end", run.step))

    def of(self, hook):
        return [about for name, about in self.calls if name == hook]


def trained(directory, *callbacks, customize=lambda config: None, **settings):
    job = make_job(directory, mesh=(1, 1, 1), fields=FIELDS, customize=customize, callbacks=callbacks, **settings)
    return train.train(job)


def test_every_method_is_called_at_its_moment(tmp_path):
    recorder = Recorder()
    trained(tmp_path / "run", recorder)
    assert recorder.calls[:2] == [("on_open", 0), ("on_start", 0)]
    assert recorder.calls[-1] == ("on_end", 5)
    assert recorder.of("after_dispatch") == recorder.of("after_step") == [1, 2, 3, 4, 5]
    assert recorder.of("before_save") == recorder.of("after_save") == [0, 2, 4, 5]
    assert recorder.of("after_eval") == [3, 5]
    assert not recorder.of("on_failure")
    for first, then in (
        (("after_dispatch", 1), ("after_step", 1)),
        # A checkpoint never outlives the scalars before it, and an evaluation is of steps that are known.
        (("after_step", 4), ("before_save", 4)),
        (("before_save", 4), ("after_save", 4)),
        (("after_step", 3), ("after_eval", 3)),
    ):
        assert recorder.calls.index(first) < recorder.calls.index(then)

    again = Recorder()
    trained(tmp_path / "run", again)
    assert [call for call in again.calls if call[0] != "after_eval"] == [("on_open", 0), ("on_start", 5), ("on_end", 5)]


class Pauses(Recorder):
    """Asks for a pause after step 1, and at the last step."""

    def asks_for_pause(self, run, step):
        return step in (1, 5)

    def on_pause(self, run, step):
        assert int(run.state.step) == step
        assert jax.config.jax_transfer_guard_device_to_host != "disallow"
        self.calls.append(("on_pause", step))

    def after_pause(self, run, step):
        self.calls.append(("after_pause", step))


@pytest.mark.full
def test_a_callback_works_in_a_pause_after_the_save(tmp_path):
    recorder = Pauses()
    trained(tmp_path / "run", recorder)
    # 2, 4 and 5 are saved, 3 is evaluated.
    assert recorder.of("on_pause") == [1, 2, 3, 4, 5]
    assert recorder.of("after_pause") == [0, 1, 2, 3, 4, 5]
    calls = recorder.calls
    for step in (2, 4, 5):
        assert calls.index(("before_save", step)) < calls.index(("on_pause", step)) < calls.index(("after_pause", step))
    assert calls.index(("after_step", 1)) < calls.index(("on_pause", 1)) < calls.index(("after_dispatch", 2))
    assert calls.index(("after_eval", 3)) < calls.index(("on_pause", 3))


class StopsAt(Callback):
    """Ends training where the loss of a step is known."""

    def __init__(self, step=2):
        self._step = step

    def after_step(self, run, step, scalars):
        run.log({"mine/twice": 2 * scalars["loss"]})
        if step == self._step:
            run.stop("the loss is good enough")


@pytest.mark.full
def test_an_experiments_callback_comes_from_its_config_logs_scalars_and_ends_training(tmp_path, caplog):
    def customize(config):
        config.task.train.callbacks = [pax_fiddle.Config(StopsAt, step=3)]

    job = make_job(tmp_path / "run", mesh=(1, 1, 1), fields=FIELDS, customize=customize)
    with caplog.at_level("INFO", logger="absl"):
        result = train.train(job)
    assert 3 <= result.step < 5
    assert steps.is_whole(epath.Path(tmp_path) / "run" / "checkpoints", result.step)
    (line,) = [line for line in caplog.messages if line.startswith("finished: ")]
    assert_names(line, f"step {result.step} of 5", "good enough")
    lines = (tmp_path / "run" / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert record["mine/twice"] == pytest.approx(2 * record["loss"])
        assert "invalid_steps" in record


class Fails(Callback):
    def after_step(self, run, step, scalars):
        if step == 2:
            raise KeyError("no such thing")


@pytest.mark.full
def test_an_error_in_a_callback_ends_the_run_with_its_name_and_followers_stop_with_the_reason(tmp_path):
    recorder = Recorder()
    message = r"callback \S*test_callbacks\.Fails .*\bafter_step at step 2: KeyError: 'no such thing'"
    with pytest.raises(CallbackError, match=message):
        trained(tmp_path / "run", recorder, Fails())
    assert re.search(message, recorder.of("on_failure")[0])
    assert not recorder.of("on_end")
    failed = failure(epath.Path(tmp_path) / "run")
    assert re.search(message, failed.reason)
    assert failed.process == 0

    follower = make_job(tmp_path / "run", mesh=(1, 1, 1), fields=FIELDS, mode="eval")
    with pytest.raises(UserError, match=rf"failed after step {failed.step} \(process 0\): {message}"):
        evaluate.evaluate_checkpoints(follower)
    # What was saved before is evaluated all the same.
    saved = steps.present(epath.Path(tmp_path) / "run" / "checkpoints")
    assert (tmp_path / "run" / "summaries" / "eval_heldout").exists() == bool(saved)

    trained(tmp_path / "run")
    assert failure(epath.Path(tmp_path) / "run") is None
    evaluate.evaluate_checkpoints(follower)


@pytest.mark.full
def test_an_error_in_on_failure_does_not_hide_the_first_one(tmp_path, caplog):
    class FailsTwice(Fails):
        def on_failure(self, run, error):
            raise ValueError("again")

    recorder = Recorder()
    with pytest.raises(CallbackError, match="no such thing"):
        trained(tmp_path / "run", FailsTwice(), recorder)
    assert_names(caplog.text, "callback", "FailsTwice", "on_failure", "ValueError: again")
    assert recorder.of("on_failure")


def test_an_error_before_the_checkpoints_are_open_is_the_only_one(caplog):
    CallbackList([saving.Checkpoints()]).fail(None, UserError("a wrong setting"))
    assert not caplog.records


def test_an_attribute_named_turn_of_a_users_callback_moves_nothing():
    players = Recorder()
    players.turn = "white"
    summaries = Summaries()
    assert CallbackList([summaries, players]).callbacks == (players, summaries)


def test_what_is_no_callback_is_refused(tmp_path):
    with raises_naming(UserError, "'print me'", "a str", "configs", "Callback"):
        trained(tmp_path / "run", "print me")


@pytest.mark.full
def test_copies_to_the_host_must_be_explicit_between_two_steps_alone(tmp_path):
    seen = {}

    class Looks(Callback):
        def after_dispatch(self, run, step):
            seen["after_dispatch"] = jax.config.jax_transfer_guard_device_to_host

        def after_step(self, run, step, scalars):
            seen.setdefault("after_step", jax.config.jax_transfer_guard_device_to_host)
            assert int(jax.device_get(run.state.step)) == run.step

        def after_eval(self, run, step, metrics):
            seen["after_eval"] = jax.config.jax_transfer_guard_device_to_host

        def on_end(self, run):
            seen["on_end"] = jax.config.jax_transfer_guard_device_to_host

    trained(tmp_path / "run", Looks())
    assert seen["after_dispatch"] == seen["after_step"] == "disallow"
    assert seen["after_eval"] != "disallow"
    assert seen["on_end"] != "disallow"


def test_the_command_names_the_users_line_and_the_log_has_the_traceback(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from spmd_trainer.callbacks import Callback\n"
        "class Breaks(Callback):\n"
        "    def on_start(self, run):\n"
        "        raise KeyError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from mine import Breaks

    job = make_job(tmp_path / "run", mesh=(1, 1, 1), fields=FIELDS, callbacks=(Breaks(),))
    with (
        log_lines.shown(warnings_only=False) as run_log,
        pytest.raises(UserError) as raised,
        launch._errors_of_users(job.config, run_log),
    ):
        train.train(job)
    message = str(raised.value)
    assert_names(message, "mine.Breaks", "on_start", "step 0", "KeyError")
    assert f"{tmp_path / 'mine.py'}:4, in on_start: raise KeyError" in message
    assert "Traceback" in (tmp_path / "run" / "logs" / "train.log").read_text()


@pytest.mark.full
def test_a_second_trainer_is_kept_out_of_the_directory(tmp_path):
    class StartsAnother(Callback):
        def on_start(self, run):
            # As another process would: the lock's own process is alive, and is not this one.
            command = [sys.executable, "-m", "spmd_trainer.main", f"--exp={TINY}", f"--job_log_dir={run.job_log_dir}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            seen.append((done.returncode, done.stderr))

    seen = []
    trained(tmp_path / "run", StartsAnother())
    ((status, message),) = seen
    assert status == 2, message
    assert f"process {os.getpid()} on " in message
    assert "Traceback" not in message


@pytest.mark.full
def test_where_summaries_cannot_be_written_the_steps_are_saved_all_the_same(tmp_path, monkeypatch):
    class Breaks(Callback):
        def after_step(self, run, step, scalars):
            if step == 3:
                monkeypatch.setattr(run.summaries, "write", fail)

    def fail(*args, **kwargs):
        raise SummaryError("no space left")

    with pytest.raises(SummaryError, match="no space left"):
        trained(tmp_path / "run", Breaks())
    assert max(steps.present(epath.Path(tmp_path) / "run" / "checkpoints")) >= 3
    assert "no space left" in failure(epath.Path(tmp_path) / "run").reason

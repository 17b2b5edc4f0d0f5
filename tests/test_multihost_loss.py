"""What a process concludes of the others' silence, and how it says so."""

from __future__ import annotations

import contextlib
import time

import jax
import pytest
from facts import assert_names

from spmd_trainer.cli import distributed, log_lines
from spmd_trainer.errors import UserError
from spmd_trainer.multihost import join, loss, service

NAMES = {0: "process 0 (first, pid 11)", 1: "process 1 (other, pid 12)"}


class Ended(BaseException):
    """Stands for the end of the process."""


class Store(dict):
    """The key-value store, in this process."""

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self, key
        self[key] = value

    def key_value_try_get(self, key):
        if key not in self:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self[key]

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.items() if name.startswith(f"{key}/")]


@pytest.fixture
def store(monkeypatch):
    """The store of a job whose processes end by `Ended`."""
    store = Store()
    monkeypatch.setattr(service, "client", lambda: store)
    monkeypatch.setattr(loss, "_LAST_SECONDS", 0.1)

    def end(status):
        raise Ended(status)

    monkeypatch.setattr(loss.os, "_exit", end)
    return store


def watching(last_beat=lambda process: ""):
    """Process 0, which has last heard of process 1 just now."""
    peers = loss.Peers(NAMES, 0, 10.0, last_beat)
    peers._beat()
    return peers


def test_a_silent_process_is_named_with_its_last_beat(store, caplog, capsys):
    peers = watching(lambda process: f"training step 1{process}, input")
    peers._look(time.monotonic() + 7.0)
    assert_names(caplog.text, NAMES[1], "7 s", "training step 11, input", "10 s")
    with pytest.raises(Ended, match=str(loss.STATUS_LOST_PROCESS)):
        peers._look(time.monotonic() + 11.0)
    assert_names(
        capsys.readouterr().err, "process 0 exits", NAMES[1], "lost", "host is gone", "training step 11, input"
    )
    told = loss._News.parse(store[loss._NEWS])
    assert (told.kind, told.process) == ("lost", 1)
    assert_names(told.what, NAMES[1])


@contextlib.contextmanager
def full_stderr():
    """Lets stderr be a file on a full disk. No fixture, because pytest has a stderr of its own for each phase of a test."""
    with open("/dev/full", "w") as full, contextlib.redirect_stderr(full):
        yield


@pytest.mark.parametrize(
    ("error", "status"),
    [(UserError("a wrong setting"), UserError.exit_status), (KeyboardInterrupt(), log_lines.STATUS_INTERRUPTED)],
)
def test_a_process_that_fails_tells_the_others_although_its_disk_is_full(error, status, store, monkeypatch):
    monkeypatch.setattr(distributed.signal, "signal", lambda *args: None)
    processes = distributed.Processes(None)
    processes._watch = loss.Peers(NAMES, 1, 10.0)
    with full_stderr(), pytest.raises(Ended, match=str(status)):
        processes._fail(error)
    told = loss._News.parse(store[loss._NEWS])
    assert (told.kind, told.process) == ("failed", 1)


def test_a_process_that_hears_of_a_loss_says_that_it_ends_although_its_disk_is_full(store):
    with full_stderr(), pytest.raises(Ended, match=str(loss.STATUS_LOST_PROCESS)):
        loss.Peers(NAMES, 1, 10.0)._on_news(loss._News("lost", 1, "process 1 is lost"))
    assert f"{loss._GONE}/1" in store


def test_without_a_run_nothing_is_said_of_beats(store, capsys):
    with pytest.raises(Ended):
        watching()._look(time.monotonic() + 11.0)
    assert "beat" not in capsys.readouterr().err


def test_a_process_that_beats_again_is_not_lost(store, caplog):
    peers = watching()
    peers._look(time.monotonic() + 7.0)
    store[f"{loss._BEAT}/1"] = "2"
    peers._beat()
    assert_names(caplog.text, NAMES[1], "answers again")
    peers._look(time.monotonic() + 7.0)
    assert peers.lost() == ()


def test_a_process_that_does_not_answer_the_bell_is_lost_sooner(store):
    peers = watching()
    peers._called = time.monotonic()
    peers._look(time.monotonic() + loss._CALLED_SECONDS - 1)
    with pytest.raises(Ended):
        peers._look(time.monotonic() + loss._CALLED_SECONDS + 1)


def test_a_process_that_answers_the_bell_is_not_lost(store):
    peers = watching()
    peers._called = time.monotonic()
    store[f"{loss._BEAT}/1"] = "2"
    peers._beat()
    peers._look(time.monotonic() + loss._CALLED_SECONDS + 1)


def test_a_process_that_has_ended_is_not_missed(store):
    peers = watching()
    store[f"{loss._GONE}/1"] = join.sealed(f"{loss._GONE}/1", loss._DONE)
    peers._beat()
    peers._look(time.monotonic() + 60.0)


def test_a_process_that_was_stopped_hears_that_the_others_have_given_it_up(store, capsys):
    peers = watching()
    store[f"{loss._GONE}/1"] = join.sealed(f"{loss._GONE}/1", "exited because process 0 is lost")
    with pytest.raises(Ended):
        peers._beat()
    assert_names(capsys.readouterr().err, "process 0 exits", NAMES[1], "process 0 is lost")


def test_process_0_whose_interpreter_is_held_is_lost_although_its_service_answers(store, capsys):
    peers = loss.Peers(NAMES, 1, 10.0)
    store[f"{loss._BEAT}/0"] = "1"
    peers._beat()
    peers._beat()
    assert peers.lost() == ()
    with pytest.raises(Ended):
        peers._look(time.monotonic() + 11.0)
    assert_names(capsys.readouterr().err, "process 1 exits", NAMES[0])


def test_news_of_strangers_are_no_news(monkeypatch):
    monkeypatch.setenv("SPMD_TRAINER_JOB_TOKEN", "secret")
    own = loss._News("failed", 1, "out of luck").text()
    assert loss._News.parse(own).what == "out of luck"
    assert "secret" not in own
    assert loss._News.parse("- failed 1 pwned") is None
    monkeypatch.setenv("SPMD_TRAINER_JOB_TOKEN", "other")
    assert loss._News.parse(own) is None


@pytest.mark.parametrize(
    "said",
    [
        "[" * 100_000,
        '{"index": -1, "count": 2}',
        '{"index": 7, "count": 2}',
        '{"index": "0", "count": 2}',
        '{"index": 1, "count": 2, "unknown": 1}',
        "GET / HTTP/1.0",
        "",
    ],
    ids=["brackets", "negative", "too high", "text", "field", "http", "nothing"],
)
def test_what_no_process_says_is_ignored(said):
    assert join.Member.parse("key", f"- {said}") is None
    assert join.Member.parse("key", said) is None


def test_what_another_process_says_is_shown_as_one_line():
    said = join.Member(1, 2, failed="out\x1b[2J of\n luck", name="host\x07, pid 3")
    text = join.sealed("key", join.json.dumps(join.dataclasses.asdict(said)))
    assert join.Member.parse("key", text).failed == r"out\x1b[2J of luck"
    assert join.Member.parse("key", text).name == r"host\x07, pid 3"


def test_what_strangers_write_ends_nobody(store, monkeypatch):
    monkeypatch.setenv("SPMD_TRAINER_JOB_TOKEN", "secret")
    peers = watching()
    store[f"{loss._GONE}/1"] = "was told by a stranger to end"
    store[f"{loss._BEAT}/x"] = store[f"{loss._GONE}/x"] = store[loss._NEWS] = "junk"
    peers._turn()
    assert peers._others.keys() == {1}
    peers._tell(loss._News("failed", 1, "out of luck"))
    assert loss._News.parse(store[loss._NEWS]).what == "out of luck"


def test_a_process_that_failed_is_named_even_if_its_news_were_all_that_it_could_say(store, capsys, monkeypatch):
    monkeypatch.setattr(loss, "_GRACE_SECONDS", 0.0)
    peers = watching()
    peers._tell(loss._News("failed", 1, "process 1 failed: out of luck"))
    with pytest.raises(Ended):
        peers._turn()
    assert_names(capsys.readouterr().err, "process 0 exits", "out of luck")


def test_a_beat_from_before_a_call_is_no_answer_to_it(store):
    peers = watching()
    store[f"{loss._BEAT}/1"] = "2"
    store[loss._CALL] = "0"
    peers._turn()
    with pytest.raises(Ended):
        peers._look(time.monotonic() + loss._CALLED_SECONDS + 1)

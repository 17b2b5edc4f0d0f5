"""What the command line shows of the log: the trainer's and the user's own lines, libraries' warnings once each."""

import errno
import logging
import os
import pathlib
import subprocess
import sys

import pytest
from absl import logging as absl_logging
from facts import assert_names

from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.cli import log_lines
from spmd_trainer.errors import UserError
from spmd_trainer.storage import append
from spmd_trainer.training.live_status import SHOWN_LIVE, live

PROGRAM = """
import logging, pathlib, sys, sysconfig, threading
from absl import flags, logging as absl_logging
from spmd_trainer.cli import log_lines
run_log = log_lines.install()
flags.FLAGS(["program"])

def say(path, level, text):
    logging.getLogger("absl").handle(logging.LogRecord("absl", level, path, 1, text, (), None))

site = sysconfig.get_path("purelib")
library, own, users = f"{site}/praxis/optimizers.py", log_lines.__file__, "/home/me/my_pkg/mine.py"
say(library, logging.INFO, "how I work")
for _ in range(3):
    say(library, logging.WARNING, "soon gone")
say(library, logging.WARNING, "another")
for number in range(2):
    say(library, logging.WARNING, f"tensor_split_dims_mapping missing for variable {number}")
for _ in range(2):
    say(library, logging.ERROR, "broken")
try:
    raise OSError("the caller raises it again")
except OSError:
    thread, error = f"{site}/orbax/checkpoint/_src/futures/future.py", sys.exc_info()
    logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, thread, 1, "a thread failed", (), error))
tracker = threading.Thread(target=say, args=(library, logging.ERROR, "no server"), name="tracker: mlflow")
tracker.start()
tracker.join()
for _ in range(2):
    say(own, logging.INFO, "step")
say(users, logging.INFO, "my own line")
run_log.open(pathlib.Path(sys.argv[1]))
say(library, logging.INFO, "after the file was opened")
log_lines.log_traceback(ValueError("only in the file"))
"""


def test_own_lines_and_errors_all_and_warnings_of_libraries_once(tmp_path: pathlib.Path):
    file = tmp_path / "logs" / "train.log"
    done = subprocess.run([sys.executable, "-c", PROGRAM, file], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 1)[1] for line in done.stderr.splitlines()]
    shown = ["WARNING: soon gone", "WARNING: another", "ERROR: broken", "ERROR: broken", "step", "step", "my own line"]
    assert lines == shown
    full = file.read_text()
    for text in (
        "how I work",
        "no server",
        "the caller raises it again",
        "variable 1",
        "step",
        "after the file was opened",
        "ValueError: only in the file",
    ):
        assert text in full
    assert full.count("soon gone") == 3


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), CheckpointError("step 3"), UserError("bad")])
def test_the_traceback_of_what_users_can_mend_is_in_the_file_alone(tmp_path, error):
    try:
        raise error
    except Exception:
        record = logging.LogRecord("absl", logging.ERROR, __file__, 1, "it failed: %d", (7,), sys.exc_info())
    shown = log_lines._Format().format(record)
    assert_names(shown, "it failed: 7", str(error))
    assert "Traceback" not in shown
    run_log = log_lines.RunLog()
    run_log.handle(record)
    run_log.open(tmp_path / "train.log")
    run_log.close()
    assert "Traceback" in (tmp_path / "train.log").read_text()


def test_a_log_on_a_full_disk_is_said_once(caplog, capsys, monkeypatch, tmp_path):
    run_log = log_lines.RunLog()
    run_log.open(tmp_path / "run.log")

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(append._LocalFile, "write", full)
    for _ in range(3):
        run_log.handle(logging.LogRecord("absl", logging.INFO, __file__, 1, "a line", (), None))
    run_log.close()
    (said,) = caplog.messages
    assert_names(said, str(tmp_path / "run.log"), os.strerror(errno.ENOSPC))
    assert "Traceback" not in capsys.readouterr().err


def test_a_device_is_no_log(caplog):
    run_log = log_lines.RunLog()
    run_log.open("/dev/full")
    assert run_log.path is None
    assert_names(caplog.text, "/dev/full", "device")


def test_what_a_live_display_shows_in_its_own_way_goes_to_the_file_alone(monkeypatch):
    record = logging.LogRecord("absl", logging.INFO, log_lines.__file__, 1, "10 s so far", (), None)
    vars(record).update(SHOWN_LIVE)
    assert log_lines._Wanted()(record)
    monkeypatch.setattr(live, "display", object())
    assert not log_lines._Wanted()(record)


def test_lines_of_the_trainer_installed_as_a_package_are_shown(monkeypatch):
    from spmd_trainer.errors import user_code

    site = user_code._LIBRARIES[0]
    monkeypatch.setattr(user_code, "_TRAINER", site / "spmd_trainer")
    wanted = log_lines._Wanted()
    record = logging.LogRecord("absl", logging.INFO, str(site / "spmd_trainer" / "x.py"), 1, "step", (), None)
    assert wanted(record)
    record.pathname = str(site / "praxis" / "x.py")
    assert not wanted(record)


def test_a_call_shows_its_lines_and_leaves_logging_as_it_was(capsys):
    root = logging.getLogger()
    before = absl_logging.get_verbosity(), root.level, list(root.handlers)
    own = [handler for handler in root.handlers if handler.level > logging.INFO]
    root.handlers[:] = own
    try:
        with log_lines.shown():
            absl_logging.info("a line of a test's, which is the user's")
        assert "a line of a test's" in capsys.readouterr().err
        assert list(root.handlers) == own
    finally:
        root.handlers[:] = before[2]
    assert (absl_logging.get_verbosity(), root.level) == before[:2]


def test_a_program_that_logs_itself_gets_no_second_copy(capsys):
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        with log_lines.shown():
            absl_logging.info("once")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert lines == ["once"]
    assert "once" not in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path, monkeypatch):
    said = []
    monkeypatch.setattr(log_lines.logging, "warning", lambda text, *args: said.append(text % args))
    (tmp_path / "file").write_text("")
    run_log = log_lines.RunLog()
    run_log.open(tmp_path / "file" / "logs" / "train.log")
    assert run_log.path is None
    assert_names(said[0], "log file", tmp_path / "file")


@pytest.mark.parametrize("count", [3, 30_000])
def test_lines_before_the_file_are_kept_but_not_without_end(count):
    run_log = log_lines.RunLog()
    for number in range(count):
        run_log.handle(logging.LogRecord("x", logging.INFO, "x.py", 1, f"{number}", (), None))
    assert len(run_log.buffer) == min(count, log_lines._KEPT_RECORDS)
    assert run_log.buffer[-1].getMessage() == str(count - 1)

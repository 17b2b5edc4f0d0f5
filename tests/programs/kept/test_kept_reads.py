"""What a program was made from, and what of it has changed."""

import builtins
import functools
import importlib
import os
import sys
import sysconfig
import threading
import types

import pytest
from facts import assert_names

from spmd_trainer.programs.kept.reads import Recorder, stamp_of


def in_the_past(path):
    """Makes a file older than a recording that begins now."""
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's module that reads a file and an environment variable."""
    path = tmp_path / "reads_things.py"
    path.write_text(
        "import os, pathlib\ndef read(file): return pathlib.Path(file).read_text() + os.environ.get('MINE', '')\n"
    )
    in_the_past(path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("reads_things")
    del sys.modules["reads_things"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    in_the_past(path)
    return path


def recorded(module, text, without="/nowhere"):
    recorder = Recorder()
    with recorder.recording():
        module.read(text)
    reads, unsure = recorder.reads(without)
    assert not unsure
    return reads


def test_nothing_has_changed_at_once(module, text):
    assert recorded(module, text).changed() == ""


def test_a_file_with_other_content_has_changed_also_at_the_same_time_and_size(module, text):
    reads, before = recorded(module, text), text.stat()
    text.write_text("two")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reads.changed() == f"{text} has changed"


def test_a_file_that_is_gone_has_changed(module, text):
    reads = recorded(module, text)
    text.unlink()
    assert reads.changed() == f"{text} has changed"


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("1", None), ("1", "2")])
def test_a_variable_that_is_set_removed_or_changed(module, text, monkeypatch, before, after):
    def put(value):
        monkeypatch.delenv("MINE", raising=False)
        if value is not None:
            monkeypatch.setenv("MINE", value)

    put(before)
    reads = recorded(module, text)
    put(after)
    assert_names(reads.changed(), "environment variable", "MINE")


def test_code_that_was_edited_or_comes_from_elsewhere(module, text, tmp_path):
    reads = recorded(module, text)
    path = tmp_path / "reads_things.py"
    code = path.read_text()
    path.write_text(code + "\n")
    assert reads.changed() == f"{path} has changed"
    path.write_text(code)
    module.__file__ = "/elsewhere/reads_things.py"
    assert_names(reads.changed(), "reads_things is imported", "/elsewhere/reads_things.py now", f"not from {path}")


def test_a_users_module_that_was_not_imported_then(module, text, tmp_path):
    reads = recorded(module, text)
    (tmp_path / "imported_later.py").write_text("")
    try:
        importlib.import_module("imported_later")
        assert_names(reads.changed(), f"imported_later ({tmp_path / 'imported_later.py'})", "not imported")
    finally:
        sys.modules.pop("imported_later", None)


def test_an_object_that_calls_itself_a_module_has_no_file(module, text, monkeypatch):
    class Library:
        __class__ = types.ModuleType

    monkeypatch.setitem(sys.modules, "library_of_c", Library())
    assert "library_of_c" not in recorded(module, text).modules


def test_the_runs_own_files_do_not_count(module, text, tmp_path):
    assert recorded(module, text, without=str(tmp_path)).files == {}


def test_other_threads_and_libraries_do_not_count(module, text):
    recorder = Recorder()
    with recorder.recording():
        thread = threading.Thread(target=module.read, args=(text,))
        thread.start()
        thread.join()
        os.environ.get("READ_BY_A_TEST_OF_THE_TRAINER")
    reads, _ = recorder.reads("/nowhere")
    assert not reads.files
    assert "MINE" not in reads.environment


def test_what_was_edited_since_the_recording_began_can_not_be_relied_on(module, text, tmp_path):
    recorder = Recorder()
    with recorder.recording():
        module.read(text)
        code = tmp_path / "reads_things.py"
        code.write_text(code.read_text() + "SCALE = 22\n")
    assert_names(recorder.reads("/nowhere")[1], code, "changed since")


def test_an_installation_by_a_link_is_an_installation(tmp_path, monkeypatch):
    folder = sysconfig.get_path("purelib")
    assert stamp_of(os.path.join(folder, "jax", "__init__.py")).count(" ") == 1, "size and time, not a checksum"


def test_a_variable_that_a_library_reads_for_the_user_counts(module, text, monkeypatch, tmp_path):
    (tmp_path / "deep.py").write_text("def call(n, f): return call(n - 1, f) if n else f()\n")
    monkeypatch.setenv("MINE", "1")
    deep = importlib.import_module("deep")
    recorder = Recorder()
    with recorder.recording():
        deep.call(30, lambda: module.read(text))
    del sys.modules["deep"]
    assert recorder.reads("/nowhere")[0].environment == {"MINE": "1"}


def test_open_as_a_class_attribute_and_a_replaced_open_work_on(text, monkeypatch):
    monkeypatch.setattr(builtins, "open", builtins.open)  # puts it back after the test
    recorder = Recorder()
    with recorder.recording():

        class Reader:
            read = open

        mine = functools.partial(builtins.open)
        builtins.open = mine
    assert builtins.open is mine
    with Reader().read(text) as file:
        assert file.read() == "one"


def test_reading_and_looking_up_are_as_before_afterwards(module, text):
    plain_open, plain_look = open, type(os.environ).__getitem__
    recorded(module, text)
    assert (open, type(os.environ).__getitem__) == (plain_open, plain_look)
    with pytest.raises(KeyError):
        os.environ["NOT_THERE_AT_ALL"]

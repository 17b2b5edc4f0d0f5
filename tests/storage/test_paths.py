"""Paths that users give: what each spelling means, and which are refused with the right one."""

import os
import pathlib

import pytest
from facts import raises_naming

from spmd_trainer import storage
from spmd_trainer.errors import UserError
from spmd_trainer.storage import paths


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("gs://bkt/run", "gs://bkt/run"),
        ("gs://bkt/run/", "gs://bkt/run"),
        ("gs://bkt/a//b", "gs://bkt/a/b"),
        ("gs://bkt", "gs://bkt"),
        ("GS://bkt/run", "gs://bkt/run"),
        ("gcs://bkt/run", "gs://bkt/run"),
        ("s3://bkt/a b/run", "s3://bkt/a b/run"),
        ("s3a://bkt/run", "s3://bkt/run"),
        ("file:///tmp/run", "/tmp/run"),
        ("file://localhost/tmp/run", "/tmp/run"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        ("/tmp/x/../run", "/tmp/run"),
        ("/tmp/run:1", "/tmp/run:1"),
    ],
)
def test_spellings(text, path):
    assert os.fspath(storage.directory("--job_log_dir", text)) == path


def test_local_paths_are_absolute_and_know_the_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert os.fspath(storage.directory("x", "run")) == f"{tmp_path}/run"
    assert os.fspath(storage.directory("x", pathlib.Path("run:1"))) == f"{tmp_path}/run:1"
    assert os.fspath(storage.directory("x", "~/run")) == "/home/me/run"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hdfs://cluster/run", "hdfs:// is no storage"),
        ("g3://bkt/run", r"did you mean [gs][s3]://bkt/run\?"),
        ("https://storage.googleapis.com/bkt/run", "did you mean gs://bkt/run"),
        ("gs:/bkt/run", "did you mean gs://bkt/run"),
        ("s3:bkt/run", "did you mean s3://bkt/run"),
        ("file://tmp/run", "did you mean file:///tmp/run"),
        ("gs://", "names no bucket"),
        ("gs:///run", r"did you mean gs://run\?"),
        ("gs://Bkt/run", "did you mean gs://bkt/run"),
        ("s3://my_Bkt/run", "did you mean s3://my-bkt/run"),
        ("gs://b/run", "is no name of a bucket"),
        ("gs://bkt/../run", r"have no '.' and '..'"),
        ("gs://bkt/run*", r"\* can't be in the name"),
        ("gs://bkt/[a]", r"\[ \] can't be in the name"),
        ("run\nx", r"control character '\\n'"),
        ("gs://bkt/\x00", r"control character '\\x00'"),
        ("gs://bkt/" + "x" * 1000, "has 1009 bytes; a path may have 1024"),
        ("/tmp/" + "x" * 300, "300 bytes, and a file system takes names of at most 255"),
        ("/tmp" + "/xxx" * 1000, "a path may have 4096"),
        ("/gs/data", "can't be told from gs://data"),
    ],
)
def test_refusals_name_the_right_spelling(text, says):
    with pytest.raises(UserError, match=says) as raised:
        storage.directory("--job_log_dir", text)
    assert str(raised.value).startswith("--job_log_dir=")
    assert len(str(raised.value)) < 400


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_naming(UserError, "gs://", "gcsfs", "spmd-trainer[gcs]"):
        storage.directory("--job_log_dir", "gs://bkt/run")


def test_files_of_inputs_may_be_patterns():
    assert paths.file_or_pattern("files", "gcs://bkt/*.txt") == "gs://bkt/*.txt"
    assert paths.file_or_pattern("files", "corpus/*.txt") == "corpus/*.txt"
    with pytest.raises(UserError, match="hdfs:// is no storage"):
        paths.file_or_pattern("files", "hdfs://x/*.txt")


def test_remote():
    assert [storage.is_remote(path) for path in ("gs://b/x", "s3://b/x", "/gs:/x", "x")] == [True, True, False, False]

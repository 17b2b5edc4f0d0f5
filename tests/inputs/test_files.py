"""Globs in `files`, and error messages for wrong paths."""

import os
import pathlib

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import drain
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, record_files, text, tfrecord


@pytest.fixture
def corpus(tmp_path):
    for name in ("b.txt", "a.txt", "a10.txt", "a2.txt", "notes.md", ".hidden.txt", "deep/c.txt", "deep/er/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


def found(source):
    return list(files.find_files(source).paths)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "a10.txt", "a2.txt", "b.txt"]),
        ("a?.txt", ["a2.txt"]),
        ("[bc].txt", ["b.txt"]),
        ("*", ["a.txt", "a10.txt", "a2.txt", "b.txt", "notes.md"]),
        ("**/*.txt", ["a.txt", "a10.txt", "a2.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]),
        ("deep/**", ["deep/c.txt", "deep/er/d.txt"]),
        ("*/c.txt", ["deep/c.txt"]),
    ],
)
def test_a_pattern_stands_for_its_files_sorted(corpus, pattern, names):
    assert found(str(corpus / pattern)) == [str(corpus / name) for name in names]
    assert found(corpus / pattern) == found([str(corpus / pattern)]) == found(lambda: [corpus / pattern])


def test_patterns_and_paths_keep_their_order(corpus):
    given = [str(corpus / "notes.md"), str(corpus / "deep" / "*.txt"), str(corpus / "a*.txt")]
    assert [pathlib.Path(path).name for path in found(given)] == ["notes.md", "c.txt", "a.txt", "a10.txt", "a2.txt"]


def test_a_path_that_exists_is_no_pattern(tmp_path):
    literal = tmp_path / "a[12]*.txt"
    literal.write_bytes(b"literal")
    (tmp_path / "a1.txt").write_bytes(b"another")
    assert found(str(literal)) == [str(literal)]


def test_a_path_given_twice_is_read_twice(corpus):
    assert found([str(corpus / "a.txt")] * 2) == [str(corpus / "a.txt")] * 2


@pytest.mark.parametrize("given", [("*.txt", "a*.txt"), ("*.txt", "a2.txt"), ("a2.txt", "*.txt")])
def test_patterns_that_overlap_are_refused(corpus, given):
    with raises_naming(UserError, "`files`", *(f"'{corpus / entry}'" for entry in given), "overlap") as raised:
        found([str(corpus / entry) for entry in given])
    assert any(f"{corpus / name} twice" in str(raised.value) for name in ("a.txt", "a2.txt"))


@pytest.mark.parametrize(
    ("pattern", "facts"),
    [
        (
            "*.text",
            ["{0}/*.text", "no file", "{0} holds", "a.txt, a10.txt, a2.txt, b.txt, deep, notes.md, void, .hidden.txt"],
        ),
        ("dep/*.txt", ["{0}/dep/*.txt", "no folder", "{0}/dep", "deep?"]),
        ("de*/er*", ["{0}/de*/er*", "folders", "{0}/deep/er", "{0}/de*/er*/*"]),
        ("no/where/**/*.txt", ["{0}/no/where/**/*.txt", "no folder {0}/no/where (", "no folder {0}/no)"]),
        ("b.text", ["{0}/b.text", "can't be read", "No such file", "mean b.txt", "Correct the path"]),
        ("zzz", ["{0}/zzz", "can't be read", "{0} holds", "a.txt, a10.txt"]),
        ("void", ["{0}/void", "no files that are not hidden", "it holds .hidden.txt"]),
        ("deep/er/d.txt/x", ["{0}/deep/er/d.txt/x", "can't be read", "Not a directory"]),
    ],
)
def test_what_is_wrong_with_a_path_is_said(corpus, pattern, facts):
    (corpus / "void").mkdir()
    (corpus / "void" / ".hidden.txt").touch()
    with raises_naming(UserError, *(fact.format(corpus) for fact in facts)):
        found(str(corpus / pattern))


def test_a_folder_stands_for_all_files_below_it(corpus):
    (corpus / "_SUCCESS").touch()
    names = ["a.txt", "a10.txt", "a2.txt", "b.txt", "deep/c.txt", "deep/er/d.txt", "notes.md"]
    assert found(corpus) == [str(corpus / name) for name in names]
    assert found([corpus / "deep", str(corpus / "b.txt")]) == [str(corpus / name) for name in (*names[4:6], "b.txt")]
    for given in (["deep", "deep"], ["deep", "deep/er/*"], ["deep/c.txt", "deep"]):
        with raises_naming(UserError, "`files`", "twice", "overlap"):
            found([str(corpus / entry) for entry in given])


def test_a_folder_of_folders_and_a_broken_link(tmp_path):
    (tmp_path / "inner").mkdir()
    with raises_naming(UserError, tmp_path, "no files", "it holds inner"):
        found(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with raises_naming(UserError, f"{tmp_path}/gone.txt can't", "No such file"):
        found(str(tmp_path / "*.txt"))


def test_a_named_pipe_and_a_device_are_not_opened(corpus):
    os.mkfifo(corpus / "pipe.txt")
    for given in (corpus / "pipe.txt", corpus / "*.txt"):
        with raises_naming(UserError, corpus / "pipe.txt", "named pipe"):
            found(given)
    (corpus / "zeros.md").symlink_to("/dev/zero")
    with raises_naming(UserError, corpus / "zeros.md", "device"):
        found(corpus / "*.md")


@pytest.mark.parametrize("given", [3, [3], [None], {"a": 1}.items()])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(UserError, match=r"files.*give paths"):
        found(given)


def test_every_input_over_files_takes_a_pattern_and_a_folder(corpus):
    pattern = str(corpus / "a*.txt")
    for kind, length in (
        (text.TextInput, "seq_len"),
        (text.PackedTextInput, "seq_len"),
        (text.PromptInput, "prefix_len"),
    ):
        folder = base_hyperparams.instantiate(
            pax_fiddle.Config(kind, files=str(corpus / "deep"), batch_size=1, **{length: 4})
        )
        assert [pathlib.Path(path).name for path in folder.paths] == ["c.txt", "d.txt"]
        source = base_hyperparams.instantiate(pax_fiddle.Config(kind, files=pattern, batch_size=1, **{length: 4}))
        assert [pathlib.Path(path).name for path in source.paths] == ["a.txt", "a10.txt", "a2.txt"]
        assert drain(source)


def test_record_files_take_a_pattern(tmp_path):
    import tensorflow as tf

    for shard in (1, 0):
        with tf.io.TFRecordWriter(str(tmp_path / f"x-{shard}.tfrecord")) as writer:
            feature = {"n": tf.train.Feature(int64_list=tf.train.Int64List(value=[shard]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    config = pax_fiddle.Config(
        tfrecord.TfRecordInput,
        files=str(tmp_path / "*.tfrecord"),
        features={"n": tfrecord.Feature((), "int32")},
        batch_size=2,
    )
    (batch,) = drain(base_hyperparams.instantiate(config))
    np.testing.assert_array_equal(batch.n, [0, 1])
    assert record_files.RecordFiles(str(tmp_path / "*-1.*")).counts == [1]


def test_an_array_of_paths(tmp_path):
    paths = [str(tmp_path / name) for name in ("b.txt", "a.txt")]
    for path in paths:
        pathlib.Path(path).write_text("x")
    assert found(np.array(paths)) == paths

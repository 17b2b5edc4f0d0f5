"""TFRecord files: examples, resuming, and error messages for broken files."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import record_files, tfrecord
from spmd_trainer.inputs.tfrecord import Feature

COUNTS = (5, 0, 6)
FEATURES = {
    "label": Feature((), "int32"),
    "x": Feature((2,), "float32"),
    "raw": Feature((2, 3), "int16", "raw"),
    "img.pixels": Feature((3, 4, 1), "uint8", "image", key="image/encoded"),
}


def write_records(directory, counts=COUNTS):
    """Files of examples numbered through; returns their paths."""
    import tensorflow as tf

    def example(n):
        image = tf.io.encode_png(np.full((3, 4, 1), n, np.uint8)).numpy()
        raw = np.arange(n, n + 6).astype("<i2").tobytes()
        feature = {
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[n])),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[n, n + 0.5])),
            "raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw])),
            "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    paths, n = [], 0
    for i, count in enumerate(counts):
        paths.append(str(directory / f"{i}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for _ in range(count):
                writer.write(example(n))
                n += 1
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("records"))


def make(files, **kwargs):
    defaults = {"features": FEATURES, "batch_size": 4}
    return base_hyperparams.instantiate(
        pax_fiddle.Config(tfrecord.TfRecordInput, files=files, **{**defaults, **kwargs})
    )


def flat(taken):
    return [dict(batch.FlattenItems()) for batch in taken]


def test_evaluation_gives_every_example_once(files):
    source = make(files)
    given = drain(source)
    labels = np.concatenate([batch.label for batch in given])
    assert labels.tolist() == [*range(11), 10]
    assert np.concatenate([batch.eval_sample_weights for batch in given]).tolist() == [1] * 11 + [0]
    for batch in given:
        np.testing.assert_array_equal(batch.x, batch.label[:, None] + np.array([0, 0.5], np.float32))
        np.testing.assert_array_equal(batch.raw, batch.label[:, None, None] + np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(batch.img.pixels[:, 2, 3, 0], batch.label)
        assert {path: (x.shape, x.dtype) for path, x in batch.FlattenItems()} == {
            path: (spec.shape, spec.dtype) for path, spec in source.input_specs().FlattenItems()
        }


def test_training_resumes_exactly_for_any_number_of_processes(files):
    source = make(files, is_training=True, input_random_seed=5)
    first = np.concatenate([batch.label for batch in take(source, 11)])
    for epoch in first.reshape(4, 11):
        assert sorted(epoch) == list(range(11))
    shares = [
        make(files, is_training=True, input_random_seed=5, batch_size=2, num_infeed_hosts=2, infeed_host_index=i)
        for i in (0, 1)
    ]
    for share in shares:
        share.set_state(source.get_state())
    assert_same(stack_processes(*(flat(take(share, 5)) for share in shares)), flat(take(source, 5)))


def test_a_position_in_other_files_is_refused_with_how_many_there_were(files):
    source = make(files, is_training=True)
    sizes = [pathlib.Path(path).stat().st_size for path in files]
    before = f"{len(files)} files of {sum(sizes):,} bytes"
    rest = files[1:]
    now = f"{len(rest)} file{'s' if len(rest) > 1 else ''} of {sum(sizes[1:]):,} bytes"
    with raises_naming(ValueError, "files have changed", before, f"now {now}"):
        make(rest, is_training=True).set_state(source.get_state())


@pytest.mark.full
def test_specs_are_known_without_the_files():
    code = """
import sys
from spmd_trainer.inputs import tfrecord
source = tfrecord.TfRecordInput(files=["/no/such"], features={"x": tfrecord.Feature((2,))}, batch_size=4)
assert source.input_specs().x.shape == (4, 2)
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_missing_tensorflow_is_reported_with_the_command_that_installs_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with raises_naming(UserError, "TfRecordInput '", "needs TensorFlow", "pip install", "tensorflow-cpu"):
        make(files)


def damaged(files, tmp_path, at=None, size=None):
    """A copy of the last file with one byte changed, or cut off."""
    content = bytearray(pathlib.Path(files[-1]).read_bytes())[:size]
    if at is not None:
        content[at] ^= 1
    path = tmp_path / "damaged.tfrecord"
    path.write_bytes(content)
    return [files[0], str(path)]


def offset_of(files, record):
    return int(record_files.RecordFiles(files[-1:]).describe(record).rpartition("byte ")[2][:-1])


def test_a_broken_file_is_named_with_its_record_and_what_is_whole(files, tmp_path):
    third = offset_of(files, 3)
    for damage, *wrong in (
        ({"at": third + 2}, "length", "checksum"),
        ({"size": third + 7}, "ends inside"),
        ({"size": third + 40}, "ends inside"),
    ):
        facts = ("damaged.tfrecord, record 3", f"byte {third}", "broken", *wrong, "3 records before")
        with raises_naming(ValueError, *facts):
            make(damaged(files, tmp_path, **damage)).get_next()


def test_broken_data_are_found_when_they_are_read(files, tmp_path):
    third = offset_of(files, 3)
    source = make(damaged(files, tmp_path, at=third + 30))
    assert [batch.label.tolist() for batch in take(source, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(2):
        with raises_naming(ValueError, "damaged.tfrecord", "record 3", f"byte {third}", "broken", "data don't match"):
            source.get_next()


def test_a_file_that_changes_under_a_run_is_refused(files, tmp_path):
    paths = damaged(files, tmp_path)
    source = make(paths)
    source.get_next()
    pathlib.Path(paths[1]).write_bytes(b"")
    with raises_naming(ValueError, paths[1], "has changed", "start the run again"):
        source.get_next()


def test_more_files_than_may_be_open(files, monkeypatch):
    monkeypatch.setattr(record_files.RecordFiles, "most_open", 1)
    records = record_files.RecordFiles(files)
    whole = records.data(range(11))
    assert records.data([10, 0, 7, 3, 5]) == [whole[i] for i in (10, 0, 7, 3, 5)]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"labl": Feature((), "int32")}, r"0.tfrecord, record 0 .*Feature: labl .* is required"),
        ({"x": Feature((3,))}, r"record 0 \(at byte 0\) .*`features`: Key: x.*float values"),
        ({"x": Feature((2,), "int32")}, r"record 0 .*Data types"),
        ({"label": Feature((), "bool")}, r"record 2 \(at byte \d+\): .*'label' holds 2, .*bool"),
        ({"raw": Feature((2,), "int16", "raw")}, r"feature 'raw' has 12 bytes; \(2,\) of int16 are 4"),
        ({"raw": Feature((2, 3, 1), "uint8", "image")}, r"'raw' is not an image"),
        (
            {"i": Feature((3, 5, 1), "uint8", "image", "image/encoded")},
            r"'i' .*shape \(3, 4, 1\), not \(3, 5",
        ),
        ({"i": Feature((3, 5, 1), "float32", "image")}, "images .*shape .* dtype uint8"),
        ({"x": Feature((2,), encoding="jpeg")}, "encoding 'jpeg'; "),
        ({"x": ((2,), "float32")}, "not a Feature; "),
        ({}, "features={}; give e.g."),
    ],
)
def test_features_that_do_not_fit_say_where(files, features, message):
    with pytest.raises(ValueError, match=message):
        make(files, features=features).get_next()


def test_files_that_hold_no_records(files, tmp_path):
    packed, text = tmp_path / "packed.gz", tmp_path / "text.tfrecord"
    packed.write_bytes(b"\x1f\x8bwhatever")
    text.write_text("this is no TFRecord file at all")
    with pytest.raises(ValueError, match=r"packed.gz is compressed.*unpack it with `gunzip`"):
        make([str(packed)]).get_next()
    with pytest.raises(ValueError, match=r"text.tfrecord, record 0 \(at byte 0\) is broken"):
        make([str(text)]).get_next()
    with pytest.raises(ValueError, match="all 1 files are empty"):
        make(files[1:2]).get_next()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": [1.0] * 5}, "row 5 does not match `features`: Key: x"),
        ({"label": [1.0]}, "row 5 .*`features`: .*Data types"),
        ({"label": []}, "row 5 does not match `features`: .*label"),
        ({"label": [2**31]}, "row 5: feature 'label' holds 2147483648, which int32 can't hold"),
        ({"raw": [b"12"]}, r"row 5: feature 'raw' has 2 bytes; \(2,\) of int16 are 4"),
        ({"raw": [b"1234", b"5678"]}, "row 5 does not match `features`: .*raw"),
    ],
)
def test_an_example_that_does_not_fit_is_named_among_others(wrong, message):
    import tensorflow as tf

    def example(values):
        def list_of(values):
            if values and isinstance(values[0], bytes):
                return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
            if values and isinstance(values[0], float):
                return tf.train.Feature(float_list=tf.train.FloatList(value=values))
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

        feature = {key: list_of(value) for key, value in values.items()}
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    right = {"x": [0.5] * 6, "label": [-(2**31)], "raw": [b"abcd"]}
    features = {"x": Feature((2, 3)), "label": Feature((), "int32"), "raw": Feature([2], "int16", "raw")}
    parser = tfrecord.ExampleParser(features, lambda row: f"row {row}")
    examples = [example(right)] * 10
    assert {name: x.shape for name, x in parser.parse(examples).items()} == {
        "x": (10, 2, 3), "label": (10,), "raw": (10, 2)
    }  # fmt: skip
    examples[5] = example({**right, **wrong})
    with pytest.raises(UserError, match=message):
        parser.parse(examples)

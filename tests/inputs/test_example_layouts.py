"""Examples that differ in their values only are parsed without TensorFlow, to what TensorFlow gives."""

import numpy as np
import pytest
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tfrecord, wire_format
from spmd_trainer.inputs.tfrecord import Feature

FEATURES = {
    "x": Feature((2, 3), "float32", key="vectors"),
    "label": Feature((), "int32"),
    "pair": Feature((2,), "int64"),
    "raw": Feature((2,), "int16", "raw"),
}
# One to five bytes as varints; a negative one has ten.
LABELS = (0, 1, 127, 128, 300, 2**20, 2**31 - 1, -1, -(2**31))


def example(rng, label, extra=b"", replaced=None):
    import tensorflow as tf

    def floats(values):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    def integers(values):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def texts(values):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    features = {
        "vectors": floats(rng.standard_normal(6)),
        "label": integers([label]),
        "pair": integers(rng.integers(-(2**62), 2**62, 2)),
        "raw": texts([rng.bytes(4)]),
        "unused": texts([extra, extra]),
        "none": tf.train.Feature(),
    }
    makers = {"floats": floats, "integers": integers, "texts": texts}
    features.update({key: makers[kind](values) for key, (kind, values) in (replaced or {}).items()})
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def parse(examples, features=FEATURES):
    return tfrecord.ExampleParser(features, lambda row: f"row {row}").parse(examples)


@pytest.fixture
def without_tensorflow(monkeypatch):
    tfrecord._layouts.cache_clear()
    monkeypatch.setattr(tfrecord, "_tensorflow", lambda: pytest.fail("TensorFlow was asked"))


def by_tensorflow(examples, monkeypatch, features=FEATURES):
    with monkeypatch.context() as patch:
        patch.setattr(tfrecord, "_layouts", lambda features: None)
        return parse(examples, features)


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, values in found.items():
        assert values.dtype == expected[name].dtype
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_values_are_those_of_tensorflow(monkeypatch):
    rng = np.random.default_rng(0)
    examples = [example(rng, int(label), rng.bytes(3)) for label in rng.choice(LABELS, 200)]
    expected = by_tensorflow(examples, monkeypatch)
    # The parts of a batch have other first examples, and so learn other layouts first.
    assert_equal(parse(examples), expected)
    assert_equal(parse(examples[::-1]), {name: values[::-1] for name, values in expected.items()})


def test_alike_examples_need_no_tensorflow(without_tensorflow):
    rng = np.random.default_rng(1)
    found = parse(
        [example(rng, label, rng.bytes(5), {"pair": ("integers", [label, 5])}) for label in (3, 300, 4, 5000) * 8]
    )
    assert found["label"].tolist() == [3, 300, 4, 5000] * 8
    assert found["pair"].tolist() == [[3, 5], [300, 5], [4, 5], [5000, 5]] * 8
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        "x": ((32, 2, 3), np.float32), "label": ((32,), np.int32), "pair": ((32, 2), np.int64), "raw": ((32, 2), np.int16)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vectors": ("floats", [1.0] * 5)}, "row 5 does not match `features`: Key: vectors"),
        ({"label": ("floats", [1.0])}, "row 5 .*`features`: .*Data types"),
        ({"label": ("integers", [])}, "row 5 does not match `features`: .*label"),
        ({"label": ("integers", [2**31])}, "row 5: feature 'label' holds 2147483648, which int32 can't hold"),
        ({"raw": ("texts", [b"12"])}, r"row 5: feature 'raw' has 2 bytes; \(2,\) of int16 are 4"),
        ({"raw": ("texts", [b"1234", b"5678"])}, "row 5 does not match `features`: .*raw"),
    ],
)
def test_an_example_that_does_not_fit_is_named_among_alike_ones(wrong, message):
    rng = np.random.default_rng(2)
    examples = [example(rng, 7) for _ in range(40)]
    examples[5] = example(rng, 7, replaced=wrong)
    with pytest.raises(UserError, match=message):
        parse(examples)


def test_damaged_bytes_give_what_tensorflow_gives(monkeypatch):
    rng = np.random.default_rng(3)
    whole = [example(rng, 7, b"abc") for _ in range(20)]
    parse(whole)
    for place in range(len(whole[3])):
        damaged = bytearray(whole[3])
        damaged[place] ^= int(rng.integers(1, 256))
        examples = [*whole[:3], bytes(damaged), *whole[4:]]
        outcomes = [outcome(examples), outcome(examples, lambda given: by_tensorflow(given, monkeypatch))]
        if any(isinstance(one, str) for one in outcomes):
            assert outcomes[0] == outcomes[1]
        else:
            assert_equal(*outcomes)


def outcome(examples, parse_all=parse):
    """What the examples give, or the message of the error."""
    try:
        return parse_all(examples)
    except UserError as error:
        return str(error)


def test_many_layouts_are_left_to_tensorflow(monkeypatch):
    monkeypatch.setattr(wire_format, "_MOST_LAYOUTS", 3)
    wanted = {"label": wire_format.Wanted("label", wire_format.INT64_LIST, (), "int64")}
    layouts = wire_format.Layouts(wanted)
    rng = np.random.default_rng(4)

    def batch(*names):
        alike = {"pair": ("integers", [1, 2])}
        return [example(rng, 1, replaced={**alike, name: ("floats", [0.0])}) for name in names for _ in range(10)]

    assert layouts.parse(batch("a", "b", "c"))["label"].tolist() == [1] * 30
    assert layouts.parse(batch("d")) is None
    assert layouts.parse(batch("a")) is None  # from then on, no time is spent on them


def test_what_is_not_a_message_is_a_value_error():
    for data in (b"\x0a\x05ab", b"\x0b", b"\x80", b"\x08\x01\x80", b"\xff" * 12):
        with pytest.raises(ValueError, match=r"cut off|wire type|a number"):
            list(wire_format.fields(data))
    with raises_naming(ValueError, "a number", "a message"):
        list(wire_format.example_features(b"\x08\x01"))

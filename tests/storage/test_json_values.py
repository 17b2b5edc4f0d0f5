"""JSON that others wrote: what is within the limits is read as `json` reads it, and everything else is a ValueError that names
the field."""

import json

import pytest
from facts import raises_naming

from spmd_trainer.storage import json_values

DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "value",
    [None, 1, -2.5, "é\n", [], {"a": [1, {"b": [None, True]}]}, [2**127, -(2**127)], {"": "[" * 1000}],
)
def test_the_value_is_that_of_json(value):
    text = json.dumps(value)
    assert json_values.parse(text) == json_values.parse(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", []),
        ("{", []),
        (b"\xff\xfe{", []),
        (DEEP, [json_values.MOST_DEPTH]),
        (DEEP + "]" * len(DEEP), [json_values.MOST_DEPTH]),
        ('{"a": 1, "deep": ' + '{"x":' * 200_000, ["deep", json_values.MOST_DEPTH]),
        ('{"a": ' + "[" * 65 + "]" * 65 + "}", ["a", json_values.MOST_DEPTH]),
        ('{"step": 1e400}', ["step", "1e400", "finite"]),
        ('{"layers": [{}, {"size": -1e400}]}', ["layers[1].size", "-1e400", "finite"]),
        ('{"rate": NaN}', ["rate", "NaN"]),
        ("[-Infinity]", ["-Infinity"]),
        ('{"n": ' + "9" * 5000 + "}", ["n", json_values.MOST_DIGITS, "digits"]),
        ('{"n": 1e400, "n": 2}', ["1e400"]),  # hidden by the second value
    ],
)
def test_what_is_refused(text, facts):
    with raises_naming(ValueError, *facts) as raised:
        json_values.parse(text)
    assert len(str(raised.value)) < 1000


def test_text_can_be_told_from_nesting():
    inside = {"text": "[" * 200_000 + '\\"{'}
    assert json_values.parse(json.dumps(inside)) == inside


def test_rows_and_metrics_may_hold_what_is_not_finite():
    assert json_values.parse("[NaN, Infinity, 1e400]", finite=False)[1:] == [float("inf")] * 2


def test_large_files(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(["x" * 50]))
    monkeypatch.setattr(json_values, "MOST_BYTES", 40)
    content = json_values.content_of(path)
    assert len(content) == 41  # the rest is not even read
    with raises_naming(ValueError, "40 bytes"):
        json_values.parse(content)


def test_many_values(monkeypatch):
    monkeypatch.setattr(json_values, "MOST_VALUES", 4)
    monkeypatch.setattr(json_values, "_FEW_BYTES", 4)
    assert json_values.parse('["a,[{,,,,,", 2, 3]') == ["a,[{,,,,,", 2, 3]
    with raises_naming(ValueError, "4 is the most"):
        json_values.parse("[1, 2, [3], [], 5]")


def test_an_object_is_asked_for():
    assert json_values.parse_object("{}") == {}
    with raises_naming(ValueError, "list", "object"):
        json_values.parse_object("[]")


@pytest.mark.parametrize("value", [True, 2.0, "2", None, -1, 2**63, [1]])
def test_whole_numbers(value):
    assert json_values.integer(2, "rank", least=1) == 2
    with raises_naming(ValueError, "rank", "whole number"):
        json_values.integer(value, "rank")


@pytest.mark.parametrize("value", [3, "34", None, [2.0], [True], [-1], [[1]], [2**40, 2**40], [1] * 65])
def test_shapes(value):
    assert json_values.shape([3, 0, 5], "w.shape") == (3, 0, 5)
    with raises_naming(ValueError, "w.shape"):
        json_values.shape(value, "w.shape")

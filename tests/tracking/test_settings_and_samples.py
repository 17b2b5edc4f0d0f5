"""A config as nested settings; decoded examples as tables and pictures."""

import numpy as np
import pytest
from facts import assert_names
from tracking_helpers import PICTURES

from spmd_trainer.training import experiment_config
from spmd_trainer.watch.tracking.samples import markdown, picture, pictures, table
from spmd_trainer.watch.tracking.settings import flat, nested


def test_settings_are_nested_and_typed():
    lines = [
        "task.model: LanguageModel",
        "task.model.dims: 8",
        "task.model.rate: 1e-3",
        "task.model.name: 'a: b'",
        "task.model.none: None",
        "task.model.on: True",
        "task.model.list: [1, 2]",
        "task.model.array: array([1,",
        "       2])",
        "train_datasets[0].files: /data/x.txt",
    ]
    assert nested(lines) == {
        "task": {
            "model": {
                "class": "LanguageModel",
                "dims": 8,
                "rate": 0.001,
                "name": "a: b",
                "none": None,
                "on": True,
                "list": "[1, 2]",
                "array": "array([1,\n       2])",
            }
        },
        "train_datasets[0]": {"files": "/data/x.txt"},
    }


def test_a_class_may_stand_after_its_fields():
    assert nested(["a.b: 1", "a: Thing"]) == {"a": {"b": 1, "class": "Thing"}}


def test_every_setting_of_a_real_config_is_there():
    lines = experiment_config.resolve("lm.stdlib.StdlibBytesTiny", ()).lines()
    paths = [line.partition(": ")[0] for line in lines]
    found = flat(nested(lines))
    assert len(found) == len(paths)
    assert found["task.train.num_train_steps"] == int(
        dict(line.split(": ", 1) for line in lines)["task.train.num_train_steps"]
    )


def test_records_of_other_models_show_every_field():
    columns, rows = table(PICTURES, "pictures", 3)
    assert columns == ["index", "label", "logits"]
    assert rows == [[7, 3, "[0.5, 1.5]"]]


def test_a_long_text_says_where_it_is_whole():
    _, rows = table([{"index": 0, "prompt": "", "output": "x" * 5000}], "prompts", 8)
    assert_names(rows[0][2].lstrip("x"), "5000 characters", "decode_out/prompts/step_8.jsonl")


def test_no_records():
    assert table([], "prompts", 1) == ([], [])
    assert markdown([], "prompts", 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([[[0], [255]]], [[[0] * 3, [255] * 3]]),
        ([[[0.0, 0.5, 1.0]]], [[[0, 128, 255]]]),
        ([[[-1.0, 0.0, 1.0]]], [[[0, 128, 255]]]),
        ([[[300, 0, 100, 0]]], [[[255, 0, 85, 0]]]),
        ([[[0.0, None, 1.0]]], [[[0, 0, 255]]]),
        ([[[5.0]]], [[[0] * 3]]),
    ],
)
def test_arrays_of_rank_3_are_pictures(value, expected):
    found = picture(value)
    assert found.dtype == np.uint8
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], [1.0], [[1]], [[[1, 2]]], [[[[1]]]], [[["a"]]], [[[1], [2, 3]]], [[]], [[[]]]]
)
def test_other_values_are_none(value):
    assert picture(value) is None


def test_pictures_are_named_by_field_and_example():
    assert [(name, array.shape) for name, array in pictures(PICTURES)] == [("image/7", (3, 2, 3))]

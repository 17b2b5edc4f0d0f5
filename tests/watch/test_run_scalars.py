"""Scalars read from metrics.jsonl while a run writes it, and long curves made short."""

import json
import math

import numpy as np
import pytest
from etils import epath
from facts import assert_names

from spmd_trainer.watch.pages.run_scalars import RunScalars, differences, rounded, thin


def scalars_of(tmp_path, lines, folder="train"):
    path = tmp_path / "summaries" / folder / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def points(run, folder, name):
    return [column.tolist() for column in run.files[folder].series(name)]


def test_only_what_is_new_is_read(tmp_path):
    run = RunScalars(epath.Path(tmp_path))
    assert list(run.update()) == []
    scalars_of(tmp_path, [{"step": 1, "loss": 3.0, "note": "text"}, '{"step": 2, "lo'])
    assert list(run.update()) == []
    assert points(run, "train", "loss") == [[1], [3.0]]
    scalars_of(tmp_path, ['ss": 2.5}\n', {"step": 3, "loss": 2.0, "lr": 0.1}])
    assert not run.files["train"].bad_lines
    assert list(run.update()) == []
    assert points(run, "train", "loss") == [[1, 2, 3], [3.0, 2.5, 2.0]]
    assert points(run, "train", "lr") == [[3], [0.1]]
    assert run.files["train"].names() == ["loss", "lr"]
    assert points(run, "train", "nothing") == [[], []]
    assert not run.files["train"].update()


def test_another_file_in_its_place_is_read_anew(tmp_path):
    path = scalars_of(tmp_path, [{"step": step, "loss": 1.0} for step in range(5)])
    run = RunScalars(epath.Path(tmp_path))
    list(run.update())
    path.write_text(json.dumps({"step": 7, "loss": 9.0}) + "\n")
    list(run.update())
    assert points(run, "train", "loss") == [[7], [9.0]]


def test_steps_that_a_later_start_took_again_replace_those_of_the_earlier_one(tmp_path):
    lines = [{"step": step, "loss": float(step)} for step in (10, 20, 30, 40)]
    lines += [{"step": step, "loss": -float(step)} for step in (25, 35)]
    scalars_of(tmp_path, lines)
    run = RunScalars(epath.Path(tmp_path))
    list(run.update())
    assert points(run, "train", "loss") == [[10, 20, 25, 35], [10.0, 20.0, -25.0, -35.0]]
    assert run.files["train"].back == [25]


def test_an_evaluation_of_an_older_checkpoint_takes_nothing_away(tmp_path):
    scalars_of(tmp_path, [{"step": s, "x": v} for s, v in ((10, 1.0), (20, 2.0), (10, 1.5))], "eval_heldout")
    run = RunScalars(epath.Path(tmp_path))
    list(run.update())
    assert points(run, "eval_heldout", "x") == [[10, 20], [1.5, 2.0]]


def test_lines_that_cannot_be_read_are_a_note(tmp_path):
    scalars_of(
        tmp_path,
        [
            {"step": 1, "loss": 3.0},
            "half a li\n",
            '["step"]\n',
            '{"loss": 1}\n',
            f'{{"step": 1{"0" * 400}}}\n',
            {"step": 2, "loss": 2.0},
        ],
    )
    run = RunScalars(epath.Path(tmp_path))
    (note,) = run.update()
    assert_names(note, "summaries/train/metrics.jsonl", "4 lines", "can't be read")
    assert points(run, "train", "loss") == [[1, 2], [3.0, 2.0]]


def test_a_thinned_curve_keeps_its_ends_spikes_and_gaps():
    steps = np.arange(1.0, 100_001.0)
    values = np.sin(steps / 5000)
    values[[777, 50_000]] = 40.0, -30.0
    values[60_123] = np.nan
    values[-1] = 0.123456789123
    found_steps, found = thin(steps, values, 500)
    assert found_steps.size <= 2 * 500 + 3
    assert (np.diff(found_steps) > 0).all()
    assert (found_steps[0], found_steps[-1]) == (1, 100_000)
    assert found[-1] == values[-1]
    assert {778, 50_001, 60_124} <= set(found_steps.tolist())
    assert np.nanmax(found) == 40.0
    assert np.nanmin(found) == -30.0
    assert math.isnan(found[found_steps.tolist().index(60_124)])
    assert all(
        values[int(step) - 1] == value or math.isnan(value) for step, value in zip(found_steps, found, strict=True)
    )


@pytest.mark.parametrize("size", [0, 1, 2, 19, 20, 21, 22, 23, 41, 100])
def test_short_curves_stay_whole_and_any_length_keeps_its_ends(size):
    steps, values = np.arange(float(size)), np.random.default_rng(0).normal(size=size)
    found_steps, found = thin(steps, values, 10)
    assert found_steps.size == found.size <= max(20, 2 * 10 + 2)
    if size <= 20:
        assert found.tolist() == values.tolist()
    else:
        assert (found[0], found[-1]) == (values[0], values[-1])
        assert (found.min(), found.max()) == (values.min(), values.max())


def test_a_curve_without_a_finite_value_is_thinned_too():
    steps, values = thin(np.arange(1000.0), np.full(1000, np.nan), 10)
    assert (steps[0], steps[-1]) == (0, 999)
    assert np.isnan(values).all()


def test_values_become_short_numbers_and_their_ends_stay_exact():
    values = np.array([1 / 3, 2 / 3, np.nan, np.inf, 123456789.0, 1 / 7])
    assert rounded(values) == [1 / 3, 0.666667, None, None, 123457000.0, 1 / 7]
    assert rounded(np.array([])) == []
    assert rounded(np.array([1e9, 1e9 + 1.25, 1e9 + 2])) == [1e9, 1e9 + 1.25, 1e9 + 2], "differences can still be seen"
    assert rounded(np.full(3, 3221225472.0)) == [3221225472.0] * 3, "a constant stays one"
    assert rounded(np.array([1e300, -1e300])) == [1e300, -1e300]
    assert rounded(np.array([1e308, -1e308, 1.0])) == [1e308, -1e308, 1.0]  # a warning would be an error
    assert differences([10, 20, 50]) == [10, 10, 30]

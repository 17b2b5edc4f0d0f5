"""What a sweep varies, and which values its trials get."""

import json
import math

import pytest
from facts import raises_naming
from hypothesis import given
from hypothesis import strategies as st

from spmd_trainer.errors import UserError
from spmd_trainer.sweeps import methods, space, trials

LISTS = st.dictionaries(
    st.text("abc", min_size=1), st.lists(st.integers(), min_size=1, max_size=4, unique=True), min_size=1, max_size=3
)


@given(LISTS)
def test_a_grid_has_every_combination_once(lists):
    read = space.read_space(lists)
    size = math.prod(map(len, lists.values()))
    assert space.grid_size(read) == size
    points = [space.grid_point(read, number) for number in range(size)]
    assert all(point[path] in lists[path] for point in points for path in lists)
    assert len({json.dumps(point) for point in points}) == size


@given(LISTS, st.integers(0, 9))
def test_random_points_of_lists_come_again_only_after_all_others(lists, seed):
    read = space.read_space(lists)
    size = space.grid_size(read)
    drawn = [json.dumps(space.random_point(read, seed, number)) for number in range(2 * size)]
    assert len(set(drawn[:size])) == len(set(drawn[size:])) == size


@given(st.floats(1e-6, 1), st.floats(1.1, 1e3), st.booleans(), st.integers(0, 99))
def test_random_numbers_stay_in_their_range_and_depend_on_seed_and_number_alone(low, factor, log, number):
    read = space.read_space({"x": {"low": low, "high": low * factor, "log": log}})
    drawn = space.random_point(read, 7, number)["x"]
    assert low <= drawn <= low * factor
    assert space.random_point(read, 7, number)["x"] == drawn != space.random_point(read, 8, number)["x"]


def test_a_logarithmic_range_is_drawn_evenly_by_its_logarithm():
    read = space.read_space({"x": {"low": 1e-4, "high": 1.0, "log": True}})
    drawn = [space.random_point(read, 0, number)["x"] for number in range(400)]
    assert 150 < sum(x < 1e-2 for x in drawn) < 250


def test_whole_numbers_reach_both_bounds():
    read = space.read_space({"x": {"low": 1, "high": 3, "integer": True}})
    drawn = [space.random_point(read, 0, number)["x"] for number in range(300)]
    assert {type(x) for x in drawn} == {int}
    assert all(60 < drawn.count(x) < 140 for x in (1, 2, 3))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["LEARNING_RATE"], ["mapping"]),
        ({"x": 3}, ["'x'", "list"]),
        ({"x": []}, ["'x'", "list"]),
        ({"x": [object]}, ["'x'", "literal"]),
        ({"x": {"low": 1, "hihg": 2}}, ["'hihg'", "high"]),
        ({"x": {"low": 1}}, ["'x'", "None"]),
        ({"x": {"low": 2, "high": 1}}, ["low=2", "high=1"]),
        ({"x": {"low": 0, "high": 1, "log": True}}, ["low=0", "log"]),
        ({"x": {"low": 0.5, "high": 2, "integer": True}}, ["low=0.5"]),
    ],
)
def test_a_space_that_is_none_is_refused(given, facts):
    with raises_naming(UserError, *facts):
        space.read_space(given)


def test_a_sweep_is_read_from_texts_and_files(tmp_path):
    (tmp_path / "a.json").write_text('{"x": [1, 2]}')
    assert space.read_texts([str(tmp_path / "a.json"), 'task.y=["b"]']) == {"x": [1, 2], "task.y": ["b"]}
    for text, facts in (("x=[1,", ["x=[1,", "JSON"]), (str(tmp_path / "none.json"), ["none.json", "can't be read"])):
        with raises_naming(UserError, "--sweep=", *facts):
            space.read_texts([text])


def test_names_with_commas_vary_together():
    read = space.read_space({"LAYERS, DIMS": [(2, 8), (4, 16)], "SEED": [1, 2]})
    method = methods.make("grid", read, None, 0, maximize=False)
    assert [method.values(number, []) for number in (0, 3)] == [
        {"LAYERS": 2, "DIMS": 8, "SEED": 1},
        {"LAYERS": 4, "DIMS": 16, "SEED": 2},
    ]
    with raises_naming(UserError, "LAYERS,DIMS", "(2,)", "2 values"):
        space.read_space({"LAYERS,DIMS": [(2,)]})


def test_a_grid_of_a_range_and_random_values_without_a_number_are_refused():
    with raises_naming(UserError, "x is a range", "--sweep_method=random"):
        methods.make("grid", space.read_space({"x": {"low": 0, "high": 1}}), None, 0, maximize=False)
    with raises_naming(UserError, "--sweep_trials=N"):
        methods.make("random", space.read_space({"x": [1]}), None, 0, maximize=False)
    with raises_naming(UserError, "--sweep_trials=3", "2 points"):
        methods.make("grid", space.read_space({"x": [1, 2]}), 3, 0, maximize=False)


def test_optuna_comes_closer_to_the_best_value_than_its_first_trials():
    pytest.importorskip("optuna")
    read = space.read_space(
        {"x": {"low": 1e-4, "high": 1.0, "log": True}, "kind": ["a", ("b", 1)], "m,n": [[1, 2], (3, 4)]}
    )
    method = methods.make("optuna", read, 40, 1, maximize=False)
    ended = []
    for number in range(40):
        values = method.values(number, ended)
        assert method.values(number, ended) == values  # as after a kill
        distance = abs(math.log10(values["x"]) + 2) + (values["kind"] == "a")
        ended.append(trials.Trial(number, values, trials.FINISHED, math.nan if number == 3 else distance, 1))
    found = [abs(math.log10(trial.values["x"]) + 2) + (trial.values["kind"] == "a") for trial in ended]
    assert sum(found[20:]) < 0.8 * sum(found[:20])

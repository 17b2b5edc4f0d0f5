"""A sweep's directory: what it says of its trials, which one is best, which ones stop."""

import json
import math
import types

import jax
import numpy as np
import pytest
from etils import epath
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.sweeps import callback, methods, space
from spmd_trainer.sweeps.trials import BROKEN, FINISHED, PRUNED, Metric, Sweep, Trial


def make_sweep(directory, *, count=6, maximize=False, prunes=True, **lists):
    method = methods.make("grid", space.read_space(lists or {"x": list(range(count))}), None, 0, maximize=maximize)
    return Sweep(
        epath.Path(directory), "mine.Tiny", method, Metric.find("", ["heldout"], "loss", maximize=maximize), prunes
    )


def write_curve(sweep, number, values):
    folder = sweep.trial_directory(number) / "summaries" / "eval_heldout"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": value}) for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def end(sweep, number, values, status=FINISHED):
    write_curve(sweep, number, values)
    step = max(values)
    sweep.write(Trial(number, sweep.begin(number).values, status, values[step], step))


def test_values_come_back_as_they_were_given(tmp_path):
    sweep = make_sweep(tmp_path, x=[(1, 2), "a", None, True, 1e-3])
    assert [sweep.begin(number).values["x"] for number in range(5)] == [(1, 2), "a", None, True, 1e-3]
    assert [trial.values for trial in sweep.trials()] == [{"x": v} for v in ((1, 2), "a", None, True, 1e-3)]
    sweep.write(Trial(0, {"x": (1, 2)}, BROKEN, math.nan, 4, 1.5, reason="why"))
    again = sweep.trial(0)
    assert math.isnan(again.value)
    assert (again.reason, again.seconds) == ("why", 1.5)


def test_another_sweep_and_another_thing_in_the_directory_are_refused(tmp_path):
    make_sweep(tmp_path / "a").open()
    make_sweep(tmp_path / "a").open()
    with raises_naming(UserError, "space", str(tmp_path / "a")):
        make_sweep(tmp_path / "a", x=[5]).open()
    with raises_naming(UserError, "goal"):
        make_sweep(tmp_path / "a", maximize=True).open()
    (tmp_path / "b" / "mine").mkdir(parents=True)
    with raises_naming(UserError, "not empty", "mine"):
        make_sweep(tmp_path / "b").open()


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    sweep = make_sweep(tmp_path)
    sweep.begin(0)
    sweep.trial_file(0).write_text("{")
    with raises_naming(UserError, "0000.json"):
        sweep.trials()


@pytest.mark.parametrize("maximize", [False, True])
def test_the_best_trial_has_finished_and_has_a_number(tmp_path, maximize):
    sweep = make_sweep(tmp_path, maximize=maximize)
    found = [
        Trial(0, {}, FINISHED, math.nan, 2),
        Trial(1, {}, FINISHED, 2.0, 2),
        Trial(2, {}, PRUNED, 0.0 if not maximize else 9.0, 1),
        Trial(3, {}, FINISHED, 1.0, 2),
        Trial(4, {}, BROKEN, None, None),
    ]
    assert sweep.best(found).number == (1 if maximize else 3)
    assert sweep.best(found[:1]) is None


def test_a_trial_below_the_median_of_three_earlier_ones_stops(tmp_path):
    sweep = make_sweep(tmp_path)
    end(sweep, 0, {2: 5.0, 4: 1.0})
    end(sweep, 1, {2: 4.0, 4: 2.0})
    assert not sweep.reason_to_prune(3, 2, 100.0)  # two are too few
    end(sweep, 2, {2: 3.0}, PRUNED)
    assert not sweep.reason_to_prune(3, 2, 4.0)
    assert "4.1" in sweep.reason_to_prune(3, 2, 4.1)
    assert sweep.reason_to_prune(3, 2, math.nan)
    assert not sweep.reason_to_prune(3, 4, 100.0)  # at step 4 there are two again
    assert not sweep.reason_to_prune(2, 2, 100.0)  # only trials before it are asked
    end(sweep, 3, {2: 1.0, 4: math.nan})
    assert sweep.reason_to_prune(4, 2, 3.9)
    assert not make_sweep(tmp_path, prunes=False).reason_to_prune(4, 2, 100.0)


def test_a_metric_names_its_dataset(tmp_path):
    del tmp_path
    found = Metric.find("a/b/accuracy", ["a", "a/b"], "loss", maximize=True)
    assert (found.folder, found.key) == ("eval_a/b", "accuracy")
    assert Metric.find("", [], "loss", maximize=False).folder == "train"
    with raises_naming(UserError, "--sweep_metric=accuracy", "heldout"):
        Metric.find("accuracy", ["heldout"], "loss", maximize=True)


@pytest.mark.parametrize(
    ("ramp", "steps", "rows_in_all"), [(None, 5, 20), ({0: 2, 3: 4}, 5, 2 * 3 + 4 * 2), ({0: 2, 3: 4}, 2, 2 * 2)]
)
def test_the_flops_of_a_trial_are_six_for_each_parameter_and_token(ramp, steps, rows_in_all):
    last = 4 if ramp is None or steps > 3 else 2
    run = types.SimpleNamespace(
        batch={"ids": jax.ShapeDtypeStruct((last, 8), np.int32)},
        task=types.SimpleNamespace(model=None, train=types.SimpleNamespace(batch_ramp=ramp, sequence_ramp=None)),
        partitioner=types.SimpleNamespace(
            metadata=types.SimpleNamespace(num_params=lambda per_token: 100, num_frozen_params=lambda per_token: 0)
        ),
    )
    assert callback.training_flops(run, steps) == 6 * 100 * rows_in_all * 8

"""The coordinate check: flat with muP over a factor of 8 in width, and steep without; its verdict, page and refusals."""

import pytest

from spmd_trainer.errors import UserError
from spmd_trainer.planner import coord_check
from spmd_trainer.planner.coord_check import Curve
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from tests.facts import raises_naming
from tests.planner import coord_models

OUTPUTS = {"Decoder": "logits", "Praxis": "softmax", "Nnx": "output"}


def job_of(experiment, directory, **settings):
    return Job.build(make_run_config(experiment, directory, mode="coord_check", **settings))


def slopes(name, directory, multiples, **settings):
    found = coord_check.curves(job_of(getattr(coord_models, name), directory), multiples, 4, **settings)
    output = [curve for curve in found if OUTPUTS[name] in curve.name]
    assert output
    assert len(found) >= 3
    return [curve.slope for curve in found], [curve.slope for curve in output]


@pytest.mark.full
def test_changes_of_a_wider_model_are_those_of_the_base_with_mup_alone(tmp_path):
    every, _ = slopes("Nnx", tmp_path, [1, 4])
    assert max(map(abs, every)) <= 0.25
    _, output = slopes("Nnx", tmp_path, [1, 4], without=True)
    assert min(output) >= 0.3


@pytest.mark.full
@pytest.mark.parametrize("name", OUTPUTS)
def test_curves_are_flat_over_a_factor_of_8_with_mup_alone(name, tmp_path):
    every, _ = slopes(name, tmp_path, [1, 2, 4, 8])
    assert max(map(abs, every)) <= 0.25
    every, output = slopes(name, tmp_path, [1, 2, 4, 8], without=True)
    assert min(output) >= 0.3
    assert min(every) >= 0.25


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "is_flat"), [(0.0, True), (-0.3, True), (0.5, False), (-0.5, False)])
def test_a_slope_is_the_power_of_the_width(power, is_flat):
    curve = Curve("x", {multiple: 0.1 * multiple**power for multiple in (1, 2, 4, 8)})
    assert curve.slope == pytest.approx(power, abs=1e-6)
    assert curve.is_flat == is_flat


def test_the_command_names_what_is_not_flat_and_writes_a_page(tmp_path, monkeypatch, capsys):
    flat, steep = (Curve(f"<{power}>", {1: 0.1, 2: 0.1 * 2**power}) for power in (0.0, 1.0))
    job = job_of(coord_models.Nnx, tmp_path, widths=["1", "2"])
    monkeypatch.setattr(coord_check, "curves", lambda *args, **settings: [flat, steep])
    with pytest.raises(SystemExit) as exit_:
        coord_check.check(job)
    assert exit_.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "NOT FLAT" in line] == ["<1.0>"]
    assert "1 of 2 curves are not flat with muP" in lines[-1]
    text = (tmp_path / coord_check.FILE).read_text()
    assert "&lt;1.0&gt;" in text
    assert text.count("<polyline") == 2
    monkeypatch.setattr(coord_check, "curves", lambda *args, **settings: [flat])
    coord_check.check(job)
    assert "all 1 curves are flat" in capsys.readouterr().out


def test_what_has_no_widths_is_refused(tmp_path):
    class NotANumber(coord_models.Nnx):
        def task(self):
            task_p = super().task()
            task_p.mup.base = {"WIDTH": 64, "task.summary_verbosity": None}
            return task_p

    with raises_naming(UserError, "--widths=1"):
        _ = job_of(coord_models.Nnx, tmp_path, widths=["1"]).config.multiples
    with raises_naming(UserError, "--mode=coord_check", "task.mup"):
        coord_check.check(job_of(coord_models.Nnx, tmp_path, overrides=["task.mup=None"]))
    with raises_naming(UserError, "task.summary_verbosity", "None"):
        coord_check.check(job_of(NotANumber, tmp_path))

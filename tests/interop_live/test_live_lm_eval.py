"""Answers of `--mode=lm_eval`, live against lm-eval's own `hf` backend: request by request, on meshes that divide nothing.

It needs lm-eval in both environments; without it here, tests/lm_evaluation/test_lm_eval.py compares with recorded answers.
"""

from __future__ import annotations

import json
import pathlib

import lm_eval_helpers as helpers
import pytest
from etils import epath
from trained_helpers import make_job

from spmd_trainer.lm_eval import mode
from spmd_trainer.lm_eval.settings import LmEvalSettings

pytestmark = pytest.mark.slow  # runs by `make interop`
helpers.stay_offline()
pytest.importorskip("lm_eval", reason="lm-eval is an extra of its own: pip install 'spmd-trainer[lm-eval]'")
SIDE = pathlib.Path(__file__).parent / "lm_eval_side.py"
MESHES = [(1, 4, 2), (1, 2, 3)]


@pytest.fixture(scope="module", params=helpers.VARIANTS)
def answered(request, torch_side, tmp_path_factory):
    """The variant, its folder, the tasks, and what the `hf` backend answered now."""
    directory = tmp_path_factory.mktemp(request.param)
    tasks = helpers.write_tasks(directory / "tasks")
    folder = helpers.write_folder(directory / "folder", request.param)
    options = json.dumps(helpers.VARIANTS[request.param])
    torch_side(SIDE, folder, tasks, directory / "answers.json", options)
    return request.param, folder, tasks, json.loads((directory / "answers.json").read_text())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_answer_is_that_of_the_hf_backend(mesh, answered, tmp_path):
    variant, folder, tasks, expected = answered
    settings = LmEvalSettings(helpers.NAMES, include_path=tasks, log_samples=True, **helpers.VARIANTS[variant])
    job = make_job(
        tmp_path,
        mesh=mesh,
        exp="lm.hf.FromFolder",
        fields=(f"FOLDER={str(folder)!r}", "SEQ_LEN=64"),
        mode="lm_eval",
        restore_checkpoint_dir=epath.Path(folder),
        **vars(settings),
    )
    mode.evaluate(job)
    helpers.compare(helpers.results_in(epath.Path(tmp_path) / "lm_eval/step_0"), expected)


def test_the_recorded_answers_are_those_of_now(answered):
    """lm_eval_tasks/answers.json, with which tests/lm_evaluation/test_lm_eval.py compares."""
    variant, _, _, expected = answered
    helpers.compare(json.loads((helpers.TASKS / "answers.json").read_text())[variant], expected)

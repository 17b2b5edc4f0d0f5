"""A step that a later start takes again is one point of the curve, the later one."""

import json

import pytest
from etils import epath

from spmd_trainer.watch.pages.run_scalars import RunScalars


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([10, 20, 30, 20, 30, 40], [0, 3, 4, 5]),
        ([10, 20, 30, 20], [0, 3]),
        ([10, 10, 10], [2]),
        ([10, 20, 30, 20, 30, 25], [0, 3, 5]),
    ],
)
def test_the_later_one_counts(tmp_path, steps, kept):
    folder = tmp_path / "summaries" / "train"
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": number}) for number, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    run = RunScalars(epath.Path(tmp_path))
    assert list(run.update()) == []
    found_steps, losses = run.files["train"].series("loss")
    assert losses.tolist() == kept
    assert found_steps.tolist() == [steps[number] for number in kept]

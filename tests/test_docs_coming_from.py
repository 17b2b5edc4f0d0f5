"""The names of this trainer in docs/coming_from_*.md exist. Those of the other programs are not checked."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import fiddle as fdl
import pytest
from praxis import optimizers
from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry, main, models, tasks_lib
from spmd_trainer.checkpointing import CheckpointLoadingRules
from spmd_trainer.cli import modes
from spmd_trainer.experiments.lm.hf import FromFolder
from spmd_trainer.inputs import ChatInput, CorpusInput
from spmd_trainer.seqio_input import SeqIOInput
from spmd_trainer.tasks.lm.model_params import TransformerLmSpmdPipelineAdafactor

_DOCS = Path(__file__).parents[1] / "docs"
_PAGES = ("coming_from_flax", "coming_from_maxtext", "coming_from_t5x")
_AXES = ("replica", "data", "mdl", "seq", "stage")
_PLACES = ("summaries/", "decode_out/")


def _own_names(page: str) -> Iterator[str]:
    """Yields what stands in backticks in the second column of a page's tables."""
    for line in (_DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip().strip("|").split(" | ")
        if line.startswith("| ") and len(cells) >= 2:
            yield from re.findall(r"`([^`]+)`", cells[1])


@functools.cache
def _task() -> Config[tasks_lib.SingleTask]:
    task_p = Config(tasks_lib.SingleTask, name="task", model=Config(models.LinenModel))
    task_p.train.learner.optimizer = Config(optimizers.Adam)
    return task_p


def _is_experiment(name: str) -> bool:
    try:
        experiment_registry.get(name)
    except ValueError:
        return False
    return True


def _has_path(config: object, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(config, fdl.Buildable) or name not in config.__signature_info__.parameters:
            return False
        config = getattr(config, name, None)
    return True


def _can_be_imported(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def _is_known(name: str) -> bool:
    """Says whether a name is one of this trainer's."""
    if name.startswith("--mode="):
        return name.removeprefix("--mode=") in modes.MODES
    if name.startswith("--"):
        return name.removeprefix("--") in main.flags.FLAGS
    if name.startswith("task."):
        return _has_path(_task(), name.removeprefix("task."))
    if name.startswith(("spmd_trainer.", "praxis.")):
        return _can_be_imported(name)
    if name.startswith("lm."):
        return _is_experiment(name)
    if re.fullmatch(r"[A-Z_]+", name):
        return any(hasattr(cls, name) for cls in (FromFolder, TransformerLmSpmdPipelineAdafactor))
    called = re.fullmatch(r"CheckpointLoadingRules\((\w+)=\.\.\.\)", name)
    if called:
        return called[1] in CheckpointLoadingRules.__dataclass_fields__
    return (
        name in _AXES
        or name in _PLACES
        or any(name in cls.__dataclass_fields__ for cls in (CorpusInput, SeqIOInput, ChatInput))
    )


@pytest.mark.parametrize("page", _PAGES)
def test_names_of_this_trainer_exist(page: str) -> None:
    names = list(_own_names(page))
    assert len(names) > 20
    assert [name for name in names if not _is_known(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "--mode=fly",
        "--no_such_flag",
        "task.train.num_steps",
        "spmd_trainer.inputs.Corpus",
        "lm.llama.Llama9",
        "ICI_SHAPE",
    ],
)
def test_other_names_are_noticed(name: str) -> None:
    assert not _is_known(name)


@pytest.mark.parametrize("page", _PAGES)
def test_rows_have_three_cells(page: str) -> None:
    rows = [line for line in (_DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4}

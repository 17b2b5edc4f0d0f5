"""`make faults`: a packed mixture, trained by 3 processes and resumed by 2, gives the batches of one that never stopped."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib

import pytest
from job_helpers import FIELDS, Settings, losses, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("multiprocess"),
    pytest.mark.usefixtures("importable"),
]
# Windows hold 20 rows: the first job ends inside its second window.
ROWS, STOP, STEPS = 12, 3, 6
SETTINGS = FIELDS | {"save_interval_steps": STOP, "eval_interval_steps": 0}


@dataclasses.dataclass(frozen=True)
class MixtureJob(Settings):
    """A job of `mixture_inputs.PackedMixture`."""

    def trainer_flags(self) -> list[str]:
        """Returns the flags that are the same for every process."""
        return ["--exp=mixture_inputs.PackedMixture", "--exp_module=mixture_inputs", *super().trainer_flags()[1:]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of documents of many lengths."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [json.dumps({"text": f"{number} " * (1 + number * 7 % 23)}) + "\n" for number in range(400)]
    (folder / "web.jsonl").write_text("".join(lines[:300]))
    (folder / "code.jsonl.gz").write_bytes(gzip.compress("".join(lines[300:]).encode()))
    return folder


def train(
    folder: pathlib.Path, name: str, documents: pathlib.Path, cache: str, processes: int, steps: int, *flags: str
) -> list[list[str]]:
    """Trains in `folder` until a step; returns the checksums of the rows of each global batch that was read."""
    read = folder.parent / f"rows-{name}"
    read.mkdir()
    env = {"ROWS_READ": os.fspath(read), "DOCUMENTS": os.fspath(documents)}
    fields = SETTINGS | {"num_train_steps": steps}
    mesh = "replica:1,data:3,mdl:2"
    run(MixtureJob(folder, processes, cache, fields, flags=flags, mesh=mesh, rows=ROWS, env=env))
    shares = [(read / f"{index}.txt").read_text().splitlines() for index in range(processes)]
    return [" ".join(lines).split() for lines in zip(*shares, strict=False)]


def test_a_mixture_resumed_by_fewer_processes_gives_the_batches_of_one_process(documents, cache, tmp_path):
    expected = train(tmp_path / "whole", "whole", documents, cache, 1, STEPS)[:STEPS]
    first = train(tmp_path / "parts", "first", documents, cache, 3, STOP)[:STOP]
    then = train(tmp_path / "parts", "then", documents, cache, 2, STEPS)[: STEPS - STOP]
    assert [*first, *then] == expected
    assert [len(rows) for rows in expected] == [ROWS] * STEPS
    assert len({row for rows in expected for row in rows}) == ROWS * STEPS
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_a_corpus_that_a_job_tokenises_while_it_trains_gives_the_same_batches(documents, cache, tmp_path):
    expected = train(tmp_path / "whole", "whole", documents, cache, 1, STEPS)[:STEPS]
    flag = f"--data_cache_dir={tmp_path / 'tokens'}"
    assert train(tmp_path / "first", "first", documents, cache, 3, STEPS, flag)[:STEPS] == expected
    records = sorted((tmp_path / "tokens").glob("corpus-*/tokens-*.json"))
    assert len(records) <= 2  # the last steps don't wait for the tokens
    again = run(
        MixtureJob(
            tmp_path / "long",
            2,
            cache,
            SETTINGS | {"num_train_steps": 200, "save_interval_steps": 200},
            flags=(flag,),
            mesh="replica:1,data:3,mdl:2",
            rows=ROWS,
            env={"ROWS_READ": os.fspath(tmp_path / "rows-first"), "DOCUMENTS": os.fspath(documents)},
        )
    )
    assert len(list((tmp_path / "tokens").glob("corpus-*/corpus.json"))) == 2, again.log()
    assert train(tmp_path / "then", "then", documents, cache, 2, STEPS, flag)[:STEPS] == expected

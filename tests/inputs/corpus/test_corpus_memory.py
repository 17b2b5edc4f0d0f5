"""Memory and threads of inputs over many sources and over many documents; how full rows are."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import made_up_input
import numpy as np
import pytest
from input_helpers import drain
from memory_documents import documents, make

from spmd_trainer.inputs import stdlib_text


def measure(sources, count, *, by_number, batches):
    """Runs made_up_input.py in a process of its own; returns what it prints."""
    script = pathlib.Path(made_up_input.__file__)
    done = subprocess.run(
        [sys.executable, str(script), *map(str, (sources, count, int(by_number), batches))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path]), "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("by_number", [True, False])
def test_35_sources_need_little_more_memory_than_1_and_no_threads_of_their_own(by_number):
    one = measure(1, 3_000_000, by_number=by_number, batches=100)
    many = measure(35, 3_000_000, by_number=by_number, batches=100)
    assert many["after"] < 1.5 * one["after"]
    assert many["after"] - many["before"] < 1.5 * (one["after"] - one["before"]) + 2**26
    assert many["threads"] == one["threads"]


@pytest.mark.full
def test_a_billion_documents_need_no_memory():
    found = measure(1, 10**9, by_number=True, batches=3)
    assert found["after"] - found["before"] < 100e6


@pytest.fixture(scope="module")
def functions():
    """The functions of some files of the standard library."""
    found = []
    for path in stdlib_text.stdlib_train_files()[:40]:
        content = pathlib.Path(path).read_bytes()
        lines = content.splitlines(keepends=True)
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.FunctionDef):
                found.append(b"".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_functions_of_the_standard_library_are_97_percent_full(functions, shuffle):
    size = sum(map(len, functions)) + len(functions)
    source = make(
        documents(functions), seq_len=1024, batch_size=8, window_rows=None, is_training=False, shuffle=shuffle
    )
    batches = drain(source)
    rows = sum(int(batch.eval_sample_weights.sum()) for batch in batches)
    tokens = sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)
    assert tokens == size > 500_000
    assert tokens / (rows * 1024) == source.fill > 0.97

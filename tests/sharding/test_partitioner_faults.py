"""The programs of docs/partitioner_faults.md: XLA computes them wrongly, and the trainer rightly."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.constraints import computable
from spmd_trainer.sharding.even_program import evenly

_PAGE = (Path(__file__).parents[2] / "docs" / "partitioner_faults.md").read_text(encoding="utf-8")
_SECTIONS = re.findall(
    r"^## (?P<title>[^\n]+)\n(?P<text>(?:(?!^## ).)*?)^```python\n(?P<code>.*?)^```", _PAGE, re.M | re.S
)
_RUN = {title: code for title, text, code in _SECTIONS if "test: not run" not in text}
_ABORTS = {title: code for title, text, code in _SECTIONS if "test: not run" in text}


def names_of(code):
    """Runs a program; returns its names."""
    names = {}
    # It sets XLA_FLAGS, which this process has read already, and its children must not inherit.
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.dict(os.environ):
        exec(code, names)
    return names


def worst(run, names):
    return np.abs(np.asarray(run(*names["args"])) - np.asarray(names["wanted"])).max()


@pytest.mark.parametrize("title", _RUN)
def test_the_fault_is_there_and_the_trainer_does_not_have_it(title):
    names = names_of(_RUN[title])
    step, mesh = names["step"], names["mesh"]
    assert worst(jax.jit(step), names) > 1e-3, f"jaxlib {jax.lib.__version__} has mended it: take it off the page"
    replicated = NamedSharding(mesh, PartitionSpec())
    assert worst(jax.jit(evenly(step, mesh), out_shardings=replicated), names) < 1e-4


@pytest.mark.parametrize("title", _RUN)
def test_a_program_fits_into_a_report(title):
    assert len(_RUN[title].splitlines()) <= 20


@pytest.mark.full
@pytest.mark.parametrize("title", _ABORTS)
def test_the_process_ends_and_the_trainers_does_not(title):
    done = subprocess.run([sys.executable, "-c", _ABORTS[title]], capture_output=True, text=True, check=False)
    assert done.returncode < 0, f"jaxlib {jax.lib.__version__} has mended it: take it off the page"


def test_an_uneven_sort_runs():
    """In the process that runs it: the program of the page would end it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("a", "b"))
    x = np.array([[3.0, 1.0], [2.0, 5.0], [1.0, 4.0]], np.float32)

    def step(x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(("a", "b"))))
        return lax.with_sharding_constraint(jax.numpy.sort(x, 0), NamedSharding(mesh, PartitionSpec("b", "a")))

    found = jax.jit(evenly(step, mesh), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    np.testing.assert_array_equal(np.asarray(found), np.sort(x, 0))


def test_a_constraint_of_the_step_is_written_in_an_order_that_is_computed_rightly():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "mdl"))
    given = PartitionSpec(("replica", "data"), None)
    right = computable(given, dict(mesh.shape))
    assert right != given

    def step(x):
        return lax.with_sharding_constraint(x + 1, NamedSharding(mesh, given))

    written = str(jax.make_jaxpr(evenly(step, mesh))(np.zeros((8, 4), np.float32)))
    assert str(right[0]) in written
    assert str(given[0]) not in written

"""The notebooks in docs/notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest
from ipykernel import kernelspec

_NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
_KERNEL = "spmd-trainer-tests"
_SECONDS_PER_CELL = 240


@pytest.fixture
def kernel_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a kernel of this interpreter, which need not be installed anywhere."""
    kernelspec.write_kernel_spec(tmp_path / "jupyter" / "kernels" / _KERNEL)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    # The notebooks choose their number of devices themselves.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    return _KERNEL


def _notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in _NOTEBOOKS] == ["look_at_shardings", "train_in_a_notebook"]


@pytest.mark.docs
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, kernel_name: str) -> None:
    notebook = _notebook(path)
    work = tmp_path / "work"
    work.mkdir()
    client = nbclient.NotebookClient(
        notebook,
        kernel_name=kernel_name,
        timeout=_SECONDS_PER_CELL,
        resources={"metadata": {"path": str(work)}},
    )
    client.execute()
    assert not list(work.iterdir()), "a notebook leaves files where it is opened"
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    # Every notebook ends with, or contains, the report of an experiment.
    assert any("text/html" in output.get("data", {}) for output in shown)


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = _notebook(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None

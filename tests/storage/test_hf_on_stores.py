"""Hugging Face folders in object stores are read onto a mesh, and written."""

from __future__ import annotations

import pathlib
import re
import sys

import jax
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "interop"))

from hf_models import DATA, make_job, mesh_of, read

from spmd_trainer import hf

NAME = "gpt2"


@pytest.mark.parametrize("remote", ["gs", pytest.param("s3", marks=pytest.mark.full)], indirect=True)
def test_a_folder_goes_to_a_store_and_comes_back(remote):
    job = make_job(DATA / NAME, mesh_of(1, 2, 2))
    state = read(DATA / NAME, job)
    assert not hf.is_folder(remote)
    hf.export(state, job, remote / "out", imported_from=DATA / NAME, max_file_bytes=20_000)
    files = sorted((remote / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    copied = hf.load(remote / "out", job)
    for one, other in zip(jax.tree.leaves(state.mdl_vars), jax.tree.leaves(copied.mdl_vars), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    files[1].unlink()
    with pytest.raises(hf.HfDamagedError, match=rf"lacks {re.escape(files[1].name)}"):
        hf.open_folder(remote / "out")

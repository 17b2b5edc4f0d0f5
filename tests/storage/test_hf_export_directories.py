"""The directory of an export in an object store is checked before anything is written, and gets all files of the tokenizer."""

from __future__ import annotations

import pathlib
import re
import shutil
import sys

import pytest
from etils import epath
from facts import raises_naming

sys.path.append(str(pathlib.Path(__file__).parents[1] / "interop"))

from hf_models import DATA, make_job, mesh_of, read

from spmd_trainer import hf
from spmd_trainer.errors import UserError

NAME = "llama_tokenizer"


def test_a_bucket_that_does_not_exist(address_of, use):
    use("s3", address_of("s3"))
    with raises_naming(UserError, "--export_dir=s3://nobucket/out", "no bucket 'nobucket'"):
        hf.check_directory("--export_dir", epath.Path("s3://nobucket/out"))


def test_the_check_leaves_nothing_and_sees_what_is_there(remote):
    hf.check_directory("--export_dir", remote / "out")
    assert not (remote / "out").exists()
    (remote / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match=re.escape(f"--export_dir={remote / 'out'} is not empty")):
        hf.check_directory("--export_dir", remote / "out")


@pytest.mark.full
def test_further_chat_templates_come_along(remote, tmp_path):
    folder = shutil.copytree(DATA / NAME, tmp_path / "folder")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    job = make_job(folder, mesh_of(1, 1, 2))
    hf.export(read(folder, job), job, remote / "out", imported_from=folder)
    assert (remote / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"
    assert (remote / "out" / "tokenizer.json").exists()

"""The documentation's commands for fine-tuning, as pasted, in a folder of the user's."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # runs by `make interop`
ROOT = pathlib.Path(__file__).parents[2]
TORCH_SIDE = pathlib.Path(__file__).parent / "torch_side.py"


def commands(containing: str) -> str:
    """The block of shell commands of docs/hugging_face.md that contains a text, for the environment of the tests."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/hugging_face.md").read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if containing in block]
    found = re.sub(r"^python -m", f"{sys.executable} -m", found, flags=re.MULTILINE)
    return re.sub(r"^spmd-trainer", f"{sys.executable} -m spmd_trainer.main", found, flags=re.MULTILINE)


def answer(folder: pathlib.Path) -> str:
    """The only answer that a decode wrote."""
    (file,) = folder.glob("decode_out/prompts/*.jsonl")
    (line,) = file.read_text().splitlines()
    return json.loads(line)["output"]


def test_a_chat_answer_changes(tmp_path, torch_side):
    setup = commands("lm.tiny_llama").splitlines()[:2]
    script = "\n".join(["set -e", *setup, commands("lm.finetune.ChatFromFolder")])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert answer(tmp_path / "runs/before") != answer(tmp_path / "runs/chat") == "A tiny llama."
    ids, logits = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(ids, np.arange(12, dtype=np.int64).reshape(1, 12))
    torch_side(TORCH_SIDE, "logits", tmp_path / "models/llama_chat", ids, logits)
    assert np.isfinite(np.load(logits)).all()

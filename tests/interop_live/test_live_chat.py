"""Conversations, live against transformers: tokens and assistant masks of published templates."""

from __future__ import annotations

import pathlib
import shutil
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
sys.path.append(str(TESTS / "inputs"))
import chat_goldens  # noqa: E402

pytestmark = pytest.mark.slow  # runs by `make interop`
FAMILIES = [name for name in chat_goldens.TEMPLATES if "content_marked" not in name]


@pytest.fixture(scope="module")
def made(torch_side, tmp_path_factory):
    """What the installed transformers writes, with the tokenizers of the goldens."""
    directory = tmp_path_factory.mktemp("chat") / "data"
    shutil.copytree(chat_goldens.DATA, directory)
    (directory / "expected.json").unlink()
    torch_side(TESTS.parent / "tools" / "make_chat_goldens.py", directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_masks(name, made, tmp_path):
    wanted = chat_goldens.expected(made)[name]
    compared = 0
    for conversation, expected in zip(chat_goldens.conversations(made), wanted, strict=True):
        if expected is not None:
            tokens, mask = chat_goldens.encoded(name, conversation, tmp_path, made)
            assert tokens == expected["ids"]
            assert mask == expected["mask"]
            compared += 1
    assert compared >= 8


def test_the_goldens_are_what_the_installed_transformers_writes(made):
    assert chat_goldens.expected(made) == chat_goldens.expected()

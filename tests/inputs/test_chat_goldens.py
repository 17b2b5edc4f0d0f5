"""Tokens and assistant masks are those of transformers, for the published templates."""

from __future__ import annotations

import pytest
from chat_goldens import DATA, TEMPLATES, conversations, encoded, expected
from facts import raises_naming
from tokenizers import Tokenizer

from spmd_trainer.errors import UserError

CONTENT_MARKED = "chatml_content_marked"
FAMILIES = [name for name in TEMPLATES if name != CONTENT_MARKED]
CONVERSATIONS, EXPECTED = conversations(), expected()
CASES = [
    (name, number)
    for name in FAMILIES
    for number, given in enumerate(CONVERSATIONS)
    if name in given.get("templates", [name])
]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_tokens_and_masks_are_those_of_transformers(name, number, tmp_path):
    wanted = EXPECTED[name][number]
    if wanted is None:
        with raises_naming(UserError, "one.jsonl:1:", "can't render"):
            encoded(name, CONVERSATIONS[number], tmp_path)
        return
    tokens, mask = encoded(name, CONVERSATIONS[number], tmp_path)
    assert tokens == wanted["ids"]
    assert mask == wanted["mask"]


def test_each_template_has_enough_conversations():
    assert len(FAMILIES) == 6
    for name in FAMILIES:
        masks = [found["mask"] for found in EXPECTED[name] if found is not None]
        assert len(masks) >= 8
        assert all(0 < sum(mask) < len(mask) for mask in masks)


@pytest.mark.parametrize("family", ["llama_3", "gemma"])
def test_marks_that_hold_what_follows_the_generation_prompt_change_nothing(family):
    assert EXPECTED[family] == EXPECTED[f"{family}_marked"]


def test_without_marks_the_newline_after_the_end_of_turn_counts_too():
    for plain, marked in zip(EXPECTED["chatml"], EXPECTED["chatml_marked"], strict=True):
        if plain is None:
            assert marked is None
            continue
        more = [at for at, (a, b) in enumerate(zip(plain["mask"], marked["mask"], strict=True)) if a != b]
        assert more
        assert all(plain["mask"][at] and plain["mask"][at - 1] for at in more)


def exact_tokenizer():
    """The tokenizer with the offsets of all characters."""
    found = Tokenizer.from_file(str(DATA / "byte_level" / "tokenizer.json"))
    found.post_processor = None
    return found


@pytest.mark.parametrize("number", [0, 1, 2, 4, 5, 6, 7, 8, 9, 11])
def test_all_tokens_of_the_last_character_count(number, tmp_path):
    wanted = EXPECTED[CONTENT_MARKED][number]
    tokens, mask = encoded(CONTENT_MARKED, CONVERSATIONS[number], tmp_path)
    assert tokens == wanted["ids"]
    # transformers counts the first of several tokens for the last character of a marked text.
    text = exact_tokenizer().decode(tokens, skip_special_tokens=False)
    offsets = exact_tokenizer().encode(text, add_special_tokens=False).offsets
    theirs = list(wanted["mask"])
    for at in range(1, len(theirs)):
        theirs[at] = theirs[at] or int(theirs[at - 1] and offsets[at][0] < offsets[at - 1][1])
    assert mask == theirs
    assert (mask != wanted["mask"]) == (number in (1, 2, 4, 6, 8, 11)), "conversations with such a character at the end"


@pytest.mark.parametrize(
    ("number", "text"), [(3, "bd e  f\n\n  gspaces  after  "), (len(CONVERSATIONS) - 1, "  spaces around  y")]
)
def test_spaces_at_the_ends_of_a_marked_text_count_and_nothing_after_them(number, text, tmp_path):
    tokens, mask = encoded(CONTENT_MARKED, CONVERSATIONS[number], tmp_path)
    wanted = EXPECTED[CONTENT_MARKED][number]
    assert tokens == wanted["ids"]
    # The tokenizer's offsets leave spaces out. transformers marks nothing more after one at the beginning of a marked text, and
    # everything after one at its end.
    assert mask != wanted["mask"]
    assert exact_tokenizer().decode([token for token, own in zip(tokens, mask, strict=True) if own]) == text

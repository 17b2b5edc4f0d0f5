"""A stop string that another one contains is found while the longer one is still possible."""

import jax.numpy as jnp
import pytest

from spmd_trainer.decoder.generation.stop_strings import START, stop_table

LETTERS = [bytes([letter]) for letter in b"abcdx"]


@pytest.mark.parametrize(
    ("stops", "text", "found_after"),
    [
        (["abcd", "bc"], "abcd", 3),
        (["abcd", "c"], "abcd", 3),
        (["abcd", "bcx"], "abcx", 4),
        (["abcd", "abx"], "abcabx", 6),
        (["abcd"], "abcabc", None),
    ],
)
def test_the_first_of_them_ends_the_text(stops, text, found_after):
    table = stop_table(stops, LETTERS, len(LETTERS))
    state, found = jnp.array([START]), []
    for number, letter in enumerate(text, start=1):
        state = table.advance(state, jnp.array([LETTERS.index(letter.encode())]))
        found += [number] if int(state[0]) == table.found else []
    assert found[:1] == ([] if found_after is None else [found_after])

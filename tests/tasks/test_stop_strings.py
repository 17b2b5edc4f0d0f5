"""Stop strings: the table over tokens equals a search in the text, and the text is cut before the first of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_trainer.decoder.generation import stop_strings
from spmd_trainer.inputs.token_bytes import token_bytes
from spmd_trainer.inputs.tokenizers import ByteTokenizer

# Two letters and a character of two bytes, of which tokens may hold one, so that matches and near misses are common.
BYTES = [b"a", b"b", b"\xc3", b"\xa9"]
TEXTS = st.lists(st.sampled_from(BYTES), max_size=4).map(b"".join)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(texts, tokens, stops):
    """Number of tokens after which a stop string is in the text, or None."""
    for count in range(1, len(tokens) + 1):
        text = b"".join(texts[token] for token in tokens[:count])
        if any(stop.encode() in text for stop in stops):
            return count
    return None


def run(table, tokens):
    """Number of tokens after which the table says 'found', or None."""
    state = stop_strings.START
    for count, token in enumerate(tokens, 1):
        state = table.next_state[state, table.column[token]]
        if state == table.found:
            return count
    return None


@settings(max_examples=300, deadline=None)
@given(st.data(), STOPS, st.lists(TEXTS, min_size=1, max_size=8))
def test_the_table_finds_what_a_search_finds(data, stops, texts):
    tokens = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=20))
    table = stop_strings.stop_table(stops, texts, len(texts))
    assert run(table, tokens) == first_match(texts, tokens, stops)


def test_a_found_state_is_never_left_and_rows_move_on_their_own():
    texts = [b"a", b"b", b"ab", b""]
    table = stop_strings.stop_table(["abb"], texts, 6)  # two ids without a text
    advance = jax.jit(table.advance)
    states = jnp.zeros(4, jnp.int32)
    for tokens in ([0, 2, 1, 2], [1, 3, 2, 5], [1, 1, 4, 0], [0, 0, 1, 1]):
        states = advance(states, jnp.array(tokens))
    assert (np.asarray(states) == table.found).tolist() == [True, True, True, False]


def test_tokens_without_a_byte_of_the_stop_strings_share_a_column():
    texts = [bytes([i, j]) for i in range(256) for j in range(256)]
    table = stop_strings.stop_table(["\n\nUser:"], texts, len(texts))
    assert table.column.shape == (65536,)
    assert table.next_state.shape[0] == len("\n\nUser:") + 1
    assert table.next_state.shape[1] < 20


def cut(ids, stops, tokenizer=None):
    tokenizer = tokenizer or ByteTokenizer()
    texts = token_bytes(tokenizer)
    return stop_strings.cut(tokenizer, np.array(ids, np.int32), stops=stops, texts=texts)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello", ["xyz"], "hello"),
        ("hello\n\nUser: hi", ["\n\n", "User"], "hello"),
        ("hello", ["lo", "ell"], "h"),
        ("hello", ["hello"], ""),
        ("né!", ["!"], "né"),
        ("", ["a"], ""),
    ],
)
def test_the_text_is_cut_before_the_first_stop_string(text, stops, expected):
    assert cut([*text.encode(), 256], stops) == expected


class Words:
    """Tokens of several characters. Like SentencePiece's, its decode drops a space at the beginning, and a special token."""

    texts = (b" Hello", b" wor", b"ld. Us", b"er", b"<end>", b"\xc3", b"\xa9. x")
    special = 4

    def decode(self, ids, lengths):
        kept = [
            b"".join(self.texts[i] for i in row[:n] if i != self.special) for row, n in zip(ids, lengths, strict=True)
        ]
        return [text.decode(errors="replace").removeprefix(" ") for text in kept]


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([0, 1, 2, 3], "User", "Hello world. "),
        ([0, 1, 2, 3], "xyz", "Hello world. User"),
        ([0, 1], " Hello", ""),
        ([0, 1], "Hello", ""),
        ([0, 1, 4], "<end>", "Hello wor"),
        ([0, 1, 4], "end", "Hello wor<"),
        ([0, 5, 6], ". x", "Hello\xe9"),
        ([0, 1, 2, 5], "d. Us", "Hello worl"),
    ],
)
def test_a_stop_string_may_begin_inside_a_token(ids, stop, expected):
    assert stop_strings.cut(Words(), np.array(ids), stops=[stop], texts=Words.texts) == expected

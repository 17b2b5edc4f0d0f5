"""Stop strings: a table finds them inside the jitted loop; the text is cut before them afterwards.

The stop strings form an Aho-Corasick automaton over bytes (Aho and Corasick, 1975). A token advances it by all of its bytes
at once. Tokens with the same transitions from all states share a column of the table; most tokens do, because they have no
byte in common with the stop strings. The memory is S x C + V int32 values for S states (at most the total bytes of the stop
strings + 1), C distinct columns and V tokens: 0.6 MB for a vocabulary of 151,936 and a few words.

The automaton reads bytes instead of characters, because a character may be split over several tokens.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer.inputs.tokenizers import Tokenizer

# Number of tokens that are processed at once; limits the memory needed to build a table.
_CHUNK = 8192
START = 0  # the state before any byte


class StopTable(NamedTuple):
    """An automaton over tokens. Its last state, 'found', is never left.

    Attributes:
      next_state: int32 [states, columns], the next state for each state and each column, i.e. each kind of token.
      column: int32 [vocabulary], each token's column.
    """

    next_state: np.ndarray
    column: np.ndarray

    @property
    def found(self) -> int:
        """Index of the state 'found', which is reached at the end of a stop string."""
        return len(self.next_state) - 1

    def advance(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the rows' next states, int32 [rows], after one more token in each row. `states`, `tokens`: int32 [rows]."""
        return jnp.asarray(self.next_state)[states, jnp.asarray(self.column)[tokens]]


def stop_table(stops: Iterable[str], texts: Sequence[bytes], vocab_size: int) -> StopTable:
    """Builds the automaton that finds stop strings.

    Args:
      stops: the stop strings, none empty.
      texts: the bytes of each token, e.g. `token_bytes(tokenizer)`.
      vocab_size: the model's vocabulary size. Tokens beyond the end of `texts` are treated as having no bytes.
    """
    by_byte = _byte_automaton([stop.encode() for stop in stops])
    known = [*texts[:vocab_size], *[b""] * (vocab_size - len(texts))]
    columns: dict[bytes, int] = {}
    column = np.empty(vocab_size, np.int32)
    for start in range(0, vocab_size, _CHUNK):
        moves = _moves(by_byte, known[start : start + _CHUNK])
        column[start : start + _CHUNK] = [columns.setdefault(move.tobytes(), len(columns)) for move in moves]
    distinct = np.frombuffer(b"".join(columns), np.int32).reshape(len(columns), -1)
    return StopTable(np.ascontiguousarray(distinct.T), column)


def cut(tokenizer: Tokenizer, ids: np.ndarray, *, stops: Sequence[str], texts: Sequence[bytes]) -> str:
    """Returns the text of generated tokens, cut before the first stop string.

    Args:
      tokenizer: the tokenizer.
      ids: the generated tokens, integers [n].
      stops: the stop strings.
      texts: `token_bytes(tokenizer)`.
    """
    parts = [texts[token] if 0 <= token < len(texts) else b"" for token in ids.tolist()]
    whole = b"".join(parts)
    starts = [at for at in (whole.find(stop.encode()) for stop in stops) if at >= 0]
    if not starts:
        return _decode(tokenizer, ids)
    ends = np.cumsum([len(part) for part in parts])
    complete = int(np.searchsorted(ends, min(starts), side="right"))  # tokens before the stop string
    before = _decode(tokenizer, ids[:complete])
    kept = min(starts) - (int(ends[complete - 1]) if complete else 0)
    if not kept:
        return before
    # The stop string begins inside a token.
    longer, dropped = _decode(tokenizer, ids[: complete + 1]).encode(), parts[complete][kept:]
    if longer.endswith(dropped):
        return longer[: len(longer) - len(dropped)].decode()
    return before + parts[complete][:kept].decode(errors="replace")


def _decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids[None], [len(ids)])[0]


def _byte_automaton(stops: Sequence[bytes]) -> np.ndarray:
    """Returns the next state for each state and byte, int32 [states, 256]. State 0 is the start; the last one is 'found'."""
    children: list[dict[int, int]] = [{}]
    ends = set()
    for stop in stops:
        node = START
        for byte in stop:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        ends.add(node)
    table = np.zeros((len(children), 256), np.int32)
    accepts = np.zeros(len(children), bool)
    accepts[list(ends)] = True
    fallback = np.zeros(len(children), np.int32)
    waiting = collections.deque([START])
    while waiting:  # breadth first: a node's fallback is shorter, so its row is complete
        node = waiting.popleft()
        accepts[node] |= accepts[fallback[node]]
        table[node] = table[fallback[node]]
        for byte, child in children[node].items():
            fallback[child] = table[node, byte]
            table[node, byte] = child
            waiting.append(child)
    # All accepting nodes become one last state.
    kept = np.flatnonzero(~accepts)
    number = np.full(len(children), len(kept), np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    return np.concatenate([number[table[kept]], np.full((1, 256), len(kept), np.int32)])


def _moves(by_byte: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Returns the next state for each token and each state, int32 [tokens, states]. `texts`: the bytes of each token."""
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(-lengths, kind="stable")  # so that the tokens with an i-th byte are a prefix
    padded = np.zeros((len(texts), max(1, lengths.max(initial=0))), np.uint8)
    for row, index in enumerate(order):
        padded[row, : lengths[index]] = np.frombuffer(texts[index], np.uint8)
    states = np.tile(np.arange(len(by_byte), dtype=np.int32), (len(texts), 1))
    for position in range(padded.shape[1]):
        count = int(np.count_nonzero(lengths > position))
        states[:count] = by_byte[states[:count], padded[:count, position, None]]
    found = np.empty_like(states)
    found[order] = states
    return found

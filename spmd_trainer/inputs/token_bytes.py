"""Finds the bytes that each token of a tokenizer stands for.

The text of a token sequence is the concatenation of the tokens' bytes. A tokenizer's own `decode` differs: it leaves special
tokens out, and for some tokenizers it drops a space at the beginning of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer

_BYTE_LEVEL, _BYTE_FALLBACK, _FUSE = "ByteLevel", "ByteFallback", "Fuse"
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """Returns the bytes that each token stands for, from token 0 to token vocab_size - 1.

    A special token of a Hugging Face tokenizer stands for its text, e.g. b'<s>'. Unused ids, end-of-text of a
    `ByteTokenizer` and control pieces of a SentencePiece model stand for b''.

    Raises:
      UserError: a token's text depends on the neighboring tokens, or the kind of tokenizer is unsupported.
    """
    if isinstance(tokenizer, tokenizers.ByteTokenizer):
        known = range(tokenizers.BYTE_VALUES)
        return [bytes([i]) if i in known and i != tokenizer.eos_id else b"" for i in range(tokenizer.vocab_size)]
    if isinstance(tokenizer, tokenizers.SentencePieceTokenizer):
        return tokenizer.piece_bytes()
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _huggingface(tokenizer)
    raise UserError(
        f"the bytes of the tokens of a {type(tokenizer).__name__} are not known; use a ByteTokenizer, a "
        "SentencePieceTokenizer or a HuggingFaceTokenizer"
    )


def _huggingface(tokenizer: HuggingFaceTokenizer) -> list[bytes]:
    steps = _steps(tokenizer.description.get("decoder"))
    alphabet = _byte_of_symbol()
    found = [b""] * tokenizer.vocab_size
    for spelling, index in tokenizer.vocabulary.items():
        found[index] = _bytes_of(spelling, steps, alphabet, tokenizer.name)
    return found


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return [{"type": None}]
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _bytes_of(spelling: str, steps: Sequence[Mapping[str, Any]], alphabet: Mapping[str, int], name: str) -> bytes:
    """Returns the bytes that a token stands for. `spelling` is the token as written in the vocabulary.

    `steps`: the decoder's steps in the tokenizer.json. `alphabet`: {symbol: byte} of byte-level tokenizers. `name`: name of
    the tokenizer, for error messages.
    """
    fused = False
    for step in steps:
        kind = step["type"]
        pattern = step.get("pattern", {})
        if kind is None:
            spelling = f" {spelling}"  # without a decoder, Hugging Face's library joins tokens with spaces
        elif kind == _BYTE_LEVEL and not fused:
            # As in Hugging Face's library, a token with a symbol outside the alphabet is text.
            if all(symbol in alphabet for symbol in spelling):
                return bytes(alphabet[symbol] for symbol in spelling)
        elif kind == _BYTE_FALLBACK and not fused:
            if byte := _FALLBACK.fullmatch(spelling):
                return bytes.fromhex(byte[1])
        elif kind == "Metaspace" and not fused:
            spelling = spelling.replace(step.get("replacement", tokenizers.SPACE_MARK), " ")
        elif kind == "Replace" and "String" in pattern and not fused:
            spelling = spelling.replace(pattern["String"], step["content"])
        elif kind == _FUSE:
            fused = True
        elif not (kind == "Strip" and fused):  # a Strip of the whole text affects only its beginning or end
            raise UserError(
                f"{name} has the decoder {kind!r}, with which a token's text depends on its neighbours, so that stop strings "
                "can't be found in it; use eos_ids, or a tokenizer with a ByteLevel, Metaspace or ByteFallback decoder"
            )
    return spelling.encode()


def _byte_of_symbol() -> dict[str, int]:
    """Returns {symbol: byte} for GPT-2's byte-level alphabet.

    Printable Latin-1 characters stand for the byte with their own code. The characters from U+0100 on stand for the other
    68 bytes, in ascending order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""From the bytes of a text file to tokens and back: by byte, or with a SentencePiece model.

Hugging Face's tokenizers are in `huggingface_tokenizer`; `tokenizer_field` makes a tokenizer of what a field holds.
`tools/train_sentencepiece.py` trains a model from text files.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files

BYTE_VALUES = 256
# SentencePiece counts bytes in an int32.
_MAX_SENTENCEPIECE_BYTES = 2**30


class Tokenizer(Protocol):
    """What a text input needs of a tokenizer. All of it is a pure function of the tokenizer's settings."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0..vocab_size-1."""

    @property
    def eos_id(self) -> int:
        """End-of-text: stands before the first token of a text and after its last."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the longest token. 1 says that each token is one byte."""

    def encode(self, text: bytes, path: str, *, cut: bool = False) -> np.ndarray:
        """Tokens of a text, integers [n], without end-of-text.

        Args:
          text: a file's content, or its beginning.
          path: the file, for errors.
          cut: the text may end in the middle of a character, whose bytes are then left out.

        Raises:
          UserError: this tokenizer can't read the text; names the file and the byte.
        """

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Texts of ids [B, T], of each row's first lengths[b]; end-of-text carries none."""

    def fingerprint(self) -> dict[str, Any]:
        """What the tokens depend on, as JSON values."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte, 0 to 255, or `eos_id`. Any bytes will do; they need not be UTF-8.

    Attributes:
      eos_id: end-of-text; 256 makes a vocabulary of 257.
    """

    eos_id: int = BYTE_VALUES

    def __post_init__(self) -> None:
        if not 0 <= self.eos_id <= np.iinfo(np.uint16).max:
            raise UserError(f"eos_id={self.eos_id}; set it to a token from 0 to 65535, e.g. {BYTE_VALUES}")

    @property
    def vocab_size(self) -> int:
        """Tokens that may occur: the bytes and `eos_id`."""
        return max(BYTE_VALUES, self.eos_id + 1)

    @property
    def bytes_per_token(self) -> int:
        """1."""
        return 1

    def encode(self, text: bytes, path: str = "", *, cut: bool = False) -> np.ndarray:
        """The bytes, uint8 [n]."""
        del path, cut
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Texts; see `decode_bytes`."""
        return decode_bytes(ids, lengths, self.eos_id)

    def fingerprint(self) -> dict[str, Any]:
        """The end-of-text token."""
        return {"eos_id": self.eos_id}


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer:
    """Tokens of a SentencePiece model (Kudo and Richardson, 2018). Texts are UTF-8.

    A model of `tools/train_sentencepiece.py` gives every text back byte for byte (but for U+2581, SentencePiece's own
    mark of a space, which becomes one); others may normalize it.

    Attributes:
      model: path of the trained `.model` file. It is read when the tokenizer is made.
    """

    model: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if self.eos_id < 0:
            raise UserError(
                f"the SentencePiece model {os.fspath(self.model)} has no end-of-text token; train it with one "
                "(eos_id=1), as tools/train_sentencepiece.py does"
            )

    @functools.cached_property
    def _content(self) -> bytes:
        path = os.fspath(self.model)
        if not path:
            raise UserError("SentencePieceTokenizer has no `model`; set it to the .model file that was trained")
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise UserError(
                f"the SentencePiece model {path} can't be read: {error.strerror}{files.beside(path)}. Train one with "
                "`python tools/train_sentencepiece.py --output=NAME.model FILES`"
            ) from error

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        try:
            return sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except RuntimeError as error:
            raise UserError(f"{os.fspath(self.model)} is no SentencePiece model: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Pieces of the model."""
        return self._processor.get_piece_size()

    @property
    def eos_id(self) -> int:
        """The model's end-of-text piece."""
        return self._processor.eos_id()

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """Bytes of the model's longest piece."""
        return max(len(self._processor.id_to_piece(i).encode()) for i in range(self.vocab_size))

    def encode(self, text: bytes, path: str, *, cut: bool = False) -> np.ndarray:
        """Tokens, int32 [n].

        Raises:
          UserError: the text isn't UTF-8; names the file, the byte and its line.
        """
        decoded = decode_utf8(text, path, cut=cut)
        if len(text) > _MAX_SENTENCEPIECE_BYTES:
            raise UserError(f"{path} has {len(text)} bytes, more than SentencePiece takes at once; split it into parts")
        return np.asarray(self._processor.encode(decoded, out_type=int), np.int32)

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Texts. Ids that the model hasn't got, and its control pieces, carry none."""
        texts = []
        for row, length in zip(ids, lengths, strict=True):
            kept = np.asarray(row)[: int(length)]
            kept = kept[(kept >= 0) & (kept < self.vocab_size) & (kept != self.eos_id)]
            texts.append(self._processor.decode(kept.tolist()))
        return texts

    def fingerprint(self) -> dict[str, Any]:
        """A checksum of the model; where the file lies doesn't matter."""
        return {"sentencepiece_model": zlib.crc32(self._content)}


def decode_utf8(text: bytes, path: str, *, cut: bool = False) -> str:
    """Decodes a file's content.

    Args:
      text: the content, or its beginning.
      path: the file, for errors.
      cut: leave out a character that the end of `text` cuts in two.

    Raises:
      UserError: the text isn't UTF-8; names the file, the byte and its line.
    """
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut and error.reason == "unexpected end of data":
            return text[: error.start].decode("utf-8")
        line = text.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} is not UTF-8: byte {error.start} (line {line}) is 0x{text[error.start]:02x}, {error.reason}. "
            f"Convert it, e.g. with `iconv -f latin1 -t utf-8`, leave it out of `files`, or read it by byte"
        ) from error


def decode_bytes(ids: Any, lengths: Any, eos_id: int = BYTE_VALUES) -> list[str]:
    """Text of byte tokens. Tokens that are no byte, end-of-text among them, carry none; invalid UTF-8 becomes U+FFFD.

    Args:
      ids: integers [B, T].
      lengths: integers [B]: how many of each row's tokens count.
      eos_id: left out even where it is below 256.

    Returns:
      B strings.
    """
    rows = [np.asarray(row)[: int(length)] for row, length in zip(ids, lengths, strict=True)]
    kept = [row[(row >= 0) & (row < BYTE_VALUES) & (row != eos_id)] for row in rows]
    return [row.astype(np.uint8).tobytes().decode("utf-8", errors="replace") for row in kept]


def token_dtype(vocab_size: int) -> Any:
    """The smallest unsigned dtype that holds every token: tables of tokens are kept in it."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32


def encode_documents(content: bytes, path: str, tokenizer: Tokenizer, separator: bytes | None) -> Iterator[np.ndarray]:
    """Tokens of the documents in a file, without end-of-text; documents without any token are left out.

    Args:
      content: the file's.
      path: the file, for errors.
      tokenizer: makes the tokens.
      separator: what stands between documents; None: the file is one document.

    Raises:
      UserError: the tokenizer can't read a document; the byte that is named counts from the beginning of the file.
    """
    for document in [content] if separator is None else content.split(separator):
        try:
            tokens = tokenizer.encode(document, path)
        except UserError:
            tokenizer.encode(content, path)  # the same fault, counted from the file's beginning
            raise
        if len(tokens):
            yield tokens

"""Tokenizers for text files: one that makes each byte a token, and one that uses a SentencePiece model.

The module `huggingface_tokenizer` has Hugging Face tokenizers; `tokenizer_field` makes a tokenizer from an input's settings;
`tokenizer_training` trains tokenizers (`--mode=tokenizer`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files
from spmd_trainer.storage import reading
from spmd_trainer.storage.paths import file_or_pattern

BYTE_VALUES = 256
# The character that stands for a space in the tokens of SentencePiece models.
SPACE_MARK = "\u2581"
# SentencePiece counts bytes in an int32.
_MAX_SENTENCEPIECE_BYTES = 2**30


class Tokenizer(Protocol):
    """The interface of a tokenizer for text inputs. The same settings and arguments always give the same results."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; their ids are 0 to vocab_size - 1."""

    @property
    def eos_id(self) -> int:
        """Id of end-of-text, the token that follows the last token of a text, and by default precedes its first token."""

    @property
    def bytes_per_token(self) -> int:
        """Byte length of the longest token."""

    def encode(self, text: bytes, path: str, *, cut: bool = False) -> np.ndarray:
        """Returns the tokens of a text, integers [n], without end-of-text.

        Args:
          text: a file's content, or its beginning.
          path: path of the file, for error messages.
          cut: True ignores an incomplete character at the end of the text.

        Raises:
          UserError: this tokenizer can't encode the text. The message names the file and the byte.
        """

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Decodes the first lengths[b] ids of each row b of `ids` [B, T]. Drops end-of-text."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns settings and checksums of everything on which a text's tokens depend, as JSON values."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer that makes each byte a token, 0 to 255. Texts may be any bytes, not only UTF-8.

    Attributes:
      eos_id: id of end-of-text; 256 gives a vocabulary of 257 tokens.
    """

    eos_id: int = BYTE_VALUES

    def __post_init__(self) -> None:
        if not 0 <= self.eos_id <= np.iinfo(np.uint16).max:
            raise UserError(f"eos_id={self.eos_id}; set it to a token from 0 to 65535, e.g. {BYTE_VALUES}")

    @property
    def vocab_size(self) -> int:
        return max(BYTE_VALUES, self.eos_id + 1)

    @property
    def bytes_per_token(self) -> int:
        return 1

    def encode(self, text: bytes, path: str = "", *, cut: bool = False) -> np.ndarray:
        """Returns the bytes of a text as tokens, uint8 [n]. Ignores `path` and `cut`."""
        del path, cut
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Decodes the first lengths[b] ids of each row b of `ids` [B, T]. Drops end-of-text; invalid UTF-8 becomes U+FFFD."""
        return decode_bytes(ids, lengths, self.eos_id)

    def fingerprint(self) -> dict[str, Any]:
        return {"eos_id": self.eos_id}


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer:
    """Wraps a SentencePiece model (Kudo and Richardson, 2018). Texts are UTF-8.

    With a model that `--mode=tokenizer` has trained, decoding restores the encoded text byte for byte, except that U+2581,
    SentencePiece's mark for a space, becomes a space. Other models may normalize the text.

    Attributes:
      model: path of the trained `.model` file, which is read at construction.
    """

    model: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if self.eos_id < 0:
            raise UserError(
                f"the SentencePiece model {os.fspath(self.model)} has no end-of-text token; train it with one "
                "(eos_id=1), as --mode=tokenizer does"
            )

    @functools.cached_property
    def _content(self) -> bytes:
        path = os.fspath(self.model)
        if not path:
            raise UserError("SentencePieceTokenizer has no `model`; set it to the .model file that was trained")
        try:
            return reading.read(file_or_pattern("model", path))
        except OSError as error:
            raise UserError(
                f"the SentencePiece model {path} can't be read: {reading.problem(path, error)}{files.nearby_names(path)}. Train "
                "one with `spmd-trainer --mode=tokenizer --output=NAME.model FILES`"
            ) from error

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        try:
            return sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except RuntimeError as error:
            raise UserError(f"{os.fspath(self.model)} is not a SentencePiece model: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of pieces (tokens) of the model."""
        return self._processor.get_piece_size()

    @property
    def eos_id(self) -> int:
        """Id of the model's end-of-text piece."""
        return self._processor.eos_id()

    @property
    def bos_id(self) -> int | None:
        """Id of the model's beginning-of-text piece, or None if the model has none."""
        found = self._processor.bos_id()
        return found if found >= 0 else None

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """Byte length of the model's longest piece."""
        return max(len(self._processor.id_to_piece(i).encode()) for i in range(self.vocab_size))

    def encode(self, text: bytes, path: str, *, cut: bool = False) -> np.ndarray:
        """Returns the tokens of a text, int32 [n]. If `cut` is True, ignores an incomplete last character.

        Raises:
          UserError: the text is too large or isn't UTF-8. The message names the file `path`, and the byte and line that
            aren't UTF-8.
        """
        return np.asarray(self._processor.encode(_checked(text, path, cut=cut), out_type=int), np.int32)

    def encode_batch(self, texts: Sequence[bytes], wheres: Sequence[str]) -> list[np.ndarray]:
        """Returns a list with the tokens of each text, int32 [n]. Uses all cores.

        Raises UserError as `encode` does. `wheres` has the name of each text for error messages.
        """
        decoded = [_checked(text, where) for text, where in zip(texts, wheres, strict=True)]
        return [np.asarray(ids, np.int32) for ids in self._processor.encode(decoded, out_type=int)]

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Decodes the first lengths[b] ids of each row b of `ids` [B, T]. Drops control pieces and ids out of range."""
        rows = ids_of_text(ids, lengths, self.vocab_size, self.eos_id)
        return [self._processor.decode(row.tolist()) for row in rows]

    def piece_bytes(self) -> list[bytes]:
        """Returns the bytes that each piece stands for; b'' for control, unknown and unused pieces."""
        model = self._processor
        found = []
        for index in range(self.vocab_size):
            piece = model.id_to_piece(index)
            if model.is_control(index) or model.is_unknown(index) or model.is_unused(index):
                found.append(b"")
            elif model.is_byte(index):
                found.append(bytes.fromhex(piece[3:5]))
            else:
                found.append(piece.replace(SPACE_MARK, " ").encode())
        return found

    def fingerprint(self) -> dict[str, Any]:
        """Returns a checksum of the model file's content."""
        return {"sentencepiece_model": zlib.crc32(self._content)}


def _checked(text: bytes, path: str, *, cut: bool = False) -> str:
    decoded = decode_utf8(text, path, cut=cut)
    if len(text) > _MAX_SENTENCEPIECE_BYTES:
        raise UserError(f"{path} has {len(text)} bytes, more than SentencePiece takes at once; split it into parts")
    return decoded


def decode_utf8(text: bytes, path: str, *, cut: bool = False) -> str:
    """Decodes a file's content from UTF-8.

    Args:
      text: the content, or its beginning.
      path: path of the file, for error messages.
      cut: True ignores an incomplete character at the end of `text`.

    Raises:
      UserError: the text isn't UTF-8. The message names the file, the byte and its line.
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
    """Decodes tokens that are bytes to texts. Drops tokens that are not bytes; invalid UTF-8 becomes U+FFFD.

    Args:
      ids: tokens of B rows, integers [B, T].
      lengths: number of tokens to decode in each row, integers [B].
      eos_id: id of end-of-text, which is dropped even if it is below 256.
    """
    rows = ids_of_text(ids, lengths, BYTE_VALUES, eos_id)
    return [row.astype(np.uint8).tobytes().decode("utf-8", errors="replace") for row in rows]


def ids_of_text(ids: Any, lengths: Any, limit: int, eos_id: int) -> list[np.ndarray]:
    """Returns the first lengths[b] ids of each row b of `ids` [B, T]. Drops end-of-text and ids outside 0 to `limit` - 1."""
    rows = [np.asarray(row)[: int(length)] for row, length in zip(ids, lengths, strict=True)]
    return [row[(row >= 0) & (row < limit) & (row != eos_id)] for row in rows]


def unknown_token(token: int, limit: int) -> str:
    """Returns a clause for an error message: a text has `token`, but the model's vocabulary has only `limit` tokens."""
    return (
        f"gives token {token}, and the model's vocabulary is 0 to {limit - 1}. The text spells a special token: take it out, "
        "make the model's vocabulary larger, or read special tokens like other text with "
        "tokenizer=HuggingFaceTokenizer(path, encode_special_tokens=True)"
    )


def token_dtype(vocab_size: int) -> Any:
    """Returns the dtype in which inputs store tokens: uint16 if all token ids fit in it, otherwise uint32."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32

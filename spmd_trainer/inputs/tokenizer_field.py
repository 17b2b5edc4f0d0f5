"""What the `tokenizer` field of the text inputs may hold, and the tokenizer made of it."""

from __future__ import annotations

import inspect
import os
from typing import Any

import fiddle as fdl
from praxis import pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, tokenizers
from spmd_trainer.inputs.huggingface_tokenizer import TOKENIZER_FILE, HuggingFaceTokenizer, is_huggingface

# Tokenizers that refuse what isn't UTF-8.
UTF8_TOKENIZERS = (tokenizers.SentencePieceTokenizer, HuggingFaceTokenizer)

_ALLOWED = (
    f"the path of a SentencePiece .model file, of a Hugging Face {TOKENIZER_FILE} or of a folder with one; a "
    "tokenizers.Tokenizer; a fast tokenizer of transformers; a Tokenizer of spmd_trainer.inputs.tokenizers or its config; or "
    "None to read by byte"
)
_METHODS = ("vocab_size", "eos_id", "bytes_per_token", "encode", "decode", "fingerprint")


def make_tokenizer(given: Any, eos_id: int | None = None) -> tokenizers.Tokenizer:
    """Makes a tokenizer of what an input's field holds.

    Args:
      given: a path, an object or a config; see `text_base.TokenizedFiles`. None: by byte.
      eos_id: end-of-text, for bytes and Hugging Face's tokenizers; None: 256, and the tokenizer's own.

    Raises:
      UserError: it is nothing of these, or can't be read; or it has an end-of-text of its own and `eos_id` is given.
    """
    if given is None:
        return tokenizers.ByteTokenizer(tokenizers.BYTE_VALUES if eos_id is None else eos_id)
    if isinstance(given, fdl.Buildable):
        given = pax_fiddle.build(given)
    if (isinstance(given, str | os.PathLike) and not _is_sentencepiece(os.fspath(given))) or is_huggingface(given):
        return HuggingFaceTokenizer(given, eos=eos_id)
    made = tokenizers.SentencePieceTokenizer(given) if isinstance(given, str | os.PathLike) else given
    missing = [name for name in _METHODS if inspect.getattr_static(made, name, None) is None]
    if missing or isinstance(made, type):
        slow = hasattr(made, "convert_tokens_to_ids")
        raise UserError(
            f"tokenizer={_shown(made)} can't be used as a tokenizer; give {_ALLOWED}"
            + (
                ". Of transformers' slow tokenizers, take the fast kind: AutoTokenizer.from_pretrained(name)"
                if slow
                else ""
            )
        )
    if eos_id is not None:
        raise UserError(f"eos_id={eos_id}, but the tokenizer has an end-of-text of its own; unset eos_id")
    return made


def _is_sentencepiece(path: str) -> bool:
    """Whether a file is to be read as a SentencePiece model: all but JSON and folders.

    Raises:
      UserError: there is no such file.
    """
    if not os.path.exists(path):
        hint = "" if path.endswith((".model", ".json")) else ". Tokenizers are not downloaded"
        raise UserError(
            f"tokenizer={path!r}: there is no such file or folder{files.beside(path)}{hint}. Give {_ALLOWED}"
        )
    if os.path.isdir(path):
        return False
    try:
        with open(path, "rb") as file:
            return not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError as error:
        raise UserError(f"tokenizer={path!r} can't be read: {error.strerror}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"

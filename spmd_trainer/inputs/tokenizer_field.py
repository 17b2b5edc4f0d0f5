"""Makes a text input's tokenizer from the fields `tokenizer` and `eos_id`, and finds the start token that `start` names."""

from __future__ import annotations

import inspect
import os
from typing import Any

import fiddle as fdl
from praxis import pax_fiddle

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.inputs import files, tokenizers
from spmd_trainer.inputs.huggingface_files import TOKENIZER_FILE, is_huggingface
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.storage import reading
from spmd_trainer.storage.paths import file_or_pattern

# Tokenizers that read only UTF-8.
UTF8_TOKENIZERS = (tokenizers.SentencePieceTokenizer, HuggingFaceTokenizer)

_ALLOWED = (
    f"the path of a SentencePiece .model file, of a Hugging Face {TOKENIZER_FILE} or of a folder with one; a "
    "tokenizers.Tokenizer; a fast tokenizer of transformers; a Tokenizer of spmd_trainer.inputs.tokenizers or its config; or "
    "None to read by byte"
)
_STARTS = ("eos", "bos", "none", "tokenizer")
_METHODS = ("vocab_size", "eos_id", "bytes_per_token", "encode", "decode", "fingerprint")


def make_tokenizer(given: Any, eos_id: int | None = None) -> tokenizers.Tokenizer:
    """Makes a tokenizer from the value of an input's `tokenizer` field.

    Args:
      given: a path, a tokenizer object or its config, see `text_base.TokenizedInput`; None makes each byte a token.
      eos_id: id of end-of-text, for byte tokens and Hugging Face tokenizers only. None means 256 for byte tokens, and otherwise
        the tokenizer's own id.

    Raises:
      UserError: `given` is not a tokenizer or can't be read, or the tokenizer does not accept `eos_id`.
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
        raise UserError(f"eos_id={eos_id}, but the tokenizer defines its own end-of-text; unset eos_id")
    return made


def start_token(tokenizer: tokenizers.Tokenizer, start: str) -> int | None:
    """Returns the id of the token that an input puts before each text, or None if it puts no token.

    `start` is the input's field of this name (see `text_base.TokenizedInput`).

    Raises:
      UserError: `start` is invalid, or the tokenizer lacks beginning-of-text.
    """
    require_one_of("start", start, _STARTS)
    if start == "eos":
        return tokenizer.eos_id
    if start == "tokenizer":
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"start='tokenizer', but a {type(tokenizer).__name__} does not say how a text starts, as the files of a Hugging "
                "Face tokenizer do; set start to 'eos', 'bos' or 'none'"
            )
        return tokenizer.bos_id if tokenizer.adds_bos else None
    if start == "none":
        return None
    bos_id: int | None = getattr(tokenizer, "bos_id", None)
    if bos_id is None:
        raise UserError(
            "start='bos', but the tokenizer has no beginning-of-text; set start='eos', or name the token with "
            "tokenizer=HuggingFaceTokenizer(path, bos=TOKEN)"
        )
    return bos_id


def default_start(tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the `start` that suits a tokenizer: 'tokenizer' for a Hugging Face tokenizer, otherwise 'eos'."""
    return "tokenizer" if isinstance(tokenizer, HuggingFaceTokenizer) else "eos"


def _is_sentencepiece(path: str) -> bool:
    """Returns False for a folder or a JSON file, True for any other file. Raises UserError if the path can't be read."""
    path = file_or_pattern("tokenizer", path)
    if not reading.exists(path):
        hint = "" if path.endswith((".model", ".json")) else ". Tokenizers are not downloaded"
        raise UserError(
            f"tokenizer={path!r}: there is no such file or folder{files.nearby_names(path)}{hint}. Give {_ALLOWED}"
        )
    if reading.is_dir(path):
        return False
    with files.readable(path, name=f"tokenizer={path!r}"):
        return not reading.read(path, 0, 64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"

"""Reads the files of a Hugging Face tokenizer, or the same data from a Python object of Hugging Face's libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files
from spmd_trainer.storage import json_values, reading
from spmd_trainer.storage.paths import file_or_pattern

TOKENIZER_FILE = "tokenizer.json"
# Files next to a tokenizer.json that name its special tokens. If both files name a token, the first file takes precedence.
STATING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Key in tokenizer_config.json: {id: token} for all tokens that were added to the model's own vocabulary.
ADDED_TOKENS = "added_tokens_decoder"
# Token ids are uint32 in Hugging Face's tokenizers.
_LARGEST_ID = 2**32 - 1
# The chat template in newer tokenizer folders; older folders have it in tokenizer_config.json.
TEMPLATE_FILE = "chat_template.jinja"
# Folder of further chat templates; the file's name is the template's name: additional_chat_templates/tool_use.jinja.
_TEMPLATE_FOLDER = "additional_chat_templates"
_DEFAULT = "default"


class Source(NamedTuple):
    """The data of a Hugging Face tokenizer.

    Attributes:
      name: name of the tokenizer, for error messages.
      content: the content of its tokenizer.json.
      stated: the settings in tokenizer_config.json and special_tokens_map.json, e.g. {'eos_token': '</s>'}.
      chat_templates: {name: text of a template}; the template that is used by default is named 'default'.
    """

    name: str
    content: str
    stated: dict[str, Any]
    chat_templates: dict[str, str]


def read_source(source: Any) -> Source:
    """Reads a Hugging Face tokenizer from a path (a tokenizer.json, or a folder with one) or from a Python tokenizer object.

    Raises:
      UserError: `source` can't be read, or is not a Hugging Face tokenizer.
    """
    return _read(os.fspath(source)) if isinstance(source, str | os.PathLike) else _describe(source)


def is_huggingface(value: Any) -> bool:
    """Returns True for a `tokenizers.Tokenizer` or a fast tokenizer of transformers. Imports neither library."""
    # Duck-typed, to accept the wrappers in `tokenizers.implementations` too.
    found = getattr(value, "backend_tokenizer", value)
    return not isinstance(found, type) and all(hasattr(found, name) for name in ("to_str", "get_vocab", "token_to_id"))


def _read(path: str) -> Source:
    path = file_or_pattern("tokenizer", path)
    if reading.is_dir(path):
        folder, path = path, os.path.join(path, TOKENIZER_FILE)
        if not reading.exists(path):
            raise UserError(f"{folder} has no {TOKENIZER_FILE}; it holds {files.listed(reading.names(folder))}")
    content = _read_text(path)
    if "model" not in _parse(content, path):
        sibling = os.path.join(os.path.dirname(path), TOKENIZER_FILE)
        raise UserError(
            f"{path} is not a Hugging Face {TOKENIZER_FILE}: it has no 'model'. A tokenizer's other files "
            "(tokenizer_config.json, vocab.json, ...) don't hold all of it"
            + (f"; did you mean {sibling}?" if sibling != path and reading.exists(sibling) else "")
        )
    if os.path.basename(path) != TOKENIZER_FILE:
        return Source(path, content, {}, {})
    folder = os.path.dirname(path)
    stated: dict[str, Any] = {}
    for name in STATING_FILES:
        beside = os.path.join(folder, name)
        if reading.exists(beside):
            found = _parse(_read_text(beside), beside)
            _check_added(found, beside)
            stated = {**found, **{k: v for k, v in stated.items() if v is not None}}
    return Source(path, content, stated, _template_files(folder) or _named_templates(stated.get("chat_template"), path))


def _check_added(stated: Mapping[str, Any], path: str) -> None:
    """Raises UserError unless all keys of stated['added_tokens_decoder'] are token ids. The message names the file `path`."""
    added = stated.get(ADDED_TOKENS, {})
    keys = list(added) if isinstance(added, Mapping) else None
    wrong = added if keys is None else next((key for key in keys if not _is_id(key)), None)
    if keys is None or wrong is not None:
        what = ADDED_TOKENS if keys is None else f"a key of {ADDED_TOKENS}"
        raise UserError(
            f"{path}: {what} is {wrong!r:.100}; it must be an object of tokens by their ids, from '0' to '{_LARGEST_ID}'"
        )


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= len(str(_LARGEST_ID)) and int(key) <= _LARGEST_ID


def _template_files(folder: str) -> dict[str, str]:
    """Returns {name: text} of the chat templates that are .jinja files in a tokenizer's folder.

    If a folder has such files, transformers ignores the chat templates in its tokenizer_config.json.
    """
    found: dict[str, str] = {}
    more = os.path.join(folder, _TEMPLATE_FOLDER)
    if reading.exists(more):
        with files.readable(more, fix=". It must be a folder, with a file NAME.jinja for each template"):
            names = reading.names(more)
        for name in names:
            if name.endswith(".jinja"):
                found[name.removesuffix(".jinja")] = _read_text(os.path.join(more, name))
    path = os.path.join(folder, TEMPLATE_FILE)
    if reading.exists(path):
        found[_DEFAULT] = _read_text(path)
    return found


def _named_templates(stated: Any, where: str) -> dict[str, str]:
    """Returns {name: text} of the chat templates in `stated`, the value of a setting `chat_template`.

    Raises UserError if the value is malformed; the message begins with `where`.
    """
    if not stated:
        return {}
    if isinstance(stated, str):
        return {_DEFAULT: stated}
    try:
        found = dict(stated) if isinstance(stated, Mapping) else {entry["name"]: entry["template"] for entry in stated}
    except (KeyError, TypeError):
        found = {"": None}
    if not all(isinstance(text, str) for named in found.items() for text in named):
        raise UserError(
            f"{where}: chat_template is {stated!r:.100}; it must be a text, or a list of objects with the texts 'name' and "
            "'template'"
        )
    return found


def _read_text(path: str) -> str:
    return files.read_text(path, f"the tokenizer {path}")


def _parse(content: str, path: str) -> dict[str, Any]:
    try:
        return json_values.parse_object(content)
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON that can be read, as the files of a Hugging Face tokenizer are: {error}"
        ) from error


def _describe(source: Any) -> Source:
    if not is_huggingface(source):
        raise UserError(
            f"{type(source).__name__} is not a Hugging Face tokenizer; give a tokenizer.json or a fast tokenizer"
        )
    stated = dict(getattr(source, "special_tokens_map", None) or {})
    name = f"the {type(source).__module__.partition('.')[0]} {type(source).__name__}"
    try:
        content = getattr(source, "backend_tokenizer", source).to_str()
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{name} can't be written as a {TOKENIZER_FILE}, as it must be: {error}") from error
    return Source(name, content, stated, _named_templates(getattr(source, "chat_template", None), name))


def content_of(token: Any) -> str | None:
    """Returns the text of a special token that is a string, a dict or an `AddedToken`; returns None for None."""
    if token is None or isinstance(token, str):
        return token
    return token.get("content") if isinstance(token, Mapping) else getattr(token, "content", str(token))

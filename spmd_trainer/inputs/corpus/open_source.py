"""Opens the files of `Documents` with the source class for their kind."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs.corpus import file_kinds
from spmd_trainer.inputs.corpus.arrow_documents import STATE_FILE, ArrowDocuments, files_of_folder
from spmd_trainer.inputs.corpus.documents import Column, Documents
from spmd_trainer.inputs.corpus.file_kinds import KINDS, TOKENS
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource
from spmd_trainer.inputs.corpus.parquet_files import ParquetDocuments
from spmd_trainer.inputs.corpus.record_documents import ArrayRecordDocuments, TfRecordDocuments
from spmd_trainer.inputs.corpus.tar_files import TarDocuments
from spmd_trainer.inputs.corpus.text_files import JsonLines, StreamedJsonLines, TextDocuments
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, TokenStore
from spmd_trainer.storage import is_remote, reading

# File that marks a folder with several dataset splits, as Hugging Face `datasets` saves it.
_DATASET_DICT = "dataset_dict.json"
# Kinds of files whose records a processor can read.
_OF_RECORDS = ("jsonl", "parquet", "arrow", "arrayrecord")
# Names of the parts of a prepared corpus (a token store).
_PREPARED_PART = re.compile(r"tokens-\d{5}-of-\d{5}\.(arrow|json)")


def open_documents(documents: Documents) -> FileSource:
    """Opens a corpus. If `documents.files` is a `FileSource`, returns it unchanged.

    Raises:
      UserError: a setting is wrong, there are no files, their kinds differ or are unknown, or a file can't be read.
    """
    if isinstance(documents.files, FileSource):
        return documents.files
    if not (isinstance(documents.max_record_bytes, int) and documents.max_record_bytes > 0):
        raise UserError(f"max_record_bytes={documents.max_record_bytes!r}; give a number of bytes above 0")
    if documents.kind is not None:
        require_one_of("kind", documents.kind, KINDS)
    if not (isinstance(documents.column, str) and documents.column):
        raise UserError(f"column={documents.column!r}; set it to the name of the column with the text, e.g. 'text'")
    entries = input_files.entries_of(documents.files)
    if documents.kind in (None, TOKENS) and (prepared := _prepared_folder(entries)):
        return TokenStore(prepared)
    if documents.kind == TOKENS:
        raise UserError(
            f"kind='tokens' needs `files` to be a folder with a {DESCRIPTION_FILE}, which --mode=tokenise writes when it "
            f"has finished; `files` has {input_files.listed(entries)}"
        )
    found = input_files.find_files(entries, files_of_dataset)
    if documents.kind in (None, "arrow"):
        _refuse_prepared_parts(found.paths)
    kind = documents.kind or file_kinds.kind_of_all(found.paths)
    if documents.processor is not None:
        kind = "jsonl" if documents.kind is None and kind == "text" else kind
        if kind not in _OF_RECORDS:
            raise UserError(f"files of the kind {kind!r} hold no messages; give {', '.join(map(repr, _OF_RECORDS))}")
    if documents.separator is not None and kind != "text":
        raise UserError(f"separator={documents.separator!r} is for text files; these are of the kind {kind!r}")
    source = open_files(documents, kind, found)
    if isinstance(source, TextDocuments):
        source.require_separator()
    return source


def open_files(documents: Documents, kind: str, paths: FilesOrPaths) -> FileSource:
    """Opens files of a known kind with the settings of `documents`.

    Raises:
      UserError: a file can't be read; the message names it.
    """
    column: Column = documents.column if documents.processor is None else documents.processor.entries
    source: FileSource
    if kind == "jsonl":
        source = _open_json_lines(paths, column, documents.max_record_bytes)
    elif kind == "arrayrecord":
        source = ArrayRecordDocuments(paths)
    elif kind == "text":
        # If the user has set the kind, JSON files are read as text too.
        any_bytes = documents.allow_binary
        source = TextDocuments(paths, documents.separator, json_too=documents.kind is not None, any_bytes=any_bytes)
    elif kind in ("parquet", "arrow"):
        source = (ParquetDocuments if kind == "parquet" else ArrowDocuments)(paths, column)
    else:
        source = (TarDocuments if kind == "tar" else TfRecordDocuments)(paths, documents.column)
    source.max_record_bytes = documents.max_record_bytes
    return source


def _open_json_lines(found: FilesOrPaths, column: Column, max_record_bytes: int) -> FileSource:
    paths = found.paths if isinstance(found, input_files.TextFiles) else found
    if any(map(is_remote, paths)):
        return StreamedJsonLines(found, column)
    compressed = [path for path in paths if file_kinds.is_compressed(file_kinds.read_head(path))]
    if compressed and len(compressed) < len(paths):
        plain = next(path for path in paths if path not in compressed)
        raise UserError(
            f"{compressed[0]} is compressed and {plain} is not; make a Documents of each, and a Mixture of the two"
        )
    if compressed:
        return StreamedJsonLines(found, column)
    for path in paths:
        first_line = file_kinds.read_head(path).lstrip().partition(b"\n")[0].strip()
        if first_line in (b"[", b"{"):
            raise UserError(
                f"{path} holds one JSON value of many lines, and JSON lines have a whole object in each; convert it, e.g. with "
                "`jq -c '.[]'`"
            )
    return JsonLines(found, column, max_record_bytes)


def _prepared_folder(entries: Sequence[str]) -> str | None:
    """Returns the folder if `entries` is a single folder with a token store (a prepared corpus), otherwise None.

    Raises UserError if `entries` has such a folder and other entries.
    """
    are_prepared = reading.for_each(entries, _is_prepared)
    found = [entry for entry, is_prepared in zip(entries, are_prepared, strict=True) if is_prepared]
    if found and len(entries) > 1:
        raise UserError(
            f"{found[0]} is a prepared corpus, and `files` has other entries too; make a Documents of each, and a Mixture of them"
        )
    return found[0] if found else None


def _is_prepared(folder: str) -> bool:
    with input_files.readable(folder):
        return reading.is_dir(folder) and reading.exists(os.path.join(folder, DESCRIPTION_FILE))


def _refuse_prepared_parts(paths: Sequence[str]) -> None:
    """Raises UserError if a path is a single file of a token store, which holds tokens instead of text."""
    for path in paths:
        if _PREPARED_PART.fullmatch(os.path.basename(path)):
            folder = os.path.dirname(path) or "."
            raise UserError(
                f"{path} is a part of a prepared corpus, and holds tokens, not text; give its folder: files={folder!r}. If the "
                f"folder has no {DESCRIPTION_FILE}, --mode=tokenise has not finished; run it again"
            )


def files_of_dataset(directory: str) -> list[str] | None:
    """Returns the files of a folder that Hugging Face `datasets` has saved, or None for any other folder.

    Raises:
      UserError: the folder holds several dataset splits, or its state.json can't be read.
    """
    if reading.exists(os.path.join(directory, STATE_FILE)):
        return files_of_folder(directory)
    if reading.exists(os.path.join(directory, _DATASET_DICT)):
        splits = [name for name in reading.names(directory) if name != _DATASET_DICT]
        raise UserError(
            f"{directory} holds a dataset of several splits: {input_files.listed(splits)}; give the folder of one, e.g. "
            f"{os.path.join(directory, splits[0] if splits else 'train')}"
        )
    return None

"""Text files: one document each, or several with a separator between them."""

from __future__ import annotations

import array
import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import file_formats, record_files
from spmd_trainer.inputs.corpus.documents import Document, Record
from spmd_trainer.inputs.corpus.file_source import IndexedFiles
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.local_copies import cached_index

# Bytes searched for separators at a time.
_BLOCK = 2**22
# Smaller files are faster to index again than to look up.
_CACHED_BYTES = 2**20


class TextDocuments(IndexedFiles):
    """Documents of text files. A chunk is a file."""

    kind: ClassVar[str] = "text"

    def __init__(self, paths: Sequence[str], separator: str | None = None):
        """Finds the documents.

        Args:
          paths: the files.
          separator: text between the documents of a file, not part of them; None: each file is one document.

        Raises:
          UserError: a file can't be read or is not text by its first bytes, or `separator` is empty or in none of the
            files.
        """
        if separator is not None and not (isinstance(separator, str) and separator):
            raise UserError(
                f"separator={separator!r}; set it to the text between two documents, or to None: a file is one document"
            )
        self._separator = None if separator is None else separator.encode()
        super().__init__(paths)
        # An empty file counts as one document too.
        if separator is not None and self.num_bytes and np.all(self.shards.counts == 1):
            raise UserError(f"separator={separator!r} is in none of the files; in a shell, a newline is $'\\n'")

    @property
    def random_access(self) -> bool:
        # In an object store, every document of a large file would cost a request.
        return self._separator is None or not any(map(is_remote, self.paths))

    def find_records(self, index: int) -> np.ndarray:
        size = self.sizes[index]
        head = self._files.read(index, 0, min(size, file_formats.HEAD_BYTES))
        _refuse_unless_text(head, self.paths[index])
        if self._separator is None:
            return np.array([0, size], np.int64)
        find = functools.partial(self._find_separators, index, self._separator)
        return (
            find() if size < _CACHED_BYTES else cached_index(self.paths[index], f"text-{self._separator.hex()}", find)
        )

    def record(self, index: int, number: int, content: bytes) -> Record:
        path = self.paths[index]
        if self._separator is None:
            return Document(content, path)
        return Document(content.removesuffix(self._separator), f"{path} document {number + 1}")

    def _find_separators(self, index: int, separator: bytes) -> np.ndarray:
        """Returns the first byte of each document, and the file's end: int64 [documents + 1]."""
        size, begin = self.sizes[index], 0
        starts = array.array("q", [0])
        while begin < size:
            # Blocks overlap, so that a separator across their border is found once.
            block = self._files.read(index, begin, min(size, begin + _BLOCK + len(separator) - 1))
            place = block.find(separator)
            while place >= 0:
                starts.append(begin + place + len(separator))
                place = block.find(separator, place + len(separator))
            begin = max(begin + _BLOCK, starts[-1])
        starts.append(size)
        return np.frombuffer(starts, np.int64)


def _refuse_unless_text(head: bytes, path: str) -> None:
    kind = file_formats.TFRECORD if record_files.begins_with_record(head) else file_formats.identify(head)
    if kind is not None:
        raise UserError(f"{path} is {kind.name}, not text. {kind.instead}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16; convert it with `iconv -f utf-16 -t utf-8`")
    if b"\0" in head:
        raise UserError(f"{path} is not text: byte {head.index(0)} is NUL. Leave it out of `files`")

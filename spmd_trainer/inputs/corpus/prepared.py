"""A corpus tokenised by `tools/prepare_text.py`: ArrayRecord files of tokens, described by `corpus.json`.

Record n holds the tokens of document n of the original source: unsigned little-endian integers, without end-of-text.
It is empty if the document is empty or was left out. Chunks match the original, so every shuffle gives the same order.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Record, Source
from spmd_trainer.inputs.corpus.record_documents import ArrayRecordDocuments
from spmd_trainer.inputs.shards import ShardIndex
from spmd_trainer.storage import json_values, reading

DESCRIPTION_FILE = "corpus.json"
FORMAT = 1
# Records per read when documents are read in order.
_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Description:
    """Content of `corpus.json`.

    Attributes:
      tokenizer: fingerprint of the tokenizer.
      dtype: dtype of the tokens, e.g. 'uint16'.
      chunks: documents per chunk of the original source.
      parts: names of the ArrayRecord files, in order.
      statistics: counts of documents, tokens, bytes and skipped records; and documents by length.
    """

    tokenizer: dict[str, Any]
    dtype: str
    chunks: list[int]
    parts: list[str]
    statistics: dict[str, Any]

    def lines(self) -> list[str]:
        """Lines of the file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1).splitlines()

    @classmethod
    def read(cls, folder: str) -> Description:
        """Reads the file of a folder.

        Raises:
          UserError: it is missing, or has another format; names the file.
        """
        path = os.path.join(folder, DESCRIPTION_FILE)
        try:
            found = json_values.parse_object(json_values.content_of(path))
        except OSError as error:
            raise UserError(
                f"{path} can't be read: {reading.problem(path, error)}{input_files.nearby_names(path)}. "
                "tools/prepare_text.py writes it when all documents are tokenised; if it was stopped, run it again"
            ) from error
        except ValueError as error:
            raise UserError(f"{path} is not JSON that can be read: {error}. Prepare the corpus again") from error
        if found.get("format") != FORMAT:
            raise UserError(f"{path} is not of format {FORMAT} of prepared corpora; prepare the corpus again")
        try:
            return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls)})
        except KeyError as error:
            raise UserError(f"{path} lacks {error}; prepare the corpus again") from error


class PreparedDocuments(Source):
    """The tokens of a prepared corpus, read by number."""

    def __init__(self, folder: str):
        """Reads `corpus.json` of a local, gs:// or s3:// folder.

        Raises:
          UserError: the folder is not a prepared corpus, or a file is missing or has another number of records.
        """
        self.description = Description.read(folder)
        self._folder = folder
        self._dtype = np.dtype(self.description.dtype).newbyteorder("<")
        self._records = ArrayRecordDocuments([os.path.join(folder, name) for name in self.description.parts])
        self._shards = ShardIndex(self.description.chunks)
        expected, found = len(self._shards), int(self._records.chunk_sizes().sum())
        if expected != found:
            raise UserError(
                f"{folder} holds {found:,} documents, and {DESCRIPTION_FILE} says {expected:,}; prepare the corpus again"
            )

    @property
    def num_chunks(self) -> int:
        return len(self.description.chunks)

    @property
    def random_access(self) -> bool:
        return True

    @property
    def size_text(self) -> str:
        return f"{self.description.statistics['tokens']:,} tokens of {len(self._shards):,} documents"

    @property
    def num_bytes(self) -> int:
        return self._records.num_bytes

    def changed_text(self, before: Mapping[str, Any]) -> str:
        return self._records.changed_text(before)

    def chunk_sizes(self) -> np.ndarray:
        return self._shards.counts

    def read(self, numbers: np.ndarray) -> list[Record]:
        return [self._tokens(record) for record in self._records.read(numbers)]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        first, end = self._shards.span(chunk)
        for begin in range(first + start, end, _BLOCK):
            yield from self.read(np.arange(begin, min(begin + _BLOCK, end)))

    def fingerprint(self) -> dict[str, Any]:
        return self._records.fingerprint()

    def check_tokenizer(self, fingerprint: Mapping[str, Any]) -> None:
        """Compares the input's tokenizer with that of the corpus.

        Raises:
          UserError: they differ; says how.
        """
        made = self.description.tokenizer
        different = [key for key in sorted({*made, *fingerprint}) if made.get(key) != fingerprint.get(key)]
        if different:
            what = ", ".join(f"{key} was {made.get(key)} and is {fingerprint.get(key)}" for key in different)
            raise UserError(
                f"{self._folder} was tokenised by another tokenizer: {what}. Use the same tokenizer, or prepare the corpus again"
            )

    def _tokens(self, record: Record) -> Record:
        if isinstance(record, BadRecord) or isinstance(record.content, np.ndarray):
            return record
        if len(record.content) % self._dtype.itemsize:
            return BadRecord(
                record.where, f"has {len(record.content)} bytes, not a whole number of {self._dtype.name} tokens"
            )
        return dataclasses.replace(record, content=np.frombuffer(record.content, self._dtype))

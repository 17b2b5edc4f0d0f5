"""Images of an input: how the user describes them (`Images`), their records, and the base of their sources."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

from spmd_trainer.inputs.corpus.documents import BadRecord, Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.shards import ShardIndex


@dataclasses.dataclass(frozen=True)
class Images(Documents):
    """Images in Parquet files or in tar shards, as the user describes them.

    Example: `Images("gs://bucket/train/*.tar", label="cls")`.

    Attributes:
      files, epochs: as in `Documents`.
      column: Parquet: the column of the images' bytes, or of structs with the entry 'bytes'. Tar: the member's
        extension, or several separated by commas, one of which each sample has. None: 'image', and 'jpg,jpeg,png'.
      label: Parquet: the column of the labels. Tar: the extension of the member that holds it as text; 'json.a' is key
        a of the object in the member 'json'. None: no labels.
      kind: 'parquet' or 'tar'; None detects it from the files' names and first bytes.
      shuffle: as in `Documents`. Tar shards are read by number, so they are shuffled globally. Parquet files are read
        by row group: row groups are shuffled, and windows of rows in each; 'auto' takes windows of 10,000.
    """

    column: Any = None
    label: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """One image.

    Attributes:
      content: bytes of its file.
      label: text from a tar member, any value from JSON or Parquet; None without labels.
      where: file and member or row, for messages: 'a.tar, member 7.jpg', 'a.parquet row group 2, row 17'.
    """

    content: bytes
    label: Any
    where: str


ImageRecord = Image | BadRecord


class ImageSource(FileSource):
    """Images in files, numbered across all chunks. Several threads may read at a time.

    Attributes:
      label: column or extension of the labels, see `Images`; None without labels.
    """

    label: str | None
    shards: ShardIndex

    @abc.abstractmethod
    def image(self, number: int) -> ImageRecord:
        """Reads an image by its number across all chunks.

        Raises:
          UserError: the file (named) can't be read, or has changed since it was opened.
        """

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        raise NotImplementedError("images are read by number")

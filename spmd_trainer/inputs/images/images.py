"""Images of an input: how the user describes them (`Images`), their records, and the base class of their sources."""

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
      column: Parquet: name of the column with the images' bytes, or with structs that have the field 'bytes'; None: 'image'.
        Tar: extension of the image member, or several, separated by commas, one per sample; None: 'jpg,jpeg,png'.
      label: Parquet: name of the column with the labels. Tar: extension of the member that holds the label as text; 'json.a'
        is key a of the object in the member 'json'. None: no labels.
      kind: 'parquet' or 'tar'; None detects it from the files' names and first bytes.
      shuffle: as in `Documents`. 'global' needs tar shards, whose images are read by number. For Parquet files, an integer or
        'auto' (10,000) gives a random order of the row groups, whose rows are shuffled within windows of this many rows.
    """

    column: Any = None
    label: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """One image.

    Attributes:
      content: bytes of the image file.
      label: text from a tar member, any value from JSON or Parquet; None without labels.
      where: location for messages: 'a.tar, member 7.jpg', 'a.parquet row group 2, row 17'.
    """

    content: bytes
    label: Any
    where: str


ImageRecord = Image | BadRecord


class ImageSource(FileSource):
    """Base class of image sources. Images are numbered across all chunks. Several threads may read at a time.

    Attributes:
      label: column or extension of the labels, see `Images`; None: the images have no labels.
    """

    label: str | None
    shards: ShardIndex

    @abc.abstractmethod
    def image(self, number: int) -> ImageRecord:
        """Reads an image by its number across all chunks.

        Raises:
          UserError: the image's file can't be read, or has changed since it was opened; the message names the file.
        """

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        raise NotImplementedError("images are read by number")

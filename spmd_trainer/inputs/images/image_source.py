"""Base of the sources of images, and the function that opens them."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus import file_kinds, open_source
from spmd_trainer.inputs.corpus.documents import Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.images.images import ImageRecord, Images

KINDS = ("parquet", "tar")


class ImageSource(FileSource):
    """Images in files, numbered through. Several threads may read at a time.

    Attributes:
      label: what holds the labels, see `Images`; None: the images have none.
    """

    label: str | None

    @abc.abstractmethod
    def chunk_sizes(self) -> np.ndarray:
        """Returns the images of each chunk, int64 [num_chunks]."""

    @abc.abstractmethod
    def image(self, number: int) -> ImageRecord:
        """Returns an image by its number in all chunks together.

        Raises:
          UserError: the file can't be read, or has changed since it was opened; names it.
        """

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        raise NotImplementedError("images are read by number")


def open_images(images: Documents) -> ImageSource:
    """Opens images.

    Raises:
      UserError: they are not `Images`; there are no files, they are of several kinds or of none that is known, or one can't be
        read (names it); or they hold no image.
    """
    if not isinstance(images, Images):
        raise UserError(f"{type(images).__name__}(...) stands where Images('train/*.tar', label='cls') should")
    for field in ("column", "label"):
        value = getattr(images, field)
        if value is not None and not (isinstance(value, str) and value):
            raise UserError(f"{field}={value!r}; set it to the name of a column, to an extension, or to None")
    if images.separator is not None:
        raise UserError(f"separator={images.separator!r} is for text files; images have none")
    if images.kind is not None and images.kind not in KINDS:
        raise UserError(f"kind={images.kind!r}; set it to 'parquet' or 'tar'{did_you_mean(str(images.kind), KINDS)}")
    paths = open_source.paths_of(images.files)
    kind = images.kind or file_kinds.kind_of_all(paths)
    source: ImageSource
    if kind == "parquet":
        from spmd_trainer.inputs.images.parquet_images import ParquetImages

        source = ParquetImages(paths, images.column, images.label)
    elif kind == "tar":
        from spmd_trainer.inputs.images.tar_images import TarImages

        source = TarImages(paths, images.column, images.label)
    else:
        raise UserError(f"{paths[0]} is of the kind {kind!r}; images are read from Parquet files and from tar shards")
    if not source.chunk_sizes().sum():
        raise UserError(
            f"{source.size_text} hold no images, the first is {paths[0]}; give at least one with images in it"
        )
    return source

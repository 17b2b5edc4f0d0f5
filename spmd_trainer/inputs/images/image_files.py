"""Sources of images in files.

`ParquetImages` reads a column of bytes, or of structs with the field 'bytes', as Hugging Face `datasets` writes them.
`TarImages` reads samples of tar shards in webdataset's layout by number. An index of each shard is built once.
"""

from __future__ import annotations

import itertools
import logging
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.documents import BadRecord
from spmd_trainer.inputs.corpus.file_kinds import open_bytes
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, damage
from spmd_trainer.inputs.corpus.parquet_files import ParquetFiles, first_line, leaves_of
from spmd_trainer.inputs.corpus.tar_files import TAR_DAMAGE, Header, is_plain, refuse_without_end, samples
from spmd_trainer.inputs.images.images import Image, ImageRecord, ImageSource
from spmd_trainer.inputs.shards import LRUCache, OpenFiles, ShardIndex
from spmd_trainer.storage import json_values
from spmd_trainer.storage.local_copies import cached_index

_COLUMN, _BYTES = "image", "bytes"
# Number of row groups kept in memory: a batch may span two.
_HELD = 2


class ParquetImages(ParquetFiles, ImageSource):
    """Source of images in Parquet files. Each row group is a chunk, and is read as a whole. Rows are shuffled within chunks."""

    def __init__(self, paths: FilesOrPaths, column: str | None = None, label: str | None = None):
        """Reads the files' footers. `column` and `label` are as in `Images`. Raises the errors of `ParquetFiles`."""
        self._column, self.label = column or _COLUMN, label
        super().__init__(paths, [self._column] if label is None else [self._column, label])
        self._tables: LRUCache[Any] = LRUCache(_HELD)

    def image(self, number: int) -> ImageRecord:
        chunk, row = self.shards.locate(number)
        index, group = self.groups[chunk]
        where = f"{self.paths[index]} row group {group + 1}, row {row + 1}"
        values = self._tables.get(chunk, self._read_group).slice(row, 1).to_pylist()[0]
        content = _value(values, self._column)
        if isinstance(content, Mapping):
            content = content.get(_BYTES)
        if not isinstance(content, bytes):
            found = "is null" if content is None else f"holds {type(content).__name__}, not bytes"
            return BadRecord(where, f"has a column {self._column!r} that {found}")
        label = None if self.label is None else _value(values, self.label)
        if self.label is not None and label is None:
            return BadRecord(where, f"has no {self.label!r}: it is null")
        return Image(content, label, where)

    def _read_group(self, chunk: int) -> Any:
        index, group = self.groups[chunk]
        try:
            with self.opened(index) as file:
                leaves = leaves_of(file)
                # Skip the path stored beside the bytes.
                inner = f"{self._column}.{_BYTES}"
                columns = [inner if inner in leaves else self._column, *filter(None, [self.label])]
                return file.read_row_group(group, columns=columns, use_threads=False)
        except damage() as error:
            raise UserError(
                f"{self.paths[index]} row group {group + 1} can't be read: {first_line(error)}. Write the file again, or leave "
                "it out"
            ) from error


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column in a row; 'a.b' is field b of the struct column a."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = None if value is None else value.get(name)
    return value


_EXTENSIONS = ("jpg", "jpeg", "png")
_JSON = "json"
# Stands for the size of a member that a sample lacks.
_MISSING = -1


class _Member(NamedTuple):
    begin: int
    size: int


_NONE = _Member(0, _MISSING)


class TarImages(ImageSource):
    """Source of images in the samples of uncompressed tar files. Each file is a chunk."""

    kind = "tar"
    random_access = True

    def __init__(self, paths: FilesOrPaths, column: str | None = None, label: str | None = None):
        """Indexes the samples of all files; the cache folder keeps the index. `column` and `label` are as in `Images`.

        Raises:
          UserError: a file is unreadable, compressed or damaged, or has a sample with several images; the message names the file.
        """
        super().__init__(paths)
        self._images = _EXTENSIONS if column is None else tuple(part.strip() for part in column.split(","))
        self.label = label
        self._label, _, self._key = (label or "").partition(".")
        if self._key and self._label != _JSON:
            self._label, self._key = label or "", ""
        settings = zlib.crc32(repr((self._images, self._label)).encode())
        # For each sample: byte offset and size of its image, then of its label.
        self._members = [
            cached_index(path, f"tar-{settings:08x}", lambda index=index: self._find(index))  # type: ignore[misc]
            for index, path in enumerate(self.paths)
        ]
        self.shards = ShardIndex([len(found) for found in self._members])
        self._files = OpenFiles(self.paths, self.sizes)

    def image(self, number: int) -> ImageRecord:
        file, inside = self.shards.locate(number)
        begin, size, label_begin, label_size = self._members[file][inside].tolist()
        if size == _MISSING:
            name, members = self._sample(file, inside)
            wanted = " or ".join(map(repr, self._images))
            return BadRecord(
                f"{self.paths[file]}, sample {name!r}",
                f"has no member {wanted}{did_you_mean(self._images[0], members)}",
            )
        # Reads the member's tar header too, which precedes the content.
        block = self._files.read(file, begin - tarfile.BLOCKSIZE, begin + size)
        try:
            header = tarfile.TarInfo.frombuf(block[: tarfile.BLOCKSIZE], tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError as error:
            raise UserError(f"{self.paths[file]} has changed at byte {begin}: {error}; start the run again") from error
        where = f"{self.paths[file]}, member {header.name}"
        label: Any = None
        if self._label:
            if label_size == _MISSING:
                _, members = self._sample(file, inside)
                return BadRecord(where, f"has no label member {self._label!r}{did_you_mean(self._label, members)}")
            label = self._files.read(file, label_begin, label_begin + label_size)
            label = self._label_of(label, where)
        return label if isinstance(label, BadRecord) else Image(block[tarfile.BLOCKSIZE :], label, where)

    def _label_of(self, content: bytes, where: str) -> Any:
        """Returns the label in the content of a label member, or a BadRecord if it can't be read."""
        try:
            if self._label != _JSON:
                return content.decode().strip()
            value = json_values.parse(content, finite=False)
        except ValueError as error:
            return BadRecord(where, f"has a label member {self._label!r} that can't be read: {error}")
        for name in filter(None, self._key.split(".")):
            if not isinstance(value, Mapping) or name not in value:
                keys = list(map(str, value)) if isinstance(value, Mapping) else []
                return BadRecord(where, f"has no key {self._key!r} in its member 'json'{did_you_mean(name, keys)}")
            value = value[name]
        return value

    def _find(self, index: int) -> np.ndarray:
        """Returns the byte offset and size of each sample's image, then those of its label: int64 [samples, 4]."""
        path = self.paths[index]
        self.refuse_changed(index)
        logging.info("finding the samples of %s", path)
        found: list[tuple[int, int, int, int]] = []
        try:
            if not is_plain(path):
                raise UserError(
                    f"{path} is compressed or no tar file, so its images can't be read by number; unpack it"
                )
            for name, members in self._walk(index):
                images = {one: member for one in self._images if (member := members.get(one)) is not None}
                if len(images) > 1:
                    raise UserError(
                        f"{path}: sample {name!r} has {' and '.join(images)}; set column to the one that is the image"
                    )
                found.append((*next(iter(images.values()), _NONE), *(members.get(self._label) or _NONE)))
            refuse_without_end(path, self.sizes[index])
        except TAR_DAMAGE as error:
            problem = error or type(error).__name__
            raise UserError(
                f"{path} is damaged after sample {len(found)}: {problem}. Write the file again, or leave it out"
            ) from error
        return np.array(found, np.int64).reshape(-1, 4)

    def _walk(self, index: int) -> Iterator[tuple[str, dict[str, _Member | None]]]:
        path = self.paths[index]
        with open_bytes(path) as file:
            archive = tarfile.TarFile.open(fileobj=file, mode="r:", tarinfo=Header)
            yield from samples(archive, path, {*self._images, self._label}, _member, self.sizes[index])

    def _sample(self, file: int, number: int) -> tuple[str, list[str]]:
        """Returns the name of a sample and the extensions of its members, for an error message. Reads the file again."""
        name, members = next(itertools.islice(self._walk(file), number, None))
        return name, list(members)


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> _Member:
    del archive
    return _Member(member.offset_data, member.size)

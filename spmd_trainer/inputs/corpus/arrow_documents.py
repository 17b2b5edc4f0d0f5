"""Reads documents from Arrow files with pyarrow: IPC stream or file format, e.g. written by `datasets.Dataset.save_to_disk`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Column, Record
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource, columns_of, damage, documents_of
from spmd_trainer.inputs.shards import LRUCache, ShardIndex
from spmd_trainer.storage import is_remote, json_values
from spmd_trainer.storage.local_copies import local_copy

STATE_FILE = "state.json"
_FILE_FORMAT = b"ARROW1"
# Maximum number of files open at a time. A global shuffle jumps between all files, and opening a file costs much more than
# reading a row. An open file takes address space; a compressed file also holds one record batch in memory.
_MAX_OPEN = 64


def files_of_folder(folder: str) -> list[str]:
    """Lists the Arrow files of a folder written by `datasets.Dataset.save_to_disk`.

    Raises:
      UserError: the folder's state.json can't be read, or the dataset has an indices mapping, which reorders the rows.
    """
    path = os.path.join(folder, STATE_FILE)
    with input_files.readable(path):
        content = json_values.content_of(path)
    try:
        state = json_values.parse_object(content)
        names = [os.path.join(folder, file["filename"]) for file in state["_data_files"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the state.json of a saved dataset: {error}") from error
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} has an indices mapping: call flatten_indices() before save_to_disk()")
    return names


class _Batches(NamedTuple):
    """The record batches of an Arrow file: `size` is the number of record batches, and `get(n)` reads record batch n."""

    size: int
    get: Callable[[int], Any]


class ArrowDocuments(FileSource):
    """Source whose documents are the rows of memory-mapped Arrow files. Each record batch is one chunk (see `FileSource`).

    Rows can be read in any order. Remote files are copied to the cache folder first.
    """

    kind = "arrow"
    random_access = True
    shards: ShardIndex

    def __init__(self, paths: FilesOrPaths, column: Column = "text"):
        """Opens every file to count its rows. `column` is as in `Documents`.

        Raises:
          UserError: pyarrow isn't installed, or a file is unreadable, damaged, or lacks the column; the message names the file.
        """
        super().__init__(paths)
        self._column = column
        self._open: LRUCache[_Batches] = LRUCache(_MAX_OPEN)
        self.shards = self.count_groups(self._batch_sizes)

    def read(self, numbers: np.ndarray) -> list[Record]:
        return [self._record(*self.shards.locate(number)) for number in np.asarray(numbers).tolist()]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        for row in range(start, int(self.shards.counts[chunk])):
            yield self._record(chunk, row)

    def _record(self, chunk: int, row: int) -> Record:
        index, number = self.groups[chunk]
        where = f"{self.paths[index]} record batch {number + 1}, row {row + 1}"
        try:
            batch = self._batches(index).get(number).slice(row, 1)
            batch.validate(full=True)  # reading damaged offsets would crash the process
            (record,) = documents_of(batch, self._column, [where])
            return record
        except damage() as error:
            return BadRecord(where, f"can't be read: {error}")

    def _batch_sizes(self, index: int) -> list[int]:
        try:
            batches = self._batches(index)
            return [len(batches.get(number)) for number in range(batches.size)]
        except damage() as error:
            raise _unreadable(self.paths[index], error) from error

    def _batches(self, index: int) -> _Batches:
        # Local files are memory-mapped: if one was truncated after it was opened, reading it would kill the process by SIGBUS.
        if index not in self._open.kept or not is_remote(self.paths[index]):
            self.refuse_changed(index)
        return self._open.get(index, lambda index: self._read(self.paths[index]))

    def _read(self, path: str) -> _Batches:
        pyarrow = imported("pyarrow", f"{path}: Arrow files need pyarrow: pip install 'spmd-trainer[data]'")
        try:
            mapped = pyarrow.memory_map(local_copy(path))
            is_file = mapped.read(len(_FILE_FORMAT)) == _FILE_FORMAT
            mapped.seek(0)
            options = pyarrow.ipc.IpcReadOptions(use_threads=False)
            opened = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
            reader = opened(mapped, options=options)
            columns = columns_of(path, self._column, list(reader.schema.names))
            if not is_file:
                batches = [batch.select(columns) for batch in reader]
                return _Batches(len(batches), batches.__getitem__)
            # One batch at a time, because compressed batches are decompressed into memory.
            last = functools.lru_cache(maxsize=1)(lambda number: reader.get_batch(number).select(columns))
            return _Batches(reader.num_record_batches, last)
        except damage() as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"{path} can't be read as Arrow: {error}. Write the file again, or leave it out")

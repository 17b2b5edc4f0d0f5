"""Sources of text documents in ArrayRecord and TFRecord files, read by number.

ArrayRecord needs the package array_record (`pip install 'spmd-trainer[data]'`). TFRecord files hold tf.train.Examples with a
text feature, and are read without TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import record_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource
from spmd_trainer.inputs.shards import LRUCache, ShardIndex
from spmd_trainer.storage.local_copies import local_copy

# array_record's recommended settings for random access; they start no threads.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Maximum number of ArrayRecord files open at a time: a global shuffle jumps between all files, and opening one costs much more
# than reading a record. A reader holds its file's index in memory, so the total number of their records is limited too.
_MAX_OPEN = 64
_MAX_OPEN_RECORDS = 2**22
# Number of records per read when documents are read in order.
_BLOCK = 256


class ArrayRecordDocuments(FileSource):
    """Source whose documents are the records of ArrayRecord files. Each file is a chunk. Remote files are cached locally."""

    kind = "arrayrecord"
    random_access = True
    shards: ShardIndex

    def __init__(self, paths: FilesOrPaths):
        """Opens every file to count its records.

        Raises:
          UserError: array_record isn't installed, or a file is empty, damaged or not ArrayRecord; the message names the file.
        """
        super().__init__(paths)
        self._open: LRUCache[Any] = LRUCache(
            _MAX_OPEN, size_of=lambda reader: reader.num_records(), most_size=_MAX_OPEN_RECORDS
        )
        self.shards = ShardIndex([self._reader(index).num_records() for index in range(len(self.paths))])

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: list[Record | None] = [None] * len(numbers)
        for index, places, inside in self.shards.split(numbers):
            for place, record in zip(places.tolist(), self._records(index, inside.tolist()), strict=True):
                found[place] = record
        return [record for record in found if record is not None]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        count = int(self.shards.counts[chunk])
        for begin in range(start, count, _BLOCK):
            yield from self._records(chunk, list(range(begin, min(begin + _BLOCK, count))))

    def _records(self, index: int, numbers: list[int]) -> list[Record]:
        path = self.paths[index]
        try:
            contents = self._reader(index).read(numbers)
        except Exception as error:  # the library raises plain exceptions of several kinds
            raise UserError(
                f"{path} is damaged at one of the records {min(numbers)} to {max(numbers)}: {_first_line(error)}. Write the file "
                "again, or leave it out"
            ) from error
        return [Document(content, f"{path} record {n}") for n, content in zip(numbers, contents, strict=True)]

    def _reader(self, index: int) -> Any:
        return self._open.get(index, self._open_file)

    def _open_file(self, index: int) -> Any:
        self.refuse_changed(index)
        return _open(self.paths[index])


def _open(path: str) -> Any:
    needed = f"{path}: ArrayRecord files need array_record: pip install 'spmd-trainer[data]'"
    library = imported("array_record.python.array_record_module", needed)
    try:
        reader = library.ArrayRecordReader(local_copy(path), _OPTIONS)
        if not reader.ok():  # else it silently yields no records
            reader.read_all()
            raise RuntimeError("its end is damaged or missing")
    except Exception as error:  # the library raises plain exceptions of several kinds
        raise UserError(
            f"{path} can't be read as ArrayRecord: {_first_line(error)}. Write the file again, or leave it out"
        ) from error
    return reader


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition("; ")[0]


class TfRecordDocuments(record_files.RecordSource):
    """Source whose documents are texts in the tf.train.Examples of TFRecord files. Each file is a chunk."""

    def __init__(self, paths: FilesOrPaths, column: str = "text"):
        """Finds the byte offsets of all records.

        Args:
          paths: uncompressed files.
          column: key of the bytes feature whose only value is the text.

        Raises:
          UserError: a file can't be read, is compressed or is broken; the message names the file, and a broken record's offset.
        """
        self._column = column
        super().__init__(paths)

    def record(self, index: int, number: int, content: bytes) -> Record:
        where = self.where(index, number)
        try:
            features = example_bytes(record_files.data_of(content, len(content), lambda: where))
        except record_files.BrokenRecord as error:
            return BadRecord(where, str(error).removeprefix(where).strip())
        except DecodeError as error:
            return BadRecord(where, f"is not a tf.train.Example: {error}")
        if self._column not in features:
            return BadRecord(where, f"has no feature {self._column!r}{did_you_mean(self._column, list(features))}")
        values = features[self._column]
        if values is None or len(values) != 1:
            found = "numbers" if values is None else f"{len(values)} values"
            return BadRecord(where, f"has {found} in the feature {self._column!r} instead of one text")
        return Document(values[0], where)


# Schema of tf.train.Example in which lists of numbers stay unparsed. Importing TensorFlow's own class takes seconds.
_SCHEMA = """
name: "spmd_trainer_example.proto" syntax: "proto3"
message_type { name: "Texts" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "Texts" }
  field { name: "float_list" number: 2 type: TYPE_BYTES }
  field { name: "int64_list" number: 3 type: TYPE_BYTES } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""


@functools.cache
def _example_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def example_bytes(data: bytes) -> dict[str, list[bytes] | None]:
    """Returns {feature name: its byte strings, or None if it is numeric} for a serialized tf.train.Example.

    Raises:
      DecodeError: `data` is not a tf.train.Example.
    """
    return {
        entry.key: list(entry.value.bytes_list.value) if entry.value.HasField("bytes_list") else None
        for entry in _example_class().FromString(data).features.feature
    }

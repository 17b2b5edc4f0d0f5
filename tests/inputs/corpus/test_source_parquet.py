"""Parquet files with texts of every Arrow type, and damage that only checksums of pages show."""

import os

import numpy as np
import pytest
from corpus_files import TEXTS
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Document
from spmd_trainer.inputs.corpus.parquet_files import ParquetDocuments

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def texts(source):
    return [r.content.decode() for c in range(source.num_chunks) for r in source.read_chunk(c, 0)]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
)
def test_texts_of_every_type(tmp_path, kind):
    values = [text.encode() for text in TEXTS] if kind == pyarrow.binary() else TEXTS
    column = (
        pyarrow.array(values).dictionary_encode() if pyarrow.types.is_dictionary(kind) else pyarrow.array(values, kind)
    )
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=3)
    source = ParquetDocuments([path])
    assert source.chunk_sizes().tolist() == [3, 3, 2]
    assert texts(source) == TEXTS


def test_a_row_group_of_many_rows_is_read_from_its_middle(tmp_path):
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": [str(n) for n in range(1000)]}), path)
    records = list(ParquetDocuments([path]).read_chunk(0, 700))
    assert [record.content for record in records] == [b"%d" % n for n in range(700, 1000)]
    assert records[0].where == f"{path} row group 1, row 701"
    assert next(ParquetDocuments([path]).read_chunk(0, 256)) == Document(b"256", f"{path} row group 1, row 257")


def test_an_empty_file_among_others(tmp_path):
    paths = [str(tmp_path / f"{name}.parquet") for name in "abc"]
    for path, part in zip(paths, (TEXTS[:3], [], TEXTS[3:]), strict=True):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(part, pyarrow.string())}), path)
    assert texts(ParquetDocuments(paths)) == TEXTS


def test_a_byte_that_changed_within_a_text_is_found_by_the_checksum_of_its_page(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": TEXTS})
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"zwei")] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.parquet row group 1, row 1 can't be read.*(crc|CRC|checksum)"):
        texts(ParquetDocuments([str(path)]))


def test_numbers_are_refused_by_row(tmp_path):
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": np.arange(3)}), path)
    problems = [record.problem for record in ParquetDocuments([path]).read_chunk(0, 0)]
    assert all("not a string" in problem for problem in problems)
    assert len(problems) == 3


def test_a_file_that_changes_is_an_error(tmp_path):
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    source = ParquetDocuments([path])
    size = os.path.getsize(path)
    parquet.write_table(pyarrow.table({"text": ["other", "texts"]}), path)
    with raises_naming(UserError, path, f"{size} bytes", "has changed"):
        texts(source)

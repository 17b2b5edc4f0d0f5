"""Arrow files: several record batches, nested columns, compressed files with bounded memory, reordered data sets."""

import json

import numpy as np
import pytest
from corpus_files import TEXTS, write_arrow, write_arrow_file
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.arrow_documents import ArrowDocuments, files_of_folder
from spmd_trainer.inputs.corpus.documents import BadRecord

pyarrow = pytest.importorskip("pyarrow")


def texts(records):
    return [record.content.decode() for record in records]


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_several_files_by_number(tmp_path, stream):
    paths = [
        str(write_arrow_file(tmp_path, part, name, stream=stream))
        for name, part in (("a", TEXTS[:4]), ("b", TEXTS[4:]))
    ]
    source = ArrowDocuments(paths)
    assert source.chunk_sizes().tolist() == [3, 1, 3, 1]
    numbers = np.array([7, 0, 3, 4, 4, 6])
    records = source.read(numbers)
    assert texts(records) == [TEXTS[number] for number in numbers]
    assert records[0].where == f"{paths[1]} record batch 2, row 1"
    assert texts(source.read_chunk(2, 1)) == TEXTS[5:7]


def test_a_column_inside_of_an_object_and_nulls(tmp_path):
    path = str(tmp_path / "a.arrow")
    table = pyarrow.table({"doc": [{"body": "x", "n": 1}, {"body": None, "n": 2}]})
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    good, bad = ArrowDocuments([path], "doc.body").read(np.array([0, 1]))
    assert good.content == b"x"
    assert isinstance(bad, BadRecord)
    assert bad.where == f"{path} record batch 1, row 2"


def test_a_compressed_file_is_held_one_record_batch_at_a_time(tmp_path):
    path = str(tmp_path / "a.feather")
    table = pyarrow.table({"text": ["x" * 1000 + str(n) for n in range(10_000)]})
    with pyarrow.ipc.new_file(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table, max_chunksize=500)
    before = pyarrow.total_allocated_bytes()
    source = ArrowDocuments([path])
    assert texts(source.read(np.array([9999, 3]))) == ["x" * 1000 + "9999", "x" * 1000 + "3"]
    assert sum(1 for chunk in range(source.num_chunks) for _ in source.read_chunk(chunk, 0)) == 10_000
    assert pyarrow.total_allocated_bytes() - before < 2 * 2**20  # of 10 MB


def test_a_saved_dataset_whose_rows_are_reordered_is_refused(tmp_path):
    folder = write_arrow(tmp_path, TEXTS)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with raises_naming(UserError, folder, "indices mapping", "flatten_indices()"):
        files_of_folder(str(folder))


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, stream):
    path = write_arrow_file(tmp_path, TEXTS, stream=stream)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with raises_naming(UserError, path, "can't be read", "as Arrow"):
        ArrowDocuments([str(path)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_that_is_truncated_after_opening_is_an_error(tmp_path, stream):
    path = write_arrow_file(tmp_path, ["x" * 10_000] * 9, stream=stream)
    source = ArrowDocuments([str(path)])
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(100)
    with raises_naming(UserError, path, f"{size} bytes", "has changed"):
        source.read(np.array([8]))  # would be a SIGBUS


def test_files_stay_open_in_a_global_shuffle(tmp_path, monkeypatch):
    paths = [str(write_arrow_file(tmp_path, [f"{n} {i}" for i in range(4)], f"{n:02d}")) for n in range(12)]
    opened, memory_map = [], pyarrow.memory_map
    monkeypatch.setattr(pyarrow, "memory_map", lambda path: opened.append(path) or memory_map(path))
    source = ArrowDocuments(paths)
    numbers = np.random.default_rng(0).permutation(48)
    assert texts(source.read(numbers)) == [f"{n // 4} {n % 4}" for n in numbers]
    assert opened == paths


def test_a_wrong_state_of_a_saved_dataset_is_explained(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with raises_naming(UserError, tmp_path / "state.json", "not the state.json", "saved dataset"):
        files_of_folder(str(tmp_path))

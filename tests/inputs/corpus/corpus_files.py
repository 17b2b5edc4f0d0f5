"""Corpora as files of every kind, each written by its own library."""

import gzip
import json
import os

import pytest

# Texts of several alphabets and lengths; one is empty, one has a newline and one a NUL.
TEXTS = ["one", "zwei äöü", "", "three\nlines\n", "漢字" * 20, "x" * 3000, "nul\0here", "last"]


def write_jsonl(folder, texts, suffix="", name="a", key="text"):
    content = "".join(json.dumps({key: text, "id": n}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(texts))
    path = folder / f"{name}.jsonl{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    elif suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content.encode()) // 2
        compress = zstandard.ZstdCompressor().compress  # two frames, as `cat a.zst b.zst` gives
        path.write_bytes(compress(content.encode()[:half]) + compress(content.encode()[half:]))
    else:
        path.write_text(content)
    return path


def write_parquet(folder, texts, name="a", rows=3, key="text"):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / f"{name}.parquet"
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    parquet.write_table(table, path, row_group_size=rows)
    return path


def write_arrow(folder, texts, name="saved"):
    datasets = pytest.importorskip("datasets")
    path = folder / name
    datasets.Dataset.from_dict({"text": texts, "id": list(range(len(texts)))}).save_to_disk(
        str(path), max_shard_size="2KB"
    )
    return path


def write_arrow_file(folder, texts, name="a", *, stream=False):
    pyarrow = pytest.importorskip("pyarrow")
    path = folder / f"{name}.arrow"
    table = pyarrow.table({"text": texts})
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def write_array_record(folder, texts, name="a"):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = folder / f"{name}.arrayrecord"
    writer = module.ArrayRecordWriter(str(path), "group_size:2")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    return path


def write_tfrecord(folder, texts, name="a", key="text"):
    import tensorflow as tf

    path = folder / f"{name}.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, text in enumerate(texts):
            features = {
                "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return path


def write_tar(folder, texts, name="a", suffix=""):
    webdataset = pytest.importorskip("webdataset")
    path = folder / f"{name}.tar{suffix}"
    with webdataset.TarWriter(str(path)) as writer:
        for number, text in enumerate(texts):
            writer.write({"__key__": f"s{number:03d}", "text": text.encode(), "json": {"id": number}})
    return path


def write_text(folder, texts, name="a", separator="<END>"):
    path = folder / f"{name}.txt"
    path.write_text(separator.join(texts))
    return path


WRITERS = {
    "jsonl": write_jsonl,
    "jsonl.gz": lambda folder, texts, **kwargs: write_jsonl(folder, texts, ".gz", **kwargs),
    "jsonl.zst": lambda folder, texts, **kwargs: write_jsonl(folder, texts, ".zst", **kwargs),
    "parquet": write_parquet,
    "saved dataset": write_arrow,
    "arrow file": write_arrow_file,
    "arrow stream": lambda folder, texts, **kwargs: write_arrow_file(folder, texts, stream=True, **kwargs),
    "arrayrecord": write_array_record,
    "tfrecord": write_tfrecord,
    "tar": write_tar,
    "tar.gz": lambda folder, texts, **kwargs: write_tar(folder, texts, suffix=".gz", **kwargs),
    "text": write_text,
}


def damage(content: bytes, random) -> bytes:
    """Changes some bytes of a file, or takes or adds some."""
    content, kind = bytearray(content), random.integers(4)
    place = int(random.integers(len(content)))
    if kind == 0:
        for _ in range(int(random.integers(1, 9))):
            content[int(random.integers(len(content)))] ^= int(random.integers(1, 256))
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        del content[place : place + int(random.integers(1, 50))]
    else:
        content[place:place] = random.bytes(int(random.integers(1, 50)))
    return bytes(content)


def cache_in(monkeypatch, folder):
    """Makes the cache folder of corpora a folder of the test."""
    monkeypatch.setenv("SPMD_TRAINER_CACHE", os.fspath(folder))

"""Files that aren't text: the error names the format and what reads it, and the advice works."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import drain, write_files
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import file_formats, grain_input, record_files, text, tokenizer_field, tokenizers

TEXT = b"some text, and more of it\n" * 40


def make(path, kind=text.TextInput, **kwargs):
    length = "prefix_len" if kind is text.PromptInput else "seq_len"
    return base_hyperparams.instantiate(
        pax_fiddle.Config(kind, name="corpus", files=str(path), batch_size=2, **{length: 4, **kwargs})
    )


def write_parquet(path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32()))
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "ids": rows}), path)


def write_feather(path):
    import pyarrow as pa
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.table({"text": ["a"]}), path)


def write_arrow_stream(path):
    import pyarrow as pa

    table = pa.table({"text": ["a"]})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_zstd(path):
    import pyarrow as pa

    with pa.CompressedOutputStream(path, "zstd") as stream:
        stream.write(TEXT)


def write_array_record(path):
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for n in range(3):
        writer.write(np.int32(n).tobytes())
    writer.close()


def write_tfrecord(path):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(TEXT)


def write_image(path, kind):
    from PIL import Image

    Image.new("RGB", (4, 4)).save(path, kind)


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", TEXT)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT))


def write_npy(path):
    with open(path, "wb") as file:
        np.save(file, np.arange(4))


def write_npz(path):
    with open(path, "wb") as file:
        np.savez(file, x=np.arange(4))


def write_hdf5(path):
    import h5py

    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)


def write_safetensors(path):
    # The format: the header's length, 8 bytes; the header, JSON; the tensors.
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


WRITERS = {
    "a Parquet file": (
        write_parquet,
        "CorpusInput",
        "text column",
        "GrainStreamInput",
        "grain.experimental.ParquetIterDataset",
    ),
    "an Arrow file": (write_feather, "CorpusInput", "text column"),
    "an Arrow file ": (write_arrow_stream, "CorpusInput", "text column"),
    "an ArrayRecord file": (
        write_array_record,
        "CorpusInput",
        "a text",
        "GrainInput",
        "ArrayRecordDataSource",
    ),
    "a TFRecord file": (write_tfrecord, "TfRecordInput", "CorpusInput"),
    "compressed by gzip": (lambda path: path.write_bytes(gzip.compress(TEXT)), "`gunzip`", "CorpusInput"),
    "compressed by bzip2": (lambda path: path.write_bytes(bz2.compress(TEXT)), "`bunzip2`"),
    "compressed by xz": (lambda path: path.write_bytes(lzma.compress(TEXT)), "`unxz`"),
    "compressed by Zstandard": (write_zstd, "`unzstd`", "CorpusInput"),
    "a ZIP archive": (write_zip, "`unzip`"),
    "a tar archive": (write_tar, "`tar -x`", "CorpusInput"),
    "a NumPy array": (write_npy, "ArrayInput", "numpy.load"),
    "an archive of NumPy arrays": (write_npz, "ArrayInput", "numpy.load"),
    "an HDF5 file": (write_hdf5, "ArrayInput"),
    "a PNG image": (lambda path: write_image(path, "PNG"), "ArrayInput", "images"),
    "a JPEG image": (lambda path: write_image(path, "JPEG"), "ArrayInput", "images"),
    "a GIF image": (lambda path: write_image(path, "GIF"), "ArrayInput", "images"),
    "a WebP image": (lambda path: write_image(path, "WEBP"), "ArrayInput", "images"),
    "a PDF document": (lambda path: write_image(path, "PDF"), "`pdftotext`"),
    "a safetensors file": (write_safetensors, "holds tensors"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_of_another_format_is_refused_by_name(kind, tmp_path):
    write, *instead = WRITERS[kind]
    path = tmp_path / "data.txt"  # the name is not what tells
    write(path)
    facts = ("TextInput 'corpus':", f"data.txt is {kind.strip()},", "not text", *instead, "allow_binary=True")
    with raises_naming(UserError, *facts):
        make(path)


@pytest.mark.parametrize("kind", [text.TextInput, text.PromptInput, text.PackedTextInput])
def test_every_text_input_refuses_it_and_reads_it_when_told_to(kind, tmp_path):
    write_files(tmp_path, TEXT)
    path = tmp_path / "b.txt"
    write_parquet(path)
    with raises_naming(UserError, f"{path} is", "Parquet file", "not text"):
        make(tmp_path / "*.txt", kind)
    assert drain(make(tmp_path / "*.txt", kind, allow_binary=True))


LINES = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize("kind", [text.TextInput, text.PromptInput, text.PackedTextInput])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.JSON", b"7"),
        ("a.ndjson-00000-of-00002", b"no object"),
        ("a.txt", LINES),
        ("a", b'\xef\xbb\xbf\n{ "a \\" b" : [1,\n2]}'),
        ("a.txt", b'[\n  {"text": "one"}\n]'),
        ("a.txt", b'{"text": "' + b"x" * file_formats.HEAD_BYTES + b'"}'),
    ],
)
def test_json_is_refused_where_text_is_expected(kind, name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with raises_naming(UserError, f"{path} is JSON", "not text", "CorpusInput", "column='text'", "allow_binary=True"):
        make(path, kind)
    assert drain(make(path, kind, allow_binary=True))


def test_json_is_read_as_it_is_when_told_to(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    batches = drain(make(path, text.PackedTextInput, allow_binary=True))
    assert sum(batch.weights.sum() for batch in batches) == len(LINES) + 1


@pytest.mark.parametrize(
    "content",
    [b'{"a": 1}\n', b'{% raw %}\n"a": 1\n', b"{\n  a: 1\n}\n", b"{'a': 1,\n 'b': 2}", b'"a": 1\n' * 9, b"[1]\n[2]"],
)
def test_a_text_with_braces_is_read(content, tmp_path):
    write_files(tmp_path, content)
    assert make(tmp_path / "0.txt").num_tokens == len(content) + 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"P",
        b"PAR",
        b"BZh91 is no archive",
        b"RIFF raff",
        b'{"a": 1}',
        b"\xff\xfe\x00",
        b"GIF images",
        TEXT.replace(b"more", b"ustar"),
        bytes(range(256)) * 20,
        "Größe".encode("latin1"),
        "Größe 東京\n".encode() * 500,
    ],
)
def test_text_and_nameless_bytes_are_read_by_byte(content, tmp_path):
    (path, _) = write_files(tmp_path, content, b"x")
    assert file_formats.identify(content[: file_formats.HEAD_BYTES]) is None
    assert make(tmp_path / "*.txt").num_tokens == len(content) + 3
    assert path


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF is a file format for models.\n",
        b"PAR1 and PAR2 are proteins",
        b"FEA1 gene",
        b"ARROW1 of 3",
        b"GIF87a and GIF89a\tare older\x0cthan PNG",
        b"GIF89a spec",
        b"%PDF- is how a PDF begins",
        b"%PDF-1.7 is the first line of many",
        "RIFF on WEBP: größer".encode("latin1"),
    ],
)
def test_a_sentence_that_begins_with_a_signature_is_text(content, tmp_path):
    write_files(tmp_path, content)
    assert make(tmp_path / "0.txt").num_tokens == len(content) + 1
    # Behind the same letters, bytes that text doesn't have show the format.
    if not content.startswith((b"%PDF", b"RIFF")):
        assert file_formats.identify(content[:6] + bytes(8)) is not None


def test_a_pdf_without_binary_data_in_its_first_block_is_refused(tmp_path):
    write_files(tmp_path, b"%PDF-1.4\r\n% all of it is ASCII\n")
    with raises_naming(UserError, f"{tmp_path}/0.txt is", "PDF document", "not text"):
        make(tmp_path / "0.txt")


class Utf8Reader(tokenizers.SentencePieceTokenizer):
    """Reads UTF-8, without a model."""

    eos_id = 0
    vocab_size = 0x110000
    bytes_per_token = 4

    def encode(self, text, path, *, cut=False):
        return np.array([ord(c) for c in tokenizers.decode_utf8(text, path, cut=cut)], np.int32)


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"a\0b", ["not text", "byte 1", "NUL", "by byte", "allow_binary=True"]),
        ("text\n".encode("utf-16"), ["UTF-16", "UTF-8", "`iconv"]),
        (b"one\ntwo\xe9", ["not UTF-8", "byte 7", "line 2", "0xe9"]),
        (b"one\ntw\xe9o", ["not UTF-8", "byte 6", "line 2", "0xe9"]),
    ],
)
def test_bytes_that_a_tokenizer_cannot_read_are_refused_at_construction(content, facts, tmp_path):
    write_files(tmp_path, content)
    with raises_naming(UserError, "0.txt is", *facts):
        make(tmp_path / "0.txt", tokenizer=Utf8Reader())
    assert isinstance(Utf8Reader(), tokenizer_field.UTF8_TOKENIZERS)
    make(tmp_path / "0.txt")  # by byte


def test_a_character_on_the_edge_of_the_first_block_is_whole(tmp_path):
    write_files(tmp_path, b"x" * (file_formats.HEAD_BYTES - 1) + "é".encode())
    assert make(tmp_path / "0.txt", tokenizer=Utf8Reader()).num_tokens == file_formats.HEAD_BYTES + 1


def test_text_with_nul_is_read_when_told_to(tmp_path):
    write_files(tmp_path, b"a\0b")
    assert make(tmp_path / "0.txt", tokenizer=Utf8Reader(), allow_binary=True).num_tokens == 4


def test_record_files_name_another_format(tmp_path):
    write_parquet(tmp_path / "x.tfrecord")
    with raises_naming(UserError, "x.tfrecord", "Parquet file", "not TFRecord", "CorpusInput", "text column"):
        record_files.RecordFiles(str(tmp_path / "*.tfrecord"))
    write_array_record(tmp_path / "y.tfrecord")
    with raises_naming(UserError, "y.tfrecord", "ArrayRecord file", "not TFRecord"):
        record_files.RecordFiles(str(tmp_path / "y.tfrecord"))


def test_what_is_advised_for_parquet_reads_it(tmp_path):
    import grain

    path = str(tmp_path / "x.parquet")
    write_parquet(path)

    def dataset(index, count):
        assert (index, count) == (0, 1)
        return grain.experimental.ParquetIterDataset(path).map(lambda row: {"ids": np.asarray(row["ids"], np.int32)})

    (batch,) = drain(
        base_hyperparams.instantiate(pax_fiddle.Config(grain_input.GrainStreamInput, dataset=dataset, batch_size=2))
    )
    np.testing.assert_array_equal(batch.ids, [[1, 2, 3], [4, 5, 6]])


def test_what_is_advised_for_array_record_reads_it(tmp_path):
    import grain

    write_array_record(tmp_path / "x.arrayrecord")

    def dataset():
        source = grain.sources.ArrayRecordDataSource([str(tmp_path / "x.arrayrecord")])
        return grain.MapDataset.source(source).map(lambda record: {"n": np.frombuffer(record, np.int32)[0]})

    config = pax_fiddle.Config(grain_input.GrainInput, dataset=dataset, batch_size=3)
    (batch,) = drain(base_hyperparams.instantiate(config))
    np.testing.assert_array_equal(batch.n, [0, 1, 2])

"""Recognizes common file formats by a file's first bytes, and has advice on how to use files of each format."""

from __future__ import annotations

import dataclasses
import re

# Number of bytes of a file that `identify` needs.
HEAD_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A file format.

    Attributes:
      name: name of the format with an article, e.g. 'a Parquet file'.
      instead: advice on how to use such a file, for error messages; a sentence without its final period.
      kind: the name of this format in `corpus.file_kinds.KINDS`, or None if it is not among them.
    """

    name: str
    instead: str
    kind: str | None = None


_TO_TEXT = "Write its text into text files"
_JSON_LINES = "CorpusInput reads compressed JSON lines and tar shards as they are"
_IMAGES = "ArrayInput takes images as arrays, and TfRecordInput takes them encoded"
TFRECORD = FileFormat("a TFRecord file", "TfRecordInput reads it, and CorpusInput if a feature of it is a text")
JSON = FileFormat(
    "JSON", "CorpusInput reads the text under a key of each line, e.g. source=Documents(path, column='text')"
)
_NPY = FileFormat(
    "a NumPy array", "ArrayInput takes what numpy.load gives, e.g. arrays=lambda: {'x': numpy.load(path)}"
)
_NPZ = FileFormat(
    "an archive of NumPy arrays", "ArrayInput takes what numpy.load gives, e.g. arrays=lambda: dict(numpy.load(path))"
)
_PYTORCH = FileFormat("a PyTorch file", "It holds tensors, not text")
_ZIP = FileFormat("a ZIP archive", "Unpack it with `unzip`")
_ARROW = FileFormat(
    "an Arrow file", "CorpusInput reads a text column of it, e.g. source=Documents(path, column='text')", "arrow"
)
_SAFETENSORS = FileFormat("a safetensors file", "It holds tensors, not text")

_BY_FIRST_BYTES: dict[bytes, FileFormat] = {
    b"PAR1": FileFormat(
        "a Parquet file",
        "CorpusInput reads a text column of it, e.g. source=Documents(path, column='text'). For other columns, GrainStreamInput "
        "reads it through grain.experimental.ParquetIterDataset, where a map makes arrays of one shape of each row",
        "parquet",
    ),
    b"ARROW1": _ARROW,
    b"FEA1": _ARROW,
    # An ArrayRecord file is a Riegeli file with an index: both begin with this signature.
    bytes.fromhex("83af70d10d884a3f"): FileFormat(
        "an ArrayRecord file",
        "CorpusInput reads it if each record is a text: source=Documents(path). For other records, GrainInput reads it through "
        "grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)), where a map makes arrays of one shape of each "
        "record",
        "arrayrecord",
    ),
    b"\x1f\x8b\x08": FileFormat("compressed by gzip", f"Unpack it with `gunzip`. {_JSON_LINES}"),
    b"\x28\xb5\x2f\xfd": FileFormat("compressed by Zstandard", f"Unpack it with `unzstd`. {_JSON_LINES}"),
    b"\xfd7zXZ\0": FileFormat("compressed by xz", "Unpack it with `unxz`"),
    b"\x04\x22\x4d\x18": FileFormat("compressed by LZ4", "Unpack it with `unlz4`"),
    b"7z\xbc\xaf\x27\x1c": FileFormat("a 7z archive", "Unpack it with `7z x`"),
    b"\x89HDF\r\n\x1a\n": FileFormat("an HDF5 file", "ArrayInput takes the arrays that h5py reads from it"),
    b"SQLite format 3\0": FileFormat("an SQLite database", _TO_TEXT),
    b"Obj\x01": FileFormat("an Avro file", f"No input here reads it. {_TO_TEXT}"),
    b"\x89PNG\r\n\x1a\n": FileFormat("a PNG image", _IMAGES),
    b"\xff\xd8\xff": FileFormat("a JPEG image", _IMAGES),
    b"GIF87a": FileFormat("a GIF image", _IMAGES),
    b"GIF89a": FileFormat("a GIF image", _IMAGES),
    b"\x93NUMPY": _NPY,
    b"GGUF": FileFormat("a GGUF file", "It holds tensors, not text"),
}
# Control characters that do not occur in text. Text may have BEL, BS, HT, LF, VT, FF, CR, ESC, and DOS's end-of-file mark.
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x19\x1c-\x1f\x7f]")
# The beginning of a JSON object, or of a list of objects, up to the first key.
_JSON_BEGINNING = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*)?\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
_PDF_VERSION = re.compile(rb"%PDF-\d\.\d[ \t]*[\r\n]")
_PDF = FileFormat("a PDF document", f"{_TO_TEXT}, e.g. with `pdftotext`")
_BZIP2 = FileFormat("compressed by bzip2", "Unpack it with `bunzip2`")
_TAR = FileFormat(
    "a tar archive", "Unpack it with `tar -x`. CorpusInput reads shards in webdataset's layout as they are", "tar"
)
_WEBP = FileFormat("a WebP image", _IMAGES)
_WAVE = FileFormat("a WAVE sound", "ArrayInput takes sounds as arrays")


def identify(head: bytes) -> FileFormat | None:
    """Returns the format of a file that isn't text; None for text and for unknown formats.

    A text may begin with the letters of a signature ('GGUF is a file format'), so a signature that consists of letters counts
    only if `head` also has a control character. TFRecord files have no signature: see `record_files.begins_with_record`.

    Args:
      head: the file's first `HEAD_BYTES` bytes, or the whole file if it is shorter.
    """
    has_control = _CONTROL.search(head) is not None
    for first, kind in _BY_FIRST_BYTES.items():
        if head.startswith(first) and (has_control or not (first.isascii() and first.decode().isprintable())):
            return kind
    if _PDF_VERSION.match(head):
        return _PDF
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return _BZIP2
    if head.startswith(b"PK\x03\x04"):
        return _zip(head)
    if head.startswith(b"RIFF") and has_control:
        return {b"WEBP": _WEBP, b"WAVE": _WAVE}.get(head[8:12])
    if head[257:262] == b"ustar" and b"\0" in head[:257]:
        return _TAR
    if head.startswith(b"\xff\xff\xff\xff") and _little_endian(head[4:8]) % 8 == 0 and head[8:12] == b"\x10\0\0\0":
        return _ARROW  # a stream of Arrow messages, as Hugging Face datasets stores them
    if head[8:10] == b'{"' and 2 <= _little_endian(head[:8]) < 2**27:
        return _SAFETENSORS  # the first 8 bytes are the length of the JSON after them
    return None


def begins_as_json(head: bytes) -> bool:
    """Returns True if a file begins with a JSON object or a list of objects, and is longer than one short line.

    A file with a single line of fewer than `HEAD_BYTES` bytes counts as text, e.g. a note or a prompt.

    Args:
      head: the file's first `HEAD_BYTES` bytes, or the whole file if it is shorter.
    """
    return _JSON_BEGINNING.match(head) is not None and (len(head) >= HEAD_BYTES or b"\n" in head.strip())


def _zip(head: bytes) -> FileFormat:
    """Returns the format of a ZIP-based file, found by the name of the first file in the archive."""
    name = head[30 : 30 + _little_endian(head[26:28])]
    if name.endswith(b".npy"):
        return _NPZ
    return _PYTORCH if name.endswith(b"/data.pkl") else _ZIP


def _little_endian(number: bytes) -> int:
    return int.from_bytes(number, "little")

"""The manifest of a step (checkpoint) lists its files with sizes and checksums, and so shows whether it is damaged.

Process 0 writes the manifest into the step's directory in the background, after every process has written its arrays and
before Orbax commits the step (by renaming the directory, or by a commit file on object stores). So an undamaged step always
has its manifest: a visible step without one was not committed by this trainer, or was damaged later. The files are flushed to
disk before the commit, so that a committed step survives a power failure.

The checks:

| check | done by | reads | finds |
|---|---|---|---|
| `quick_problem` | every listing of steps | names and sizes | deleted, truncated and grown files, half-deleted steps |
| `contents_problem` | every restore | contents | also zeroed, swapped and overwritten files, single bits |

A checksum is a CRC32C (10 GB/s on one core with the processor's instruction for it). In a step of up to `WHOLE_STEP` bytes, every
byte is checked. In a larger step, files over `WHOLE_FILE` bytes are sampled: `SAMPLES` blocks of `SAMPLE_BYTES` each, spread
evenly, with the first and the last byte of the file among them. So the cost stays constant for the largest checkpoints, which
process 0 reads back over a network. Among sampled files, zeroed and swapped ones are still found; damage between two samples is
found only if the array cannot be decoded. At a restore, each process checks a share of the step's files.

On an object store, names and sizes come from one listing of the step. Beside the manifest there is an object `sizes-DIGEST`,
whose name has a digest of all names and sizes, so that the listing alone shows whether a step is undamaged. If the digest does
not match, the manifest is read.

Only missing files and wrong contents are treated as damage. A read that fails is retried, and finally raises CheckpointReadError.

Format 1 had a different checksum, which missed two opposite bit flips: the CRC-32 of the sums of the 64-bit words of each 4 KiB
page. Its manifests can still be read.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypedDict, cast

import google_crc32c
import numpy as np
import numpy.typing as npt
from etils import epath

from spmd_trainer.checkpointing import step_files
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.storage import is_remote, json_values, reading
from spmd_trainer.storage.files import sizes_below

MANIFEST = "manifest.json"
FORMAT = 2
WHOLE_STEP = 32 * 2**30
WHOLE_FILE = 256 * 2**20
SAMPLES = 64
SAMPLE_BYTES = 2**20
_PAGE_BYTES = 4096
_CHUNK_BYTES = 2**20
# Each chunk of an object takes one request.
_REMOTE_CHUNK_BYTES = 8 * 2**20
_MAX_THREADS = 8
# No trainer takes more samples: a manifest with a larger number is damaged.
_MAX_SAMPLES = 2**16
# The maximum length of a file name on all supported file systems: a manifest with a longer name is damaged.
_MAX_NAME_BYTES = 255
# Orbax writes this file and `_CHECKPOINT_METADATA` at the commit, after the manifest, and no restore reads them.
COMMIT_FILE = "commit_success.txt"
_NOT_LISTED = frozenset({MANIFEST, "_CHECKPOINT_METADATA", COMMIT_FILE})
_NOT_DIGESTED = _NOT_LISTED - {MANIFEST}
_SIZES_PREFIX = "sizes-"


# The problem with the remains of a killed save on an object store. It is not damage: the next save deletes the remains.
UNFINISHED = "its save was not finished"


class Manifest(TypedDict):
    """The content of a manifest, which lists the files of a checkpoint.

    Attributes:
      format: `FORMAT` of the trainer that wrote it.
      step: the step of the checkpoint.
      whole_up_to: files of up to this many bytes have a checksum of all bytes; larger ones are sampled.
      samples: the number of blocks of a sampled file.
      sample_bytes: the size of a block in bytes.
      files: {path below the step's directory, with slashes: [size in bytes, checksum]}.
    """

    format: int
    step: int
    whole_up_to: int
    samples: int
    sample_bytes: int
    files: dict[str, list[int]]


def write(step_dir: epath.Path, step: int) -> None:
    """Writes the manifest (sizes and checksums) of the files below `step_dir`, and flushes all of them to disk.

    Raises:
      OSError: a file cannot be read back or flushed.
    """
    sizes = {name: size for name, size in sizes_below(step_dir).items() if name not in _NOT_LISTED}
    total = sum(sizes.values())
    whole_up_to = total if total <= WHOLE_STEP else WHOLE_FILE

    def entry(name: str) -> list[int]:
        checksum = _checksum(step_dir / name, sizes[name], whole_up_to, SAMPLES, SAMPLE_BYTES, _crc32c)
        _flush_to_disk(step_dir / name)
        return [sizes[name], checksum]

    with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        entries = dict(zip(sizes, pool.map(entry, sizes), strict=True))
    manifest: Manifest = {
        "format": FORMAT,
        "step": step,
        "whole_up_to": whole_up_to,
        "samples": SAMPLES,
        "sample_bytes": SAMPLE_BYTES,
        "files": entries,
    }
    path, text = step_dir / MANIFEST, json.dumps(manifest)
    path.write_text(text)
    _flush_to_disk(path)
    for directory in {(step_dir / name).parent for name in sizes} | {step_dir}:
        _flush_to_disk(directory)
    if is_remote(step_dir):
        digest = _digest({**sizes, MANIFEST: len(text.encode())})
        (step_dir / digest).write_text(f"The name is a digest of the names and sizes in {MANIFEST}.")


def has_digest_of(sizes: Mapping[str, int]) -> bool:
    """Returns True if a listing alone shows that a checkpoint on an object store is undamaged, without reading its manifest.

    Args:
      sizes: {path below the step's directory: size in bytes} of all objects of the checkpoint.
    """
    digests = {name for name in sizes if name.startswith(_SIZES_PREFIX)}
    return _digest({name: size for name, size in sizes.items() if name not in _NOT_DIGESTED | digests}) in digests


def is_finished(sizes: Mapping[str, int]) -> bool:
    """Returns True if all objects of a checkpoint on an object store have been written, even if it is not committed yet."""
    return COMMIT_FILE in sizes or has_digest_of(sizes)


def quick_problem(step_dir: epath.Path, step: int) -> str | None:
    """Returns the problem with the names or sizes of a checkpoint's files, or None if there is none.

    Raises:
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    sizes = _remote_sizes(step_dir) if is_remote(step_dir) else None
    if sizes and has_digest_of(sizes):
        return None
    if sizes and not is_finished(sizes):
        return UNFINISHED
    manifest = _read(step_dir, step)
    return manifest if isinstance(manifest, str) else _sizes_problem(step_dir, manifest, sizes)


def read(step_dir: epath.Path, step: int) -> Manifest | str:
    """Checks the names and sizes of a checkpoint's files. Returns its manifest, or the problem as a text.

    Raises:
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    sizes = _remote_sizes(step_dir) if is_remote(step_dir) else None
    if sizes and not is_finished(sizes):
        return UNFINISHED
    manifest = _read(step_dir, step)
    return manifest if isinstance(manifest, str) else _sizes_problem(step_dir, manifest, sizes) or manifest


def contents_problem(step_dir: epath.Path, manifest: Manifest, share: int = 0, shares: int = 1) -> str | None:
    """Returns the first problem with the contents of a checkpoint's files, or None if there is none.

    Args:
      step_dir: the checkpoint's directory.
      manifest: its manifest, as `read` returns it.
      share: the index of the share of the files to read, e.g. the process index.
      shares: the number of shares that the files are divided into.

    Raises:
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    settings = (manifest["whole_up_to"], manifest["samples"], manifest["sample_bytes"])
    extend = _crc32c if manifest["format"] == FORMAT else _page_sums_crc

    def check(item: tuple[str, list[int]]) -> str | None:
        name, (size, checksum) = item
        try:
            same = checksum == step_files.read_file(
                step_dir, name, lambda path: _checksum(path, size, *settings, extend)
            )
        except step_files.MissingFileError as error:
            return str(error)
        return None if same else f"{name} does not hold what was written (its checksum differs)"

    mine = sorted(manifest["files"].items())[share::shares]
    with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        return next((found for found in pool.map(check, mine) if found), None)


def num_bytes(step_dir: epath.Path, step: int) -> int:
    """Returns the total size of a checkpoint's files in bytes, by its manifest; 0 if the manifest is damaged.

    Raises:
      CheckpointNotFoundError: there is no such step, or it has been deleted.
    """
    manifest = _read(step_dir, step)
    return 0 if isinstance(manifest, str) else sum(size for size, _ in manifest["files"].values())


def _remote_sizes(step_dir: epath.Path) -> dict[str, int]:
    """Returns {path below the step's directory: size} of a checkpoint on an object store; empty if there is no such step."""
    return step_files.read(f"listing {step_dir}", lambda: sizes_below(step_dir))


def _sizes_problem(step_dir: epath.Path, manifest: Manifest, listed: Mapping[str, int] | None) -> str | None:
    """Compares the sizes of files with a manifest. Returns the first problem; None if there is none.

    Args:
      step_dir: the step's directory.
      manifest: its manifest.
      listed: {path: size in bytes} from a listing of the whole step; if None, the size of each file is requested separately.
    """
    for name, (size, _) in manifest["files"].items():
        # If the listed size is wrong, the size of the file is requested: some stores list new objects with a delay.
        if listed is not None and listed.get(name) == size:
            continue
        try:
            found = step_files.read_file(step_dir, name, lambda path: path.stat().length)
        except step_files.MissingFileError as error:
            return str(error)
        if found != size:
            return f"{name} has {found} bytes, not the {size} that were written"
    return None


def _read(step_dir: epath.Path, step: int) -> Manifest | str:
    """Returns the manifest, or the problem with it as a text."""
    try:
        text = step_files.read_file(step_dir, MANIFEST, json_values.content_of)
    except step_files.MissingFileError as error:
        return f"{error}: the save was interrupted, files were deleted, or another program wrote the step"
    try:
        manifest = cast(Manifest, json_values.parse_object(text))
        # Checks all fields, so that no later use of this manifest can fail.
        _check_types(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{MANIFEST} is malformed ({type(e).__name__}: {e})"
    if manifest["step"] != step:
        return f"{MANIFEST} belongs to step {manifest['step']}"
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError if a field of the manifest is missing or invalid."""
    version, whole_up_to, samples, sample_bytes = (
        manifest["format"],
        manifest["whole_up_to"],
        manifest["samples"],
        manifest["sample_bytes"],
    )
    for field in ("format", "step", "whole_up_to", "samples", "sample_bytes"):
        json_values.integer(manifest[field], field)
    if version not in (1, FORMAT):
        raise ValueError(f"it has format {version}; this trainer reads formats 1 to {FORMAT}")
    if not 2 <= samples <= _MAX_SAMPLES:
        raise ValueError(f"{samples} samples of a file")
    for name, (size, checksum) in manifest["files"].items():
        json_values.integer(size, "a file's size")
        json_values.integer(checksum, "a file's checksum")
        if whole_up_to < size < sample_bytes:
            raise ValueError(f"samples of {sample_bytes} bytes of a file of {size}")
        parts = name.split("/")
        if "\0" in name or {"", ".", ".."} & set(parts) or max(len(os.fsencode(p)) for p in parts) > _MAX_NAME_BYTES:
            raise ValueError(f"{name[:100]!r} is not the name of a file below the step")


def _digest(sizes: Mapping[str, int]) -> str:
    """Returns the name `sizes-DIGEST`, which contains a digest of these names and sizes."""
    text = json.dumps(sorted(sizes.items()))
    return f"{_SIZES_PREFIX}{short_hash(text, 32)}"


def _checksum(
    path: epath.Path, size: int, whole_up_to: int, samples: int, sample_bytes: int, extend: Callable[[int, bytes], int]
) -> int:
    """Returns the checksum of a file or, above `whole_up_to` bytes, of evenly spread blocks. `extend(crc, bytes)` adds bytes."""
    blocks = [(0, size)]
    if size > whole_up_to:
        last = size - sample_bytes
        blocks = [(last * i // (samples - 1), sample_bytes) for i in range(samples)]
    crc = 0
    for chunk in (_remote_chunks if is_remote(path) else _local_chunks)(path, blocks):
        crc = extend(crc, chunk)
    return crc


def _local_chunks(path: epath.Path, blocks: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yields the bytes of blocks (start, length) of a file, in pieces."""
    with path.open("rb") as f:
        for start, length in blocks:
            f.seek(start)
            while length > 0:
                chunk = f.read(min(length, _CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{path} ends before byte {start + length}")
                yield chunk
                length -= len(chunk)


def _remote_chunks(path: epath.Path, blocks: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yields the bytes of blocks (start, length) of an object, one chunk per request. Never requests the object's size."""
    for start, length in blocks:
        end = start + length
        while start < end:
            chunk = reading.read(os.fspath(path), start, min(end, start + _REMOTE_CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{path} ends before byte {end}")
            yield chunk
            start += len(chunk)


def _crc32c(crc: int, chunk: bytes) -> int:
    extended: int = google_crc32c.extend(crc, chunk)
    return extended


def _page_sums_crc(crc: int, chunk: bytes) -> int:
    """Extends a checksum of format 1 by a chunk: the CRC-32 of the sums, modulo 2**64, of the 64-bit words of each page."""
    missing = -len(chunk) % _PAGE_BYTES
    words: npt.NDArray[np.uint64] = np.frombuffer(chunk + bytes(missing) if missing else chunk, "<u8")
    sums: npt.NDArray[np.uint64] = words.reshape(-1, _PAGE_BYTES // 8).sum(axis=1, dtype="<u8")
    return zlib.crc32(sums.tobytes(), crc)


def _flush_to_disk(path: epath.Path) -> None:
    """Flushes a local file or directory (fsync). Object stores are durable once written."""
    if is_remote(path):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)

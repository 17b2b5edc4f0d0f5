"""Parses paths that users give: local paths, file://, gs:// and s3://. Paths of input files may also begin with hf://."""

from __future__ import annotations

import os
import re
import urllib.parse

from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import nearest_names, shortened
from spmd_trainer.storage import backends

_SCHEMES = ("gs", "s3", "file")
# The Hugging Face Hub. Input files may be there; nothing is written to it.
_HUB = "hf"
# Common misspellings and aliases of schemes.
_OTHER_NAMES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
# Paths in repositories of data sets, spaces and models: [datasets/]ORG/NAME[@REVISION][/FILE].
_REPOSITORY = re.compile(r"((datasets|spaces)/)?(?!(datasets|spaces|buckets)/)[^/@]+/[^/@]+(@[^/]+)?(/.*)?", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# gcsfs and s3fs treat these as patterns when they list and delete: 'run*' would match other runs too.
_WILDCARDS = frozenset("*?[]")
_SHOWN_CHARACTERS = 80
# Bytes reserved for paths below a directory, e.g. /checkpoints/1000000/state/ocdbt.process_0/d/<32 digits>.
_ADDED_BYTES = 160
_MAX_NAME_BYTES = 255  # of each part of a local path
_MAX_LOCAL_BYTES = 4096
_MAX_OBJECT_BYTES = 1024


def directory(name: str, text: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a user's directory, without touching disk or network.

    Args:
      name: the flag or argument that gave the path, for messages, e.g. '--job_log_dir'.
      text: a local path (~ is the user's home), file:///DIR, gs://BUCKET/DIR or s3://BUCKET/DIR.

    Raises:
      UserError: the scheme is unknown, the bucket name is invalid, the path has control characters or is too long, or a package
        that it needs is not installed.
    """
    path = _parse(name, text)
    scheme = backends.scheme_of(path)
    if scheme == _HUB:
        raise UserError(
            f"{name}={_shown(text)}: hf:// is for the files of inputs; download a folder with `hf download`, and give its path"
        )
    if scheme is not None and (wild := _WILDCARDS & set(os.fspath(path))):
        raise UserError(
            f"{name}={_shown(text)}: {' '.join(sorted(wild))} can't be in the name of a directory in an object store; give "
            "another name"
        )
    longest = _MAX_LOCAL_BYTES if scheme is None else _MAX_OBJECT_BYTES
    size = len(os.fsencode(os.fspath(path)))
    if size > longest - _ADDED_BYTES:
        raise UserError(
            f"{name}={_shown(text)} has {size} bytes; a path may have {longest}, and the trainer writes below this one: give "
            f"one of at most {longest - _ADDED_BYTES}"
        )
    return path


def file_or_pattern(name: str, text: str | os.PathLike[str]) -> str:
    """Returns a user's path or glob pattern of input files. A URL gets a normalized scheme; a local path stays as it is.

    Arguments and errors are those of `directory`, but patterns and hf://datasets/ORG/NAME/FILE are allowed.
    """
    given = os.fspath(text)
    match = _SCHEME.fullmatch(given)
    if match is None or not _is_url(match):
        return given
    return os.fspath(_parse(name, given))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns True for a path in an object store or on the Hugging Face Hub."""
    return backends.scheme_of(path) is not None


def _parse(name: str, text: str | os.PathLike[str]) -> epath.Path:
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{name}={text!r} is no path; give a text or a pathlib.Path")
    given = os.fspath(text)
    control = next((c for c in given if ord(c) < 32 or ord(c) == 127), None)
    if control is not None:
        raise UserError(f"{name}={_shown(given)} has the control character {control!r}; leave it out")
    match = _SCHEME.fullmatch(given)
    if match is None or not _is_url(match):
        return _local(name, given)
    scheme, slashes, rest = match[1], match[2], match[3]
    known = _OTHER_NAMES.get(scheme.lower(), scheme.lower())
    if known not in (*_SCHEMES, _HUB):
        raise UserError(_unknown_scheme(name, given, scheme, rest))
    if known == "file":
        return _local_url(name, given)
    if slashes != "//":
        raise UserError(f"{name}={_shown(given)}: did you mean {known}://{rest}?")
    return _remote(name, given, known, rest)


def _is_url(match: re.Match[str]) -> bool:
    """Returns True if a match of `_SCHEME` is a URL; False if it is a local name with a colon, e.g. 'run:1'.

    It is a URL if '://' follows the scheme. After a known scheme, missing slashes are taken for a typing error.
    """
    known = match[1].lower() in (*_SCHEMES, *_OTHER_NAMES, _HUB)
    return match[2].startswith("//") or (known and len(match[1]) > 1)


def _remote(name: str, given: str, scheme: str, rest: str) -> epath.Path:
    bucket, _, key = rest.partition("/")
    if scheme == _HUB and not _REPOSITORY.fullmatch(rest):
        raise UserError(f"{name}={_shown(given)} names no repository of the Hub; give hf://datasets/ORG/NAME/FILE")
    if not bucket:
        raise UserError(f"{name}={_shown(given)} names no bucket; give {scheme}://BUCKET/DIR")
    if scheme != _HUB and not _BUCKET.fullmatch(bucket):
        near = bucket.lower().replace("_", "-") if scheme == "s3" else bucket.lower()
        hint = f"; did you mean {scheme}://{near}/{key}?" if near != bucket and _BUCKET.fullmatch(near) else ""
        raise UserError(
            f"{name}={_shown(given)}: {bucket!r} is no name of a bucket, which has 3 or more of a-z, 0-9, '-', '_' and "
            f"'.'{hint}"
        )
    if {".", ".."} & set(key.split("/")):
        raise UserError(f"{name}={_shown(given)}: object stores have no '.' and '..'; give the whole path")
    backends.prepare(scheme)
    return epath.Path(f"{scheme}://{bucket}/{key.strip('/')}".rstrip("/"))


def _local_url(name: str, given: str) -> epath.Path:
    parsed = urllib.parse.urlsplit(given)
    if parsed.netloc not in ("", "localhost") or not parsed.path.startswith("/"):
        raise UserError(
            f"{name}={_shown(given)}: file:// takes an absolute path; did you mean file:///{given.partition(':')[2].strip('/')}?"
        )
    # Not parsed.path, which ends at a '?' or '#': here these are characters of the path.
    return _local(name, urllib.parse.unquote(given.split("://", 1)[1].removeprefix("localhost")))


def _local(name: str, text: str) -> epath.Path:
    path = epath.Path(os.path.abspath(os.path.expanduser(text)))
    if backends.scheme_of(path) is not None:
        # epath keeps gs://data as /gs/data.
        raise UserError(
            f"{name}={_shown(text)} can't be told from {path}; give a local directory that is not below /gs, /s3 or /hf"
        )
    long = next((part for part in path.parts if len(os.fsencode(part)) > _MAX_NAME_BYTES), None)
    if long is not None:
        raise UserError(
            f"{name}={_shown(text)}: {_shown(long)} has {len(os.fsencode(long))} bytes, and a file system takes names of at "
            f"most {_MAX_NAME_BYTES}"
        )
    return path


def _unknown_scheme(name: str, given: str, scheme: str, rest: str) -> str:
    host, _, key = rest.partition("/")
    if scheme.lower() in ("http", "https") and host == "storage.googleapis.com":
        return f"{name}={_shown(given)} is a web address; did you mean gs://{key}?"
    # Most schemes have only two or three letters, so few letters can agree.
    near = nearest_names(scheme.lower(), [*_SCHEMES, *_OTHER_NAMES], count=1, cutoff=0.5)
    if near:
        hint = f"did you mean {_OTHER_NAMES.get(near[0], near[0])}://{_shown(rest)}?"
    else:
        hint = "give a local path, file:///DIR, gs://BUCKET/DIR or s3://BUCKET/DIR"
    return f"{name}={_shown(given)}: {scheme}:// is no storage that the trainer knows; {hint}"


def _shown(text: str | os.PathLike[str]) -> str:
    """Formats a path for messages: on one line, truncated."""
    shown = os.fspath(text)
    if not shown.isprintable():
        shown = repr(shown)[1:-1]
    return shortened(shown, _SHOWN_CHARACTERS)

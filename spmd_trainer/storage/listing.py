"""Lists the objects of a bucket with one request per page of up to 1,000, through gcsfs or s3fs.

These libraries' own listings cost more: gcsfs sends three requests for an object, and for a missing directory both list the
neighboring names, page by page. GCS and S3 listings are consistent with all earlier writes.

Repositories of the Hugging Face Hub (hf://) are listed by huggingface_hub, which requests a directory once and caches it.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

# Maximum number of objects that GCS and S3 return at once.
PAGE = 1000
# Directories have no time of their own.
_NO_TIME = datetime.datetime.fromtimestamp(0, datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An object or a directory (a common prefix) in a listing.

    Attributes:
      name: 'bucket/key'. An object whose key ends with a slash marks an empty directory.
      size: bytes; 0 for a directory.
      modified: time of the last write; 1970 for a directory and for everything on the Hugging Face Hub.
      is_directory: True for a common prefix.
      content: hash of the content for an object on the Hub; otherwise ''.
    """

    name: str
    size: int = 0
    modified: datetime.datetime = _NO_TIME
    is_directory: bool = False
    content: str = ""


def entries(fs: Any, scheme: str, path: str, *, recursive: bool) -> list[Entry]:
    """Lists a directory of an object store.

    Args:
      fs: the synchronous file system of gcsfs, s3fs or huggingface_hub.
      scheme: 'gs', 's3' or 'hf'.
      path: 'bucket/key', or 'bucket' alone; on the Hugging Face Hub 'datasets/ORG/NAME/key'.
      recursive: True lists all objects at any depth, without directories; False lists one level, with directories.
    """
    if scheme == "hf":
        return [_of_hub(info) for info in (fs.find(path, detail=True).values() if recursive else fs.ls(path))]
    bucket, _, key = path.partition("/")
    prefix = f"{key}/" if key else ""
    return [entry for page, _ in _pages(fs, scheme, bucket, prefix, recursive=recursive) for entry in page]


def look_up(fs: Any, scheme: str, path: str) -> Entry | None:
    """Returns the object at `path`, or the directory if there is no such object; None if there is neither.

    Takes one request, or two if many names begin with `path`. Arguments are those of `entries`. On the Hugging Face Hub, raises
    FileNotFoundError instead of returning None.
    """
    if scheme == "hf":
        return _of_hub(fs.info(path))
    bucket, _, key = path.partition("/")
    page, token = _first_filled(_pages(fs, scheme, bucket, key, recursive=False))
    found = sorted((entry for entry in page if entry.name == path), key=lambda entry: entry.is_directory)
    if found or token is None:
        return found[0] if found else None
    # An object would have come first. The slash sorts behind other characters, so the directory may be on any page.
    page, _ = _first_filled(_pages(fs, scheme, bucket, f"{key}/", recursive=True, limit=1))
    return Entry(path, is_directory=True) if page else None


def _first_filled(pages: Iterator[tuple[list[Entry], str | None]]) -> tuple[list[Entry], str | None]:
    """Returns the first page that is not empty; if all are empty, the last one."""
    for page in pages:
        if page[0]:
            break
    return page


def _pages(
    fs: Any, scheme: str, bucket: str, prefix: str, *, recursive: bool, limit: int | None = None
) -> Iterator[tuple[list[Entry], str | None]]:
    """Yields each page of a listing with the token of the next page (None for the last page). Any page may be empty."""
    ask = _gcs_page if scheme == "gs" else _s3_page
    token: str | None = None
    while True:
        page, token = ask(fs, bucket, prefix, "" if recursive else "/", limit or PAGE, token)
        yield page, token
        if token is None:
            return


def _gcs_page(
    fs: Any, bucket: str, prefix: str, delimiter: str, limit: int, token: str | None
) -> tuple[list[Entry], str | None]:
    answer = fs.call(
        "GET",
        "b/{}/o",
        bucket,
        json_out=True,
        prefix=prefix,
        delimiter=delimiter,
        maxResults=limit,
        pageToken=token,
    )
    page = [
        Entry(f"{bucket}/{item['name']}", int(item["size"]), datetime.datetime.fromisoformat(item["updated"]))
        for item in answer.get("items", ())
    ]
    page += [_directory(bucket, name) for name in answer.get("prefixes", ())]
    return page, answer.get("nextPageToken") or None


def _s3_page(
    fs: Any, bucket: str, prefix: str, delimiter: str, limit: int, token: str | None
) -> tuple[list[Entry], str | None]:
    next_page = {} if token is None else {"ContinuationToken": token}
    answer = fs.call_s3(
        "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, MaxKeys=limit, **next_page
    )
    page = [
        Entry(f"{bucket}/{item['Key']}", int(item["Size"]), item["LastModified"]) for item in answer.get("Contents", ())
    ]
    page += [_directory(bucket, item["Prefix"]) for item in answer.get("CommonPrefixes", ())]
    return page, answer["NextContinuationToken"] if answer.get("IsTruncated") else None


def _of_hub(info: dict[str, Any]) -> Entry:
    is_directory = info["type"] == "directory"
    return Entry(info["name"], info["size"], is_directory=is_directory, content=info.get("blob_id") or "")


def _directory(bucket: str, prefix: str) -> Entry:
    return Entry(f"{bucket}/{prefix.rstrip('/')}", is_directory=True)

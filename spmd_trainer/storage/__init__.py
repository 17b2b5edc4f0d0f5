"""Reads and writes files on local disks (also file://), gs:// and s3://, and reads input files from the Hugging Face Hub (hf://).

`paths.py` parses user paths, `backends.py` chooses their file systems, `object_store.py` wraps object stores,
`listing.py` lists their objects. `files.py` writes files atomically and lists sizes; `append.py` writes growing files,
`access.py` checks permissions and space, `retry.py` retries transient failures, `lock.py` keeps a second trainer out
of a directory.
"""

from spmd_trainer.storage import backends as backends  # registers the paths of object stores
from spmd_trainer.storage.paths import directory, is_remote

__all__ = ["directory", "is_remote"]

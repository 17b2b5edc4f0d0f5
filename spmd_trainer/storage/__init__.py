"""Reads and writes files on local disks (also file://), gs:// and s3://. Reads input files from the Hugging Face Hub (hf://).

`paths.py` parses users' paths, `backends.py` chooses a file system for each path, `object_store.py` wraps object stores, and
`listing.py` lists their objects. `files.py` writes files atomically and lists sizes, `append.py` writes growing files,
`access.py` checks permissions and free space, `retry.py` retries after transient failures, and `lock.py` keeps a second trainer
out of a directory.
"""

from spmd_trainer.storage import backends as backends  # registers the paths of object stores
from spmd_trainer.storage.paths import directory, is_remote

__all__ = ["directory", "is_remote"]

"""Paths of every kind, in one room: local ones, file://, gs:// and s3://.

`paths.py` reads what the user gives, `backends.py` chooses what serves it, `object_store.py` stands in front of object stores,
`listing.py` lists their objects. `files.py` writes files that are seen whole or not at all, and tells the sizes of files;
`append.py` writes files that grow, `access.py` checks permissions and space, `retry.py` repeats what failed for a passing reason,
`lock.py` keeps a second trainer out of a directory.
"""

from spmd_trainer.storage import backends as backends  # registers the paths of object stores
from spmd_trainer.storage.paths import directory, is_remote

__all__ = ["directory", "is_remote"]

"""Checks before a run starts that its directories can be read and written. Explains storage errors to users."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator

from etils import epath

from spmd_trainer.errors import UserError, disk_is_full
from spmd_trainer.storage import backends, retry

# Maximum number of attempts for a run's first request; few, because the user is waiting.
_ATTEMPTS = 2
_NO_CREDENTIALS = re.compile(
    r"anonymous caller|unable to locate credentials|default credentials were not found|could not automatically determine|"
    r"no credentials|partial credentials",
    re.IGNORECASE,
)
_EXPIRED = re.compile(r"expired|invalid_grant|reauth|token refresh required", re.IGNORECASE)
_BAD_KEY = re.compile(
    r"invalid ?access ?key|does not exist in our records|signature|invalid credentials", re.IGNORECASE
)
_NO_BUCKET = re.compile(r"bucket.*(does not exist|not found)|NoSuchBucket", re.IGNORECASE)
_HOW_TO_SIGN_IN = {
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file",
    "s3": "run `aws configure` or `aws sso login`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "hf": "run `hf auth login`, or set HF_TOKEN to a token of your account",
}
_ROLES = {
    "gs": "the role Storage Object User (roles/storage.objectUser) on the bucket",
    "s3": "s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject on its objects",
    "hf": "access to the repository, which its page on the Hub grants",
}


def check_writable(name: str, path: epath.Path) -> None:
    """Checks that files can be written and deleted below a directory. Leaves no files behind.

    On a file system, checks the permissions of the directory or its nearest existing parent. In an object store, writes and
    deletes one tiny object, because there is no other way to check permissions.

    Args:
      name: the flag or argument that gave the path, for messages, e.g. '--job_log_dir'.
      path: the directory, as `paths.directory` returns it.

    Raises:
      UserError: files can't be written there. The message says why and how to fix it.
    """
    if (scheme := backends.scheme_of(path)) is not None:
        _check_remote(name, path, scheme)
        return
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"{name}={path} can't be written: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name}={path} can't be written below {existing}; give a directory that you may write")


def check_readable(name: str, path: epath.Path) -> None:
    """Checks that a directory can be listed, if it exists. The arguments are those of `check_writable`.

    Raises:
      UserError: a permission or credentials are missing. The message says how to fix it.
    """
    # If the path is a file, the code that uses it refuses it with a better message.
    with explained(name, path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        next(iter(path.iterdir()), None)


def free_space(path: epath.Path) -> int | None:
    """Returns the free bytes of a path's file system; None in an object store. The path need not exist."""
    if backends.scheme_of(path) is not None:
        return None
    existing = path
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


@contextlib.contextmanager
def explained(name: str, path: epath.Path) -> Iterator[None]:
    """Context manager that turns access errors into a `UserError` that says how to fix them. `name`: as in `check_writable`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, UserError):
        raise
    except Exception as error:
        problem = explain(path, error)
        if problem is None:
            raise
        raise UserError(f"{name}={path} {problem}") from error


@contextlib.contextmanager
def outages_explained(path: epath.Path) -> Iterator[None]:
    """Context manager that turns permanent storage errors (revoked credentials, deleted bucket, full disk) into a `UserError`.

    Transient errors of object stores have already been retried. All other errors pass through unchanged.
    """
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            what = error.filename or f"a file of the run in {path}"
            raise UserError(
                f"{what} can't be written: {error.strerror}. Free some space there, then give the same command again: a run "
                "continues from its newest checkpoint"
            ) from error
        problem = None if backends.scheme_of(path) is None else explain(path, error)
        if problem is None:
            raise
        raise UserError(f"{path} {problem}") from error


def explain(path: epath.PathLike, error: BaseException) -> str | None:
    """Explains a storage error and its fix, as the end of a sentence that begins with the path.

    Returns:
      E.g. "can't be used: there is no bucket 'b'; ...", or None for unrelated errors.
    """
    scheme = backends.scheme_of(path)
    if scheme is None:
        return f"can't be used: {error.strerror or error}" if isinstance(error, OSError) else None
    texts = " ".join(str(link) for link in retry.chain(error))
    status = next((found for link in retry.chain(error) if (found := retry.http_status(link))), None)
    kinds = {type(link).__name__ for link in retry.chain(error)}
    if _NO_BUCKET.search(texts):
        return _no_bucket(path)
    if (kinds & retry.CREDENTIALS_CLASSES and not _EXPIRED.search(texts)) or _NO_CREDENTIALS.search(texts):
        return f"can't be used: there are no credentials for {scheme}://; {_HOW_TO_SIGN_IN[scheme]}"
    if _EXPIRED.search(texts):
        return f"can't be used: the credentials have expired; {_HOW_TO_SIGN_IN[scheme]}"
    if status == 401 or _BAD_KEY.search(texts):
        return f"can't be used: the service does not accept the credentials; {_HOW_TO_SIGN_IN[scheme]}"
    if status == 403 or isinstance(error, PermissionError) or "forbidden" in texts.lower():
        return f"can't be used: permission denied; this account needs {_ROLES[scheme]}"
    if retry.is_transient(error):
        return f"can't be reached: {retry.summary(error)}; is the network up, and the service?"
    return None


def explain_missing(path: epath.PathLike, error: BaseException) -> str | None:
    """Explains, as a clause, that the Hugging Face Hub doesn't have the repository or the revision of a missing path.

    Returns None if only the file is missing, or if the path is not on the Hub.
    """
    kinds = {type(link).__name__ for link in retry.chain(error)} if backends.scheme_of(path) == "hf" else set()
    if kinds & {"RepositoryNotFoundError", "GatedRepoError"}:
        return f"the Hub has no such repository, or only some accounts may read it; {_HOW_TO_SIGN_IN['hf']}"
    return "the repository has no such revision" if "RevisionNotFoundError" in kinds else None


def _check_remote(name: str, path: epath.Path, scheme: str) -> None:
    probe = path / f".writable-{socket.gethostname()}-{os.getpid()}"
    store = backends.object_store(scheme)
    try:
        with explained(name, path):
            store.put(probe, b"This file may be deleted.\n", attempts=_ATTEMPTS)
            store.remove(probe)
    except FileNotFoundError as error:
        # When an object is written, only the bucket can be missing.
        raise UserError(f"{name}={path} {_no_bucket(path)}") from error


def _no_bucket(path: epath.PathLike) -> str:
    bucket = os.fspath(path).split("/")[2]
    return f"can't be used: there is no bucket {bucket!r}; create it first, or correct the name"

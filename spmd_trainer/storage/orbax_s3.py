"""Patches Orbax so that it can keep checkpoints in S3.

Orbax 0.12 supports gs:// and file systems. For an s3:// path, it would use TensorStore's file driver. This module makes Orbax
treat s3:// as an object store without atomic renames: a commit file marks a finished step, as on gs://, and TensorStore's S3
driver reads and writes arrays. The module replaces three private functions and one constant of Orbax, and checks that they
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd_trainer.errors import UserError

_PREFIX = "s3://"


def install(s3_kvstore: Callable[[str], dict[str, Any]]) -> None:
    """Patches Orbax, once. `s3_kvstore`: function from an s3:// path to TensorStore's key-value store spec.

    Raises:
      UserError: the installed Orbax doesn't have the names that are patched.
    """
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    try:
        if _PREFIX in gcs_utils._GCS_PATH_PREFIX:
            return
        prefixes: tuple[str, ...] = (*gcs_utils._GCS_PATH_PREFIX, _PREFIX)
        kvstore: Callable[[str], dict[str, Any]] = gcs_utils.get_kvstore_for_gcs
        normalize: Callable[[str], str] = tensorstore_utils._normalize_path
        if not callable(tensorstore_utils._use_gcs_driver):
            raise AttributeError("tensorstore_utils._use_gcs_driver is not a function")
    except AttributeError as error:
        import importlib.metadata

        version = importlib.metadata.version("orbax-checkpoint")
        raise UserError(
            f"checkpoints in s3:// don't work with orbax-checkpoint {version}; install orbax-checkpoint 0.12.8"
        ) from error
    gcs_utils._GCS_PATH_PREFIX = prefixes
    gcs_utils.get_kvstore_for_gcs = lambda path: s3_kvstore(path) if path.startswith(_PREFIX) else kvstore(path)
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(prefixes)
    tensorstore_utils._normalize_path = lambda path: normalize(path).replace("s3:/", _PREFIX)

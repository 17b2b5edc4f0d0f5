"""Chooses the library for each remote path: gcsfs for gs://, s3fs for s3://, and huggingface_hub for hf://, which is only read.

All remote paths are `epath.Path`s of a class registered with epath, so that the trainer, Orbax and JAX's compilation cache use
the same libraries. TensorStore has its own drivers for arrays; `prepare` and `kvstore` give them the same endpoints.

Environment variables that these libraries read: STORAGE_EMULATOR_HOST (GCS), AWS_ENDPOINT_URL and other AWS_ variables (S3),
HF_ENDPOINT and HF_TOKEN (Hugging Face Hub), and those for Google's and Amazon's credentials.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any

from etils import epath
from etils.epath import backend as epath_backend
from etils.epath import gpath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import orbax_s3
from spmd_trainer.storage.object_store import ObjectStore

# Required package of each scheme, and the extra of spmd-trainer that installs it.
_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3"), "hf": ("huggingface_hub", "hf")}
# Seconds. A request without a response for this long is retried.
_CONNECT_SECONDS = 10
_READ_SECONDS = 60
# Attempts by the library, and by the trainer around it; together they outlast an outage of a minute. gcsfs
# tries 6 times within half a minute.
_S3_LIBRARY_ATTEMPTS = 3
_ATTEMPTS = {"gs": 4, "s3": 8, "hf": 8}


class _ObjectStores(type(epath_backend.fsspec_backend)):  # type: ignore[misc]  # its class has no public name
    """epath's fsspec backend, with the `ObjectStore`s of this package as file systems."""

    def fs(self, path: epath.PathLike) -> ObjectStore:
        scheme = scheme_of(path)
        if scheme is None:
            raise ValueError(f"{os.fspath(path)} is in no object store that the trainer knows")
        return object_store(scheme)


_OBJECT_STORES = _ObjectStores()


@epath.register_path_cls(tuple(f"{scheme}://" for scheme in _PACKAGES))
class ObjectPath(gpath.PosixGPath):
    """The `epath.Path` class for gs://, s3:// and hf:// paths. Always uses gcsfs, s3fs or huggingface_hub, imported at first use.

    epath's own class uses TensorFlow's file system if TensorFlow is installed, which takes seconds to import and
    ignores the endpoints of emulators.
    """

    @property
    def _backend(self) -> epath_backend.Backend:
        return _OBJECT_STORES if scheme_of(self) else super()._backend


def prepare(scheme: str) -> None:
    """Checks that the package for a scheme ('gs', 's3' or 'hf') is installed, and configures TensorStore and Orbax for it.

    Raises:
      UserError: the package is not installed.
    """
    package, extra = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{scheme}:// paths need the package {package}: install spmd-trainer[{extra}]")
    # TensorStore aborts and retries a transfer that stalls for this long.
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(_CONNECT_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_READ_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    if scheme == "s3":
        orbax_s3.install(kvstore)
    if scheme == "gs" and (emulator := _gcs_emulator()):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
        # Else TensorStore searches for credentials and logs an error.
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")
        # Emulators lack the service that reports the kind of bucket.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def kvstore(path: str) -> dict[str, Any]:
    """Returns TensorStore's key-value store spec for a path: 'gs://BUCKET/KEY', 's3://BUCKET/KEY' or a local path.

    TensorStore's S3 driver finds credentials itself, but reads neither the endpoint nor the region from the environment.
    """
    scheme = scheme_of(path)
    if scheme is None:
        # TensorStore refuses relative paths; a '/' at the end says that it is a folder.
        return {
            "driver": "file",
            "path": os.path.join(os.path.abspath(path), "") if path.endswith("/") else os.path.abspath(path),
        }
    bucket, _, key = path.removeprefix(f"{scheme}://").partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": key}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # Else the driver tries profile files first, and logs an error for each missing one.
        spec["aws_credentials"] = {"type": "environment"}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        spec["endpoint"] = endpoint
        # Requests are signed for a region, also for servers without regions.
        spec["aws_region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return spec


@functools.cache
def object_store(scheme: str) -> ObjectStore:
    """Returns the object store for a scheme, 'gs', 's3' or 'hf'. Raises UserError if the scheme's package is not installed."""
    prepare(scheme)
    import fsspec

    # Listings are not cached: TensorStore and other processes write too. Instances are cached here.
    settings: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "gs":
        import aiohttp

        # The trainer logs failures and retries itself.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        settings["session_kwargs"] = {"timeout": timeout}
        settings["requests_timeout"] = timeout
        if _gcs_emulator():
            settings["token"] = "anon"
    elif scheme == "hf":
        # The library reads the variable only when it is imported.
        settings["endpoint"] = os.environ.get("HF_ENDPOINT")
    else:
        settings["config_kwargs"] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"mode": "standard", "max_attempts": _S3_LIBRARY_ATTEMPTS},
        }
    return ObjectStore(scheme, functools.partial(fsspec.filesystem, scheme, **settings), _ATTEMPTS[scheme])


def scheme_of(path: epath.PathLike) -> str | None:
    """Returns 'gs', 's3' or 'hf' for a path in an object store, None for a local path."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return scheme if separator and scheme in _PACKAGES else None


def _gcs_emulator() -> str:
    """Returns the URL of the GCS emulator in STORAGE_EMULATOR_HOST; '' if the real service is to be used."""
    address = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if address in ("", "default"):
        return ""
    return address if address.startswith(("http://", "https://")) else f"http://{address}"

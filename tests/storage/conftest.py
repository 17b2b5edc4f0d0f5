"""Object stores on loopback, started once per test process, and what libraries need to know of them."""

import os
import pathlib
import subprocess
import sys
import uuid

import pytest
from etils import epath

from spmd_trainer.storage import backends

HERE = pathlib.Path(__file__).parent
SCHEMES = ("gs", "s3")
_SERVERS = {"gs": "gcs_server.py", "s3": "s3_server.py"}


def _environment(scheme, address):
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _serve(scheme):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    server = subprocess.Popen(
        [sys.executable, str(HERE / _SERVERS[scheme])], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment,
    )  # fmt: skip
    try:
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def gs_address():
    yield from _serve("gs")


@pytest.fixture(scope="session")
def s3_address():
    yield from _serve("s3")


@pytest.fixture
def address_of(request):
    """A function from a scheme to the address of its server, which it starts if need be."""
    return lambda scheme: request.getfixturevalue(f"{scheme}_address")


@pytest.fixture
def use(monkeypatch):
    """A function that makes this process use an address for a scheme; returns the environment variables that do."""

    def set_up(scheme, address):
        environment = _environment(scheme, address)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        backends.object_store.cache_clear()  # new environment variables, new connections
        return environment

    yield set_up
    backends.object_store.cache_clear()  # new environment variables, new connections


@pytest.fixture(params=SCHEMES)
def remote(request, address_of, use):
    """A new directory in each of the object stores."""
    use(request.param, address_of(request.param))
    return epath.Path(f"{request.param}://bkt/{uuid.uuid4().hex}")


@pytest.fixture(params=("file", *SCHEMES))
def anywhere(request, tmp_path, address_of, use):
    """A new directory on disk and in each of the object stores."""
    if request.param == "file":
        return epath.Path(tmp_path)
    use(request.param, address_of(request.param))
    return epath.Path(f"{request.param}://bkt/{uuid.uuid4().hex}")


@pytest.fixture
def no_waits(monkeypatch):
    """Retries don't wait; returns the seconds that they would have waited."""
    waits = []
    monkeypatch.setattr("spmd_trainer.storage.retry.time.sleep", waits.append)
    return waits

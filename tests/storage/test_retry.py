"""What is tried again, how often and how long apart; and what is not."""

import errno
import functools
import threading

import pytest
from facts import assert_names, raises_naming

from spmd_trainer.storage import retry as retry_lib
from spmd_trainer.storage.retry import is_transient, retry


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code):
        super().__init__(f"answer, {code}")
        self.code = code


def boto(status, translated):
    """As s3fs raises what botocore answered."""
    cause = Exception(f"status {status}")
    cause.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    translated.__cause__ = cause
    return translated


class NoCredentialsError(Exception):
    pass


def named(name):
    return type(name, (Exception,), {})()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError("no number"),
        ConnectionResetError(),
        TimeoutError(),
        HttpError(503),
        HttpError("503"),
        HttpError(429),
        HttpError(408),
        boto(503, OSError(errno.EBUSY, "Please reduce your request rate")),
        boto(500, OSError(errno.EINVAL, "We encountered an internal error")),
        named("ServerDisconnectedError"),
        named("EndpointConnectionError"),
        ValueError("UNAVAILABLE: Error reading gs://b/x: CURL error Couldn't connect to server"),
        ValueError('Error reading "gs://b/x": CURL error Weird server reply [curl_code="8"]'),
        RuntimeError("DEADLINE_EXCEEDED: waited"),
    ],
    ids=repr,
)
def test_transient(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        PermissionError(),
        FileExistsError(),
        IsADirectoryError(),
        NotADirectoryError(),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        OSError("Forbidden: b/o\nthe caller does not have storage.objects.get access"),
        HttpError(401),
        HttpError(403),
        HttpError(501),
        boto(403, PermissionError("Access Denied")),
        boto(412, OSError(errno.EINVAL, "At least one of the preconditions did not hold")),
        NoCredentialsError(),
        ValueError("PERMISSION_DENIED: Error reading gs://b/x"),
        ValueError("a bug"),
        KeyError("a bug"),
    ],
    ids=repr,
)
def test_lasting(error, no_waits):
    assert not is_transient(error)
    calls = []

    def fail():
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        retry(fail, what="reading x")
    assert raised.value is error
    assert len(calls) == 1
    assert no_waits == []


def test_waits_double_with_jitter_and_stop_at_half_a_minute(no_waits):
    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error") as raised:
        retry(fail, what="reading x", attempts=retry_lib.OUTAGE_ATTEMPTS, first_wait=1.0)
    assert raised.value.__notes__ == ["reading x failed 8 times within 0 s"]
    assert len(no_waits) == 7
    for wait, mean in zip(no_waits, [1, 2, 4, 8, 16, 30, 30], strict=True):
        assert 0.75 * mean <= wait <= 1.25 * mean
    assert sum(no_waits) > 60  # an outage of a minute


def test_succeeds_after_failures(no_waits):
    errors = [OSError(errno.EIO, "x"), ConnectionResetError()]

    def flaky():
        if errors:
            raise errors.pop()
        return "done"

    assert retry(flaky, what="reading x") == "done"
    assert len(no_waits) == 2


def test_a_service_that_never_answers_is_left_after_a_while(monkeypatch):
    monkeypatch.setattr(retry_lib, "FIRST_ANSWER_SECONDS", 0.1)
    first, calls, never = retry_lib.FirstAnswer("gs://"), [], threading.Event()
    call = functools.partial(first.wait_for, lambda: calls.append(1) or never.wait(), what="reading x", attempts=8)
    for _ in range(3):
        with raises_naming(retry_lib.StoreError, "gs://", "0.1 s"):
            retry(call, what="a call around it")
    assert len(calls) == 1, "asked again at once"
    assert not first.has_come
    never.set()
    first._silent_until = 0.0  # a while later
    assert first.wait_for(lambda: "there", what="reading x", attempts=8) == "there", "the network is back"
    assert first.has_come


def test_a_service_that_refuses_connections_is_left_with_its_error(monkeypatch, no_waits):
    monkeypatch.setattr(retry_lib, "FIRST_ANSWER_SECONDS", 10.0)
    first = retry_lib.FirstAnswer("s3://")

    def fail():
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ConnectionRefusedError) as info:
        first.wait_for(fail, what="reading x", attempts=8)
    assert len(no_waits) < 7
    assert_names(" ".join(info.value.__notes__), "reading x")
    assert not first.has_come


@pytest.mark.parametrize("error", [FileNotFoundError("no object"), PermissionError("Access Denied"), HttpError(503)])
def test_an_error_of_the_service_is_an_answer(error, no_waits):
    first = retry_lib.FirstAnswer("gs://")

    def fail():
        raise error

    with pytest.raises(type(error)):
        first.wait_for(fail, what="reading x", attempts=2)
    assert first.has_come


def test_a_retry_around_a_retry_does_not_multiply_the_attempts(no_waits):
    """A checkpoint's reads are repeated, and so is each call to an object store below them."""
    calls = []

    def fail():
        calls.append(1)
        raise ConnectionResetError("reset")

    def store_call():
        try:
            return retry(fail, what="reading gs://b/x", attempts=4)
        except ConnectionResetError as error:
            raise retry_lib.StoreError(errno.EIO, "reading gs://b/x failed") from error

    for inner in (store_call, lambda: retry(fail, what="reading gs://b/x", attempts=4)):
        calls.clear()
        with pytest.raises(OSError, match=r"reset|failed"):
            retry(inner, what="reading a checkpoint", attempts=3)
        assert len(calls) == 4

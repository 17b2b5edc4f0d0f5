"""Files on disk, in GCS and in S3: whole or not at all, growing, listed and deleted; and what stands in the way."""

import errno
import io
import os
import re
import resource
import socket
import stat

import pytest
from etils import epath
from facts import raises_naming
from proxy import Proxy

from spmd_trainer.errors import UserError
from spmd_trainer.storage import access, append, backends, is_remote, retry
from spmd_trainer.storage.files import write_atomically, write_if_changed


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_is_written_read_listed_and_deleted(anywhere):
    path = anywhere / "a" / "x.txt"
    write_atomically(path, ["one", "zwölf"])
    assert path.read_text() == "one\nzwölf\n"
    assert path.stat().length == len("one\nzwölf\n".encode())
    assert names(anywhere) == ["a"]
    assert names(path.parent) == ["x.txt"]
    assert (anywhere / "a").is_dir()
    assert not path.is_dir()
    with path.open("rb") as file:
        file.seek(-6, io.SEEK_END)
        assert file.read(2) == b"w\xc3"
    (anywhere / "a").rmtree()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        path.read_text()
    with pytest.raises(FileNotFoundError):
        list((anywhere / "none").iterdir())


def test_writing_that_fails_leaves_what_was_there(anywhere):
    path = anywhere / "x.txt"
    write_atomically(path, ["before"])

    def lines():
        yield "after"
        raise RuntimeError("the source ended")

    with pytest.raises(RuntimeError, match="the source ended"):
        write_atomically(path, lines())
    assert path.read_text() == "before\n"
    assert names(anywhere) == ["x.txt"]


def test_a_full_disk_leaves_no_empty_file(tmp_path, monkeypatch):
    path = epath.Path(tmp_path) / "x.json"
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with raises_naming(OSError, path, "No space left"):
        write_atomically(path, ["{}"])
    assert names(epath.Path(tmp_path)) == []


def test_written_only_when_changed(anywhere):
    path = anywhere / "x.txt"
    assert write_if_changed(path, ["a"])
    # In an object store, reading the file first would take as long as writing it.
    assert write_if_changed(path, ["a"]) == is_remote(path)
    path.write_bytes(b"\xff")
    assert write_if_changed(path, ["a"])
    assert path.read_text() == "a\n"


def test_a_large_object_is_one_put_too(remote):
    path, content = remote / "large", os.urandom(2**20) * 20
    with path.open("wb") as file:
        for start in range(0, len(content), 2**20):
            file.write(content[start : start + 2**20])
        assert not path.exists()
    assert path.read_bytes() == content


def test_nothing_can_be_appended_to_an_object(remote):
    with raises_naming(OSError, "appended"):
        (remote / "x").open("a")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_reading_takes_few_requests(scheme, address_of, use):
    with Proxy(address_of(scheme)) as proxy:
        use(scheme, proxy.address)
        path, content = epath.Path(f"{scheme}://bkt/requests/x"), "line\n" * 100_000
        path.write_text(content)
        proxy.requests.clear()
        assert path.read_text() == content
        assert len(proxy.requests) <= 2
        proxy.requests.clear()
        assert path.read_bytes() == content.encode()
        assert len(proxy.requests) <= 4
        proxy.requests.clear()
        path.unlink()
        assert len(proxy.requests) == 1


def test_making_directories_asks_nothing_and_makes_no_bucket(remote):
    (remote / "a").mkdir(parents=True, exist_ok=True)
    assert not (remote / "a").exists()


def test_renaming_a_directory(remote):
    write_atomically(remote / "a" / "b" / "x", ["x"])
    write_atomically(remote / "ab", ["not below a"])
    (remote / "a").rename(remote / "c")
    assert names(remote) == ["ab", "c"]
    assert (remote / "c" / "b" / "x").read_text() == "x\n"


def test_deleting_means_no_patterns(remote):
    for name in ("run[1]", "run1"):
        write_atomically(remote / name / "x", ["x"])
    (remote / "run[1]").rmtree()
    assert names(remote) == ["run1"]


def test_one_process_of_several_creates(remote):
    store = backends.object_store(str(remote)[:2])
    assert store.create(remote / "x", b"mine")
    assert not store.create(remote / "x", b"yours")
    assert store.create(remote / "x", b"mine")  # a put that is repeated after its answer was lost
    assert (remote / "x").read_bytes() == b"mine"


# --- files that grow


def test_a_growing_file_goes_on_after_a_restart(anywhere):
    path = anywhere / "m.jsonl"
    assert append.read_joined(path) == ""
    for start in (0, 2):
        file = append.open_append(path)
        file.write(f"{start}\n".encode())
        file.write(f"{start + 1}\n".encode())
        file.flush()
    assert append.read_joined(path) == "0\n1\n2\n3\n"
    assert append.read_joined(anywhere / "m") == ""


def test_parts_stay_small(remote, monkeypatch):
    monkeypatch.setattr(append, "_PART_BYTES", 100)
    file = append.open_append(remote / "m.jsonl", header=b"#\n")
    for number in range(40):
        file.write(f"{number:09}\n".encode())
    file.flush()
    parts = append.parts(remote / "m.jsonl")
    assert len(parts) == 4
    assert all(part.stat().length <= 112 for part in parts)
    assert all(part.read_text().startswith("#\n") for part in parts)
    numbers = [int(line) for line in append.read_joined(remote / "m.jsonl").split("\n") if line not in ("#", "")]
    assert numbers == list(range(40))


def test_a_part_is_not_put_for_every_line(remote, monkeypatch):
    puts = []
    store = backends.object_store(str(remote)[:2])
    monkeypatch.setattr(store, "put", lambda path, data, **kwargs: puts.append(data))
    file = append.open_append(remote / "m.jsonl")
    for number in range(1000):
        file.write(f"{number}\n".encode())
    file.flush()
    file.flush()
    assert len(puts) == 2
    assert puts[1].endswith(b"999\n")


def test_what_a_full_disk_took_is_taken_back(tmp_path):
    path = epath.Path(tmp_path) / "m.jsonl"
    file = append.open_append(path)
    file.write(b"first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))  # room for half of the next line
    try:
        with raises_naming(OSError, path):
            file.write(b"second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "first\n"
    file.write(b"second\n")
    assert path.read_text() == "first\nsecond\n"


# --- access


def test_a_directory_that_can_be_written(anywhere):
    access.check_writable("--job_log_dir", anywhere / "new" / "run")
    assert not (anywhere / "new").exists()
    access.check_readable("--job_log_dir", anywhere / "new" / "run")
    write_atomically(anywhere / "new" / "run" / "x", ["x"])
    access.check_readable("--job_log_dir", anywhere / "new" / "run")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_no_bucket(scheme, address_of, use):
    use(scheme, address_of(scheme))
    with raises_naming(UserError, f"--job_log_dir={scheme}://no-such/run", "no bucket 'no-such'"):
        access.check_writable("--job_log_dir", epath.Path(f"{scheme}://no-such/run"))


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_start_without_a_network_is_an_error_at_once(scheme, host, use, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_ANSWER_SECONDS", 0.3)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        use(scheme, f"http://{host}:{closed.getsockname()[1]}")
        path = epath.Path(f"{scheme}://bkt/run")
        for check in (access.check_readable, access.check_writable):
            with raises_naming(UserError, f"--job_log_dir={path}", "can't be reached") as info:
                check("--job_log_dir", path)
            assert info.value.exit_status == 2
        with raises_naming(OSError, f"{scheme}://"):
            path.read_bytes()


def test_local_directories_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with raises_naming(UserError, tmp_path / "file", "is a file"):
        access.check_writable("--job_log_dir", epath.Path(tmp_path / "file" / "run"))
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(stat.S_IRUSR)
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & stat.S_IWUSR))  # also for root
    with raises_naming(UserError, tmp_path / "closed", "can't be written"):
        access.check_writable("--job_log_dir", epath.Path(tmp_path / "closed" / "run"))


def test_free_space_is_asked_of_file_systems_only(anywhere):
    free = access.free_space(anywhere / "run")
    assert free is None if "://" in str(anywhere) else free > 0


class Error(Exception):
    pass


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        (
            "gs://b1/x",
            Error("Anonymous caller does not have storage.objects.create access, 401"),
            "no credentials.*gcloud",
        ),
        ("s3://b1/x", Error("Unable to locate credentials"), "no credentials.*aws configure"),
        ("gs://b1/x", Error("('invalid_grant: Token has been expired or revoked.')"), "have expired.*gcloud"),
        ("s3://b1/x", PermissionError("The provided token has expired."), "have expired.*aws"),
        (
            "s3://b1/x",
            PermissionError("The AWS Access Key Id you provided does not exist in our records."),
            "not accept",
        ),
        (
            "gs://b1/x",
            OSError("Forbidden: https://x\nme does not have storage.objects.create"),
            "permission denied.*objectUser",
        ),
        ("s3://b1/x", PermissionError("Access Denied"), "permission denied.*s3:PutObject"),
        ("gs://b1/x", Error("The specified bucket does not exist."), "no bucket 'b1'"),
        ("gs://b1/x", ConnectionResetError("reset"), "can't be reached: ConnectionResetError"),
        ("/tmp/x", OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_are_explained(path, error, says):
    assert re.search(says, access.explain(path, error))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_disk_without_room_is_the_users_to_mend(tmp_path, number):
    path = epath.Path(tmp_path)
    with raises_naming(UserError, path / "run.json", os.strerror(number)), access.outages_explained(path):
        raise OSError(number, os.strerror(number), str(path / "run.json"))
    with raises_naming(UserError, path, os.strerror(number)), access.outages_explained(path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), access.outages_explained(path):  # a fault of code
        (path / "absent").read_text()


def test_other_errors_are_not():
    assert access.explain("gs://b1/x", ValueError("a bug")) is None
    assert access.explain("/tmp/x", ValueError("a bug")) is None

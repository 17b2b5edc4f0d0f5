"""Listings of object stores: complete over many pages, one request per page, and none besides."""

import pytest
from etils import epath
from proxy import Proxy

from spmd_trainer.storage import listing
from spmd_trainer.storage.files import files_below, sizes_below, write_atomically


def names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(listing, "PAGE", 3)


@pytest.mark.full
def test_a_listing_of_many_pages_is_complete(remote, small_pages):
    wanted = {f"{folder}/{number}": number for folder in "abc" for number in range(4)}
    for name, size in wanted.items():
        (remote / name).write_bytes(bytes(size))
    assert sizes_below(remote) == wanted
    assert names(remote) == ["a", "b", "c"]
    assert names(remote / "b") == ["0", "1", "2", "3"]
    (remote / "a").rmtree()
    assert names(remote) == ["b", "c"]


@pytest.mark.full
def test_more_objects_than_a_page_of_the_service_holds(remote):
    """1,000 is the most that GCS and S3 return at once."""
    for number in range(listing.PAGE + 2):
        (remote / f"{number:04}").write_bytes(b"")
    assert len(names(remote)) == listing.PAGE + 2
    assert len(sizes_below(remote)) == listing.PAGE + 2


def test_a_name_is_found_among_many_that_begin_alike(remote, small_pages):
    """The slash of a directory comes after '-' and '.': the directory is not on the first page of names like its own."""
    for name in ("run-1/x", "run-2/x", "run-3/x", "run.txt", "run/x", "run0/x"):
        write_atomically(remote / name, ["x"])
    assert (remote / "run").is_dir()
    assert (remote / "run-1").is_dir()
    assert not (remote / "run.txt").is_dir()
    assert (remote / "run.txt").stat().length == 2
    for name in ("ru", "run-", "run1", "run.txt2", "run/y"):
        assert not (remote / name).exists(), name
        with pytest.raises(FileNotFoundError):
            (remote / name).stat()


def test_sizes_and_times_of_files(anywhere):
    assert files_below(anywhere / "nothing") == {}
    write_atomically(anywhere / "run" / "a", ["x"])
    write_atomically(anywhere / "run" / "deep" / "er" / "b", ["xyz"])
    write_atomically(anywhere / "run2", ["not below run"])
    assert sizes_below(anywhere / "run") == {"a": 2, "deep/er/b": 4}
    times = [info.modified.timestamp() for info in files_below(anywhere / "run").values()]
    assert times == pytest.approx([(anywhere / "run2").stat().mtime] * 2, abs=60)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda path: sizes_below(path / "run"),
        lambda path: sizes_below(path / "none"),
        lambda path: names(path / "run"),
        lambda path: (path / "run").is_dir(),
        lambda path: (path / "run" / "a").exists(),
        lambda path: (path / "run" / "none").exists(),
        lambda path: (path / "run" / "a").read_bytes(),
    ],
)
def test_each_question_is_one_request(scheme, ask, address_of, use):
    with Proxy(address_of(scheme)) as proxy:
        use(scheme, proxy.address)
        path = epath.Path(f"{scheme}://bkt/questions")
        write_atomically(path / "run" / "a", ["x"])
        proxy.requests.clear()
        ask(path)
        assert len(proxy.requests) == 1


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_what_is_missing_takes_one_request(scheme, address_of, use):
    with Proxy(address_of(scheme)) as proxy:
        use(scheme, proxy.address)
        path = epath.Path(f"{scheme}://bkt/nothing/there")
        assert not path.exists()  # before the first answer of a service, a read asks for it
        for ask in (path.read_bytes, path.stat, lambda: names(path)):
            proxy.requests.clear()
            with pytest.raises(FileNotFoundError):
                ask()
            assert len(proxy.requests) == 1

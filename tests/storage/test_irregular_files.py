"""Named pipes, sockets and devices where a file should be: they are refused before they are opened, and never replaced."""

import os
import socket

import pytest
from etils import epath
from facts import raises_naming

from spmd_trainer.storage import append, files, json_values, reading


def pipe(path):
    os.mkfifo(path)


def link_to_a_pipe(path):
    os.mkfifo(path.with_name("target"))
    path.symlink_to("target")


def device(path):
    path.symlink_to("/dev/full")


def listening(path):
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(before)


@pytest.fixture(params=[pipe, link_to_a_pipe, device, listening])
def irregular(request, tmp_path):
    request.param(tmp_path / "odd")
    return tmp_path / "odd"


@pytest.mark.parametrize(
    "use",
    [
        lambda path: reading.read(str(path)),
        lambda path: reading.read(str(path), 0, 8),
        lambda path: reading.opened(path, os.O_RDONLY),
        lambda path: json_values.content_of(path),
        lambda path: append.read_joined(epath.Path(path)),
        lambda path: append.open_append(epath.Path(path)).write(b"a"),
        lambda path: files.write_atomically(epath.Path(path), ["a"]),
        lambda path: files.write_if_changed(epath.Path(path), ["a"]),
        lambda path: reading.require_regular_below(path.parent),
    ],
)
def test_it_is_refused_and_stays(irregular, use):
    before = irregular.stat().st_mode
    with raises_naming(reading.NotRegularError, "regular file"):
        use(irregular)
    assert irregular.stat().st_mode == before
    assert not [path for path in irregular.parent.iterdir() if path.name.endswith(files.UNFINISHED_SUFFIX)]


def test_files_and_links_to_files_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    assert reading.read(str(tmp_path / "b"), 1) == b"bc"
    reading.require_regular_below(tmp_path)
    with pytest.raises(FileNotFoundError):
        reading.read(str(tmp_path / "c"))

"""Which token stores of a local folder are removed, and which never are."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from facts import assert_names

from spmd_trainer.inputs.corpus import store_cache

HOLDER = (
    "import sys, time; from spmd_trainer.inputs.corpus import store_cache; "
    "held = store_cache.hold(sys.argv[1]); print('held', flush=True); time.sleep(60)"
)


def make(root, number, size=1000, *, used):
    """A finished store of so many bytes that was used last at a time."""
    folder = root / f"corpus-{number:024x}"
    folder.mkdir(parents=True)
    (folder / "tokens-00000-of-00001.arrow").write_bytes(b"x" * size)
    (folder / "tokens-00000-of-00001.json").write_text("{}")
    (folder / "corpus.json").write_text("{}")
    (folder / "in-use").touch()
    os.utime(folder / "in-use", (used, used))
    return folder


def left(root):
    return sorted(int(path.name.removeprefix("corpus-"), 16) for path in root.glob("corpus-*"))


@pytest.mark.parametrize(
    ("limit", "needed", "expected"),
    [(10_000, 0, [1, 2, 3]), (2100, 0, [1, 3]), (3100, 1000, [1, 3]), (1100, 0, [3]), (10, 0, []), (1000, 5000, [])],
)
def test_the_longest_unused_go_first_until_there_is_room(tmp_path, limit, needed, expected):
    for number, used in ((1, 200), (2, 100), (3, 300)):
        make(tmp_path, number, used=used)
    store_cache.make_room(str(tmp_path), limit, needed)
    assert left(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_store_in_use_stays_until_its_process_is_killed(tmp_path, caplog):
    for number in (1, 2):
        make(tmp_path, number, used=number)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / f"corpus-{1:024x}")], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        store_cache.make_room(str(tmp_path), 100)
        assert left(tmp_path) == [1]
        assert_names(caplog.text, tmp_path, "1004 B", "--data_cache_limit=100 B")
        process.send_signal(signal.SIGKILL)
    store_cache.make_room(str(tmp_path), 0)
    assert left(tmp_path) == []


def test_whoever_uses_a_store_makes_it_the_newest(tmp_path):
    for number in (1, 2):
        make(tmp_path, number, used=number)
    store_cache.hold(str(tmp_path / f"corpus-{1:024x}")).close()
    store_cache.make_room(str(tmp_path), 1500)
    assert left(tmp_path) == [1]


def test_a_folder_that_can_not_be_written_is_used_without_a_lock(tmp_path):
    folder = make(tmp_path, 1, used=1)
    (folder / "in-use").unlink()
    (folder / "in-use").mkdir()  # what a process without rights sees is an error of `open`, too
    assert store_cache.hold(str(folder)) is None
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        store_cache.hold(str(tmp_path / "file"))


def test_locks_of_nfs_protect_a_store_too(tmp_path):
    """NFS makes locks of ranges of bytes of these: a shared one needs a file that can be read."""
    folder = make(tmp_path, 1, used=1)
    program = "import fcntl; fcntl.flock = fcntl.lockf; " + HOLDER
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    remover = (
        "import fcntl, sys; fcntl.flock = fcntl.lockf; from spmd_trainer.inputs.corpus import store_cache; "
        "store_cache.make_room(sys.argv[1], 0)"
    )
    with process:
        assert process.stdout.readline() == "held\n"
        subprocess.run([sys.executable, "-c", remover, str(tmp_path)], check=True)
        assert left(tmp_path) == [1]
        process.kill()


def test_what_is_not_a_store_of_ours_stays(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    precious = make(outside, 7, used=1)
    root.mkdir()
    (root / f"corpus-{1:024x}").symlink_to(precious)
    (root / "corpus-mine").mkdir()
    (root / "notes.txt").write_text("mine")
    (make(root, 2, used=2) / "thesis.txt").write_text("mine")
    linked = make(root, 3, used=3)
    (linked / "tokens-00001-of-00001.arrow").symlink_to(precious / "corpus.json")
    store_cache.make_room(str(root), 0)
    assert sorted(path.name for path in root.iterdir()) == [
        f"corpus-{1:024x}", f"corpus-{2:024x}", "corpus-mine", "notes.txt"
    ]  # fmt: skip
    assert len(list(precious.iterdir())) == 4


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path, monkeypatch):
    make(tmp_path, 1, used=1)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_cache.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store_cache.make_room(str(tmp_path), 0)
    assert left(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    store_cache.make_room(str(tmp_path), 10_000)
    assert list(tmp_path.iterdir()) == []


def test_users_and_removals_at_once(tmp_path):
    """Whoever holds a store finds what it wrote there; whoever comes after a removal gets a new folder."""
    root, ends, problems = tmp_path / "root", threading.Event(), []
    root.mkdir()

    def use(number):
        folder = root / f"corpus-{number % 2:024x}"
        while not ends.is_set():
            with store_cache.hold(str(folder)):
                name = folder / f"tokens-{number:05d}-of-00009.json"
                name.write_text("mine")
                time.sleep(0.001)
                if not name.exists():
                    problems.append(number)

    def remove():
        while not ends.is_set():
            store_cache.make_room(str(root), 0)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        running = [*(pool.submit(use, number) for number in range(4)), pool.submit(remove), pool.submit(remove)]
        time.sleep(1.0)
        ends.set()
    assert [one.result() for one in running] == [None] * 6
    assert problems == []

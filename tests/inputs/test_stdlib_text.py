"""The standard library's sources as a corpus: which files there are, and which are held out."""

import os
import subprocess
import sys
import sysconfig

from facts import raises_naming

from spmd_trainer.inputs import stdlib_text


def relative(paths):
    return [os.path.relpath(path, sysconfig.get_paths()["stdlib"]).replace(os.sep, "/") for path in paths]


def test_parts_are_disjoint_complete_and_sorted():
    train, heldout = stdlib_text.stdlib_train_files(), stdlib_text.stdlib_heldout_files()
    everything = [path for _, path in stdlib_text.stdlib_files()]
    assert not set(train) & set(heldout)
    assert sorted([*train, *heldout]) == sorted(everything)
    for paths in (train, heldout):
        assert relative(paths) == sorted(relative(paths))
        assert all(os.path.isfile(path) for path in paths)


def test_about_a_twentieth_is_held_out():
    train, heldout = (
        sum(map(os.path.getsize, paths))
        for paths in (stdlib_text.stdlib_train_files(), stdlib_text.stdlib_heldout_files())
    )
    assert train > 5_000_000
    assert 0.02 < heldout / (train + heldout) < 0.09


def test_a_file_never_changes_sides():
    # By name, so that neither the machine nor the Python version matters.
    heldout = ["copy.py", "shutil.py", "ssl.py", "http/server.py", "asyncio/subprocess.py"]
    assert all(map(stdlib_text.is_heldout, heldout))
    assert not any(map(stdlib_text.is_heldout, ["os.py", "json/decoder.py", "asyncio/tasks.py"]))


def test_the_split_is_the_same_in_another_process():
    code = "from spmd_trainer.inputs import stdlib_text; print(stdlib_text.stdlib_heldout_files())"
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout
    assert out.strip() == str(stdlib_text.stdlib_heldout_files())


def test_tests_packages_and_build_files_are_left_out(tmp_path):
    for name in (
        "json/__init__.py", "json/decoder.py", "abc.py", "notes.txt", "test/a.py", "lib2to3/tests/b.py", "lib2to3/c.py",
        "idlelib/idle_test/d.py", "site-packages/e.py", "dist-packages/f.py", "__pycache__/g.py",
        "config-3.11-x86_64-linux-gnu/python-config.py", "_sysconfigdata__linux_x86_64-linux-gnu.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = stdlib_text.stdlib_files(str(tmp_path))
    assert [name for name, _ in found] == ["abc.py", "json/__init__.py", "json/decoder.py", "lib2to3/c.py"]
    assert found[0][1] == str(tmp_path / "abc.py")


def test_a_library_without_sources_is_refused(tmp_path):
    with raises_naming(ValueError, f"no .py files in {tmp_path}", "source files"):
        stdlib_text.stdlib_files(str(tmp_path))

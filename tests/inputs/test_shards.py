"""Records numbered through several files, and the files that stay open."""

import os
import threading

import numpy as np
import pytest

from spmd_trainer.inputs.shards import LRUCache, OpenFile, ShardIndex


@pytest.mark.parametrize("counts", [[3], [0, 2, 0, 5, 1], [4, 0]])
def test_every_number_is_found_in_its_part(counts):
    numbering = ShardIndex(counts)
    expected = [(part, number) for part, count in enumerate(counts) for number in range(count)]
    assert [numbering.locate(number) for number in range(len(numbering))] == expected
    numbers = np.random.default_rng(0).permutation(len(expected))
    found = [None] * len(expected)
    for part, places, inside in numbering.split(numbers):
        for place, number in zip(places, inside, strict=True):
            found[place] = (part, number)
    assert found == [expected[number] for number in numbers]
    assert list(numbering.split(np.array([], np.int64))) == []


def test_the_last_used_stay_open():
    opened = []

    def open_one(number):
        opened.append(number)
        return str(number)

    files = LRUCache(2)
    assert [files.get(number, open_one) for number in (0, 1, 0, 2, 0, 1)] == ["0", "1", "0", "2", "0", "1"]
    assert opened == [0, 1, 2, 1]
    assert files.kept == [0, 1]


def test_large_ones_are_let_go_of_earlier():
    files = LRUCache(5, size_of=len, most_size=6)
    for number, size in enumerate((2, 2, 2, 3, 9)):
        files.get(number, lambda _, size=size: "x" * size)
        assert number in files.kept
        assert number < 4 or files.kept == [4]
    files.get(0, lambda _: "x")
    assert files.kept == [0]


def test_a_file_is_not_closed_while_another_thread_reads_it(tmp_path):
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 100)
    files, wrong = LRUCache(1), []
    before = len(os.listdir("/proc/self/fd"))

    def read(seed):
        for number in np.random.default_rng(seed).integers(0, 6, 300).tolist():
            file = files.get(number, lambda n: OpenFile(str(tmp_path / str(n))))
            if os.pread(file.number, 100, 0) != bytes([number]) * 100:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(os.listdir("/proc/self/fd")) == before + 1

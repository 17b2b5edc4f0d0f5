"""Where a run's time goes: parts, records of each start, and the time that counts."""

import json

import pytest
from etils import epath

from spmd_trainer.callbacks import PARTS, RunTimes
from spmd_trainer.watch.run_times import TIMES_FILE, RunTimesFile, StartTimes, goodput, read_run_times


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_every_second_counts_for_one_part():
    clock = Clock()
    times = RunTimes(clock)
    for part, seconds in (("start", 3.0), ("input", 1.0), ("step", 5.0), ("input", 0.5), ("step", 5.0)):
        times.begin(part)
        clock.now += seconds
    found = times.seconds()
    assert {part: seconds for part, seconds in found.items() if seconds} == {"start": 3.0, "input": 1.5, "step": 10.0}
    assert tuple(found) == PARTS
    clock.now += 2.0
    assert times.seconds()["step"] == 12.0, "the part in progress is included"


def test_a_part_that_there_is_not_is_refused():
    with pytest.raises(KeyError, match="training"):
        RunTimes().begin("training")


def test_the_last_record_of_each_start_is_read_back(tmp_path):
    directory = epath.Path(tmp_path)
    first, second = RunTimesFile(directory, 10.5), RunTimesFile(directory, 99.0)
    first.write({"step": 1.0}, 0, 5)
    first.write({"step": 2.0, "input": 0.5}, 0, 10)
    second.write({"step": 4.0}, 10, 30, "finished")
    with (tmp_path / TIMES_FILE).open("a") as file:
        file.write('{"start": 10.5, "seco')  # cut short by a kill
    found = read_run_times(tmp_path)
    assert [(record.start, record.first_step, record.step, record.ended) for record in found] == [
        (10.5, 0, 10, ""),
        (99.0, 10, 30, "finished"),
    ]
    assert found[0].seconds["input"] == 0.5
    assert found[0].seconds["save"] == 0.0
    assert found[1].steps == 20
    assert json.loads((tmp_path / TIMES_FILE).read_text().splitlines()[0])["steps"] == 5
    assert read_run_times(tmp_path / "nothing") == []


def test_times_that_cannot_be_written_end_no_run(tmp_path, caplog):
    (tmp_path / TIMES_FILE).mkdir()
    file = RunTimesFile(epath.Path(tmp_path), 1.0)
    file.write({"step": 1.0}, 0, 5)
    file.write({"step": 1.0}, 0, 6)
    assert caplog.text.count("can't write") == 1


def record(start, first_step, step, seconds_of_steps, other=0.0):
    seconds = dict.fromkeys(PARTS, 0.0) | {"step": seconds_of_steps, "other": other}
    return StartTimes(start, seconds, first_step, step, start + seconds_of_steps + other)


def test_steps_that_were_taken_again_do_not_count():
    # 100 steps of 1 s; killed; again from step 80, and at once killed at 90; then from 80 to 200.
    starts = [record(0, 0, 100, 100.0, 10.0), record(200, 80, 90, 10.0), record(300, 80, 200, 120.0, 20.0)]
    found = goodput(starts)
    assert found.seconds == 260.0
    assert found.redone_steps == 30
    assert found.redone == pytest.approx(30.0)
    assert found.productive == pytest.approx(200.0)
    assert found.share == pytest.approx(200 / 260)
    assert found.away == pytest.approx(90.0 + 90.0)


def test_a_start_that_took_no_step_costs_time():
    found = goodput([record(0, 0, 50, 50.0), record(100, 50, 50, 0.0, 25.0), record(200, 50, 100, 50.0)])
    assert (found.productive, found.redone_steps, found.seconds) == (100.0, 0, 125.0)


def test_a_run_from_scratch_after_its_directory_was_emptied_of_checkpoints():
    found = goodput([record(0, 0, 50, 50.0), record(100, 0, 30, 30.0)])
    assert (found.productive, found.redone_steps) == (30.0, 50)
    assert goodput([]).share == 0.0

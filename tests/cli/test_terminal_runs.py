"""A run in a terminal, stopped by Ctrl-C; then the same directory's decode, in a terminal and not in one."""

import re
import signal
import subprocess
import sys

import pytest
from facts import assert_names
from terminal_helpers import in_terminal

pytestmark = pytest.mark.full

COLUMNS = 60
COMMAND = [sys.executable, "-m", "spmd_trainer.main", "--exp=lm.stdlib.StdlibBytesTiny"]
FIELDS = (
    "num_train_steps=100000",
    "save_interval_steps=50000",
    "eval_interval_steps=50000",
    "summary_interval_steps=5",
)
CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")
# Lines of the log's file that a terminal with a live line shows otherwise.
OTHERWISE = ("stopped at step", "results in", "  to ", "decoded heldout_prompts at step")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run that Ctrl-C has stopped, all output of its terminal, the lines left there, and the exit status."""
    directory = tmp_path_factory.mktemp("run")
    flags = [f"--job_log_dir={directory}", *(f"--fdl.set=task.train.{field}" for field in FIELDS)]
    with in_terminal([*COMMAND, *flags], COLUMNS) as (terminal, process):
        end = terminal.wait_for(r"loss .*tokens/s.*ETA", seconds=60)
        process.send_signal(signal.SIGINT)
        terminal.wait_for("SIGINT", after=end)
        status = process.wait(60)
        lines = terminal.lines()
    return directory, terminal.output, lines, status


def logged(directory, name):
    """The records of a log's file, without those that a terminal shows in its own way."""
    text = (directory / "logs" / name).read_text()
    records = re.split(r"^[\d-]+ [\d:,]+ (\w+) \S+\] ", text, flags=re.MULTILINE)[1:]
    return [
        message.rstrip("\n")
        for level, message in zip(records[::2], records[1::2], strict=True)
        if level == "INFO" and not message.startswith(OTHERWISE)
    ]


def test_all_log_lines_are_there_once_and_nothing_else_is(run):
    directory, _, lines, status = run
    assert status == 0
    shown = [CLOCK.sub("", line) for line in lines if CLOCK.match(line)]
    own = [line for line in logged(directory, "train.log") if line in shown]
    assert shown == own
    for start in ("compiling the train step ...", "training from step 0", "saving step 0", "first step done: loss"):
        assert len([line for line in shown if line.startswith(start)]) == 1, shown
    others = [line for line in lines if not CLOCK.match(line)]
    assert_names(others[0], "SIGINT", "this step", "saving", "again")
    table = [line for line in others[1:] if line[0] in "╭│╰"]
    assert all(len(line) <= COLUMNS for line in table)
    assert others[1 + len(table) :] == [line for line in others if line.startswith(("results in", "  to "))]


def test_the_end_says_what_was_saved_and_what_to_run_next(run):
    directory, _, lines, _ = run
    text = "\n".join(lines)
    step = re.search(r"│ stopped at step (\d+) of 100000 by a signal", text).group(1)
    assert_names(text, "same command")
    assert f"results in {directory}: checkpoints/ (steps 0, {step}), summaries/" in lines
    commands = [line for line in lines if line.startswith("  to decode: ")]
    command = f"spmd-trainer --job_log_dir={directory} --mode=decode_once"
    assert commands == [f"  to decode:          {command}"]
    assert f"stopped at step {step} of 100000 by a signal" in (directory / "logs" / "train.log").read_text()


def test_the_line_showed_the_compilation_and_then_the_steps(run):
    _, output, _, _ = run
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    drawn = re.findall(r"\r ([^\r\n]*)\x1b\[J\r", plain)
    assert any("compiling" in line for line in drawn)
    assert any(re.search(r"step +\d+/100000  loss \d", line) for line in drawn)
    assert all(len(line) < COLUMNS for line in drawn)
    assert drawn.index(next(line for line in drawn if "compiling" in line)) < drawn.index(
        next(line for line in drawn if "loss" in line)
    )


def test_its_decode_is_readable_and_ends_without_noise(run):
    directory, *_ = run
    decode = [*COMMAND, f"--job_log_dir={directory}", "--mode=decode_once"]
    with in_terminal(decode, 200) as (terminal, process):
        assert process.wait(120) == 0
        lines = terminal.lines()
    (directory / "decode_out").rename(directory / "decoded in a terminal")
    done = subprocess.run(decode, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stderr + done.stdout
    plain = [CLOCK.sub("", line) for line in done.stderr.splitlines()]
    for text in (lines, plain):
        text = [CLOCK.sub("", line) for line in text]
        first = next(i for i, line in enumerate(text) if line.startswith("decoded heldout_prompts at step"))
        assert text[first].endswith(", example 0:")
        assert text[first + 1] == "  prompt | import coll"
        assert text[first + 2].startswith("  output | ")
        assert_names(text[-1], "tensorboard --logdir")
        for notice in ("InitializeLog", "oneDNN", "TensorFlow"):
            assert notice not in "\n".join(text)

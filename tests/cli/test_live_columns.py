"""What the live line says in terminals of all widths."""

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from spmd_trainer.cli import live_line
from spmd_trainer.training.live_status import LiveStatus, Memory, PhaseStatus, TrainingStatus

GIB = 1 << 30
TRAINING = TrainingStatus(
    step=1234,
    num_steps=20_000,
    loss=2.3456,
    seconds_per_step=0.2345,
    items_per_step=16_384,
    unit="tokens",
    utilization={"mfu_6n": 0.4, "mfu": 0.423},
    memory=Memory(61 * GIB, 70 * GIB, 79 * GIB),
    due={"save": 2000, "eval": 1500, "decode": 2000},
)


class Phase:
    def __init__(self, *status):
        self.status = lambda: PhaseStatus(*status) if status else None


def shown(width, training=None, phases=(), encoding="utf-8"):
    """The text of the line."""
    status = LiveStatus()
    status.training = None if training is None else lambda: training
    status.running += [phase.status for phase in phases]
    line = live_line.line(status, width)
    if line is None:
        return None
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(line)
    return captured.get()


def test_a_wide_terminal_shows_everything():
    assert shown(170, TRAINING).strip(" ━╸╺\n") == (
        "step  1234/20000  loss 2.3456  234 ms/step  69,868 tokens/s  MFU 42.3%  ETA 1h13m  memory 61.0 GiB of 79.0 GiB  "
        "next eval 1500, save+decode 2000"
    )


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (60, "step  1234/20000  loss 2.3456  69,868 tokens/s  ETA 1h13m"),
        (80, "step  1234/20000  loss 2.3456  234 ms/step  69,868 tokens/s  ETA 1h13m"),
        (30, "step  1234/20000"),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(width, text):
    assert shown(width, TRAINING).strip(" ━╸╺\n") == text


@pytest.mark.parametrize("width", range(3, 200))
def test_it_never_takes_more_than_a_row(width):
    phases = [Phase("開始 initialising", 3.0), Phase("evaluating 評価 at step 100", 17.0, 12, 32)]
    for text in (
        shown(width, TRAINING),
        shown(width, dataclasses.replace(TRAINING, activity="saving step 1234")),
        shown(width, TRAINING, phases),
    ):
        assert text.count("\n") == 1
        # The first column is the cursor's, and the last one stays empty.
        assert cell_len(text.rstrip()) <= width - 2


def test_columns_stay_where_they_are_from_the_first_step_to_the_last():
    places = {shown(220, dataclasses.replace(TRAINING, step=step)).index("loss") for step in (1, 999, 20_000)}
    assert len(places) == 1


def test_phases_come_before_steps_and_the_newest_first():
    phases = [Phase("initialising the variables", 3.2), Phase("compiling the train step", 12.0)]
    assert shown(120, TRAINING, phases).strip() == "compiling the train step  12 s  initialising the variables 3.2 s"
    assert shown(120, TRAINING, [*phases, Phase()]).startswith("compiling the train step")


def test_batches_have_a_bar_and_the_time_that_is_left():
    text = shown(120, None, [Phase("evaluating heldout", 12.0, 12, 32)])
    assert text.strip(" ━╸╺\n") == "evaluating heldout  12 of 32 batches  12 s  about 20 s left"
    assert "━" in text
    assert shown(120, None, [Phase("decoding x", 12.0, 12)]).strip() == "decoding x  12 batches  12 s"


def test_before_the_first_step_only_its_number_is_known():
    assert shown(80, TrainingStatus(0, 600)).strip(" ━╸╺\n") == "step   0/600"


def test_names_cannot_break_the_row():
    assert r"evaluating a\nb\x1b\x07c" in shown(80, None, [Phase("evaluating a\nb\x1b\x07c", 1.0)])


def test_a_terminal_without_unicode_gets_plain_characters():
    assert shown(170, TRAINING, encoding="ascii").isascii()


def test_where_nothing_goes_on_there_is_no_line():
    assert shown(80) is None

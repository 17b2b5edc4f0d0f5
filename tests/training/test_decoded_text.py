"""Decoded examples as people see them."""

import pytest
from etils import epath
from facts import assert_names

from spmd_trainer.training import decode_records
from spmd_trainer.training.live_status import live

FILE = epath.Path("/runs/mine/decode_out/prompts/step_4.jsonl")


def said(caplog, **record):
    with caplog.at_level("INFO", logger="absl"):
        decode_records.say("prompts", 4, {"index": 7, **record}, FILE)
    return caplog.messages[-1].split("\n")


def test_prompt_and_output_stand_below_each_other_line_by_line(caplog):
    head, *lines = said(caplog, prompt="def f(x):\n", output="\treturn x  # é\n\nprint(1)", score=-1.5)
    assert_names(head, "prompts", "step 4", "example 7")
    assert lines == [
        "  prompt | def f(x):",
        "         | ",
        "  output | \treturn x  # é",
        "         | ",
        "         | print(1)",
    ]


def test_what_has_no_shape_is_written_out(caplog):
    lines = said(caplog, prompt="\x1b[31mred\r\x00", output=" \n ")
    assert lines[1:] == [r"  prompt | \x1b[31mred\r\x00", r"  output | ' \n '"]


@pytest.mark.parametrize(("text", "left"), [("a" * 5000, 3000), ("a\n" * 50, 53), (" " * 5000, 3000)])
def test_a_long_text_ends_with_where_the_rest_is(text, left):
    lines = decode_records.shown(text, FILE)
    assert lines[-1] == f"[{left:,} more characters in {FILE}]"
    assert len("\n".join(lines)) < 2200
    assert decode_records.shown("a" * 2000, FILE) == ["a" * 2000]


def test_outputs_of_other_models_are_json(caplog):
    assert said(caplog, logits=[0.5, 1.0])[1:] == ['  output | {"index": 7, "logits": [0.5, 1.0]}']


def test_a_display_shows_the_same_text(caplog, monkeypatch):
    printed = []

    class Display:
        print = staticmethod(printed.append)

    monkeypatch.setattr(live, "display", Display())
    lines = said(caplog, prompt="a\nb", output="c")
    assert [text.plain for text in printed] == ["\n".join(lines)]

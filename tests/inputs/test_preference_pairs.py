"""Rows of pairs in files: their forms, and what is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import preference_pairs

USER = [{"role": "user", "content": "Which colour is the sky?"}]
BLUE, GREEN = ([{"role": "assistant", "content": text}] for text in ("Blue.", "Green."))


def parse(**row):
    return preference_pairs.parse(row, "pairs.jsonl:3")


def without(name):
    return {key: value for key, value in {"prompt": USER, "chosen": BLUE, "rejected": GREEN}.items() if key != name}


def test_a_prompt_that_is_given():
    found = parse(prompt="The sky is", chosen=" blue.", rejected=" green.", score=3)
    assert (found.prompt, found.chosen, found.rejected, found.is_text) == ("The sky is", " blue.", " green.", True)
    found = parse(prompt=USER, chosen=BLUE, rejected=GREEN)
    assert (found.prompt, found.chosen, found.rejected, found.is_text) == (USER, BLUE, GREEN, False)


def test_a_prompt_that_is_the_common_beginning():
    found = parse(chosen=USER + BLUE, rejected=USER + GREEN)
    assert (found.prompt, found.chosen, found.rejected) == (USER, BLUE, GREEN)
    # The space belongs to the answers, as in TRL.
    found = parse(prompt=None, chosen="The sky is blue.", rejected="The sky is green.")
    assert (found.prompt, found.chosen, found.rejected) == ("The sky is", " blue.", " green.")
    found = parse(chosen="The sky: blue", rejected="The sky: black")
    assert (found.prompt, found.chosen, found.rejected) == ("The sky: bl", "ue", "ack")


def test_tools_and_variables_of_the_template():
    tools = [{"name": "look"}]
    found = parse(prompt=USER, chosen=BLUE, rejected=GREEN, tools=json.dumps(tools), chat_template_kwargs={"a": 1})
    assert (found.tools, found.variables) == (tools, {"a": 1})
    assert parse(prompt=USER, chosen=BLUE, rejected=GREEN, tools=[]).tools is None


def test_the_rows_of_a_parquet_file(tmp_path):
    path = tmp_path / "pairs.parquet"
    rows = [
        {"prompt": USER, "chosen": BLUE, "rejected": GREEN, "score": 1},
        {"prompt": [{**USER[0], "name": "Ann"}], "chosen": GREEN, "rejected": BLUE, "score": 2},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = list(preference_pairs.read(path.read_bytes(), str(path)))
    assert [pair.where for pair in found] == [f"{path} row 1", f"{path} row 2"]
    assert [pair.chosen for pair in found] == [BLUE, GREEN]
    assert "name" not in found[0].prompt[0]  # null there, because another message has a name
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with pytest.raises(UserError, match=r"pairs.parquet row 1: .*there is no `chosen`; it has text"):
        list(preference_pairs.read(path.read_bytes(), str(path)))
    with pytest.raises(UserError, match=r"pairs.parquet can't be read as Parquet after row 0"):
        list(preference_pairs.read(path.read_bytes()[:-9], str(path)))


def test_lines_are_counted_with_empty_ones():
    content = b'{"prompt": "p", "chosen": "a", "rejected": "b"}\n\n{"prompt"\n'
    found = preference_pairs.read(content, "pairs.jsonl")
    assert next(found).where == "pairs.jsonl:1"
    with pytest.raises(UserError, match=r"^pairs.jsonl:3 is not JSON"):
        next(found)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "is not a pair: 3; give an object with `prompt`"),
        (without("rejected"), "the pair has no rejected answer: there is no `rejected`; it has prompt, chosen"),
        ({**without("rejected"), "rejcted": GREEN}, "no rejected answer: .*did you mean rejcted"),
        ({**without(""), "rejected": None}, "the pair has no rejected answer: `rejected` is null"),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, 'the pair has no chosen answer: `chosen` is ""'),
        ({**without(""), "chosen": []}, r"the pair has no chosen answer: `chosen` is \[\]"),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": ""}]},
            "the pair has no chosen answer: its messages are empty",
        ),
        ({**without(""), "chosen": GREEN}, r"the chosen and the rejected answer are equal: \[\{.*Green"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "the prompt is empty"),
        ({**without(""), "prompt": []}, "the prompt is empty"),
        ({**without(""), "prompt": [{"role": "user", "content": ""}]}, "the prompt is empty"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` and `rejected` have no common beginning; give a prompt"),
        ({"chosen": BLUE, "rejected": GREEN}, "`chosen` and `rejected` have no common beginning; give a prompt"),
        ({"chosen": "ab", "rejected": "abc"}, "no chosen answer: .*the other answer begins with all of `chosen`"),
        (
            {**without(""), "prompt": "p"},
            "`prompt` is a text and `chosen` is a list of messages; give all of them in one",
        ),
        ({**without(""), "chosen": 3}, "`chosen` is 3; give a text or a list of messages"),
        ({**without(""), "chosen": ["a"]}, 'message 1 of `chosen` is "a"; give an object with a `role`'),
        (
            {**without(""), "chosen": [{"role": "asistant", "content": "a"}]},
            "message 1 of `chosen` has the role 'asistant'; give one of .*did you mean assistant",
        ),
        ({**without(""), "prompt": [{"content": "a"}]}, "message 1 of `prompt` has the role None"),
        ({**without(""), "prompt": USER + BLUE}, "the prompt ends with a message of the assistant"),
        ({**without(""), "rejected": GREEN + USER}, "the rejected answer has a message of the role 'user'"),
        (
            {**without(""), "prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            r"the content of message 1 of `prompt` is \[.*image.*; give a string or a list",
        ),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": 3}]},
            "the content of message 1 of `chosen` is 3; give a string or a list",
        ),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]},
            "the pair has no chosen answer: its messages are empty",
        ),
        ({**without(""), "tools": "{"}, "`tools` is not JSON"),
        ({**without(""), "tools": [3]}, r"`tools` is \[3\]; give a list of objects"),
        ({**without(""), "chat_template_kwargs": [3]}, r"`chat_template_kwargs` is \[3\]; give an object"),
    ],
)
def test_a_row_that_can_t_be_used_is_named(row, message):
    with pytest.raises(UserError, match=rf"^pairs\.jsonl:3:? ?.*{message}"):
        preference_pairs.parse(row, "pairs.jsonl:3")

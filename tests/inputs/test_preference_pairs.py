"""Rows of pairs in files: their forms, and what is refused."""

import json

import pytest
from facts import raises_naming

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


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (3, ["not a pair: 3", "an object", "`prompt`"]),
        (without("rejected"), ["no rejected answer", "no `rejected`", "prompt, chosen"]),
        ({**without("rejected"), "rejcted": GREEN}, ["no rejected answer", "rejcted?"]),
        ({**without(""), "rejected": None}, ["no rejected answer", "`rejected` is null"]),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, ["no chosen answer", '`chosen` is ""']),
        ({**without(""), "chosen": []}, ["no chosen answer", "`chosen` is []"]),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": ""}]},
            ["no chosen answer", "messages", "empty"],
        ),
        ({**without(""), "chosen": GREEN}, ["chosen", "rejected", "equal", "[{", "Green"]),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, ["prompt is empty"]),
        ({**without(""), "prompt": []}, ["prompt is empty"]),
        ({**without(""), "prompt": [{"role": "user", "content": ""}]}, ["prompt is empty"]),
        ({"chosen": "a", "rejected": "b"}, ["`chosen`", "`rejected`", "no common beginning", "prompt"]),
        ({"chosen": BLUE, "rejected": GREEN}, ["`chosen`", "`rejected`", "no common beginning", "prompt"]),
        ({"chosen": "ab", "rejected": "abc"}, ["no chosen answer", "other answer", "all of `chosen`"]),
        (
            {**without(""), "prompt": "p"},
            ["`prompt` is a text", "`chosen` is a list"],
        ),
        ({**without(""), "chosen": 3}, ["`chosen` is 3", "a text", "list of messages"]),
        ({**without(""), "chosen": ["a"]}, ['message 1 of `chosen` is "a"', "an object", "`role`"]),
        (
            {**without(""), "chosen": [{"role": "asistant", "content": "a"}]},
            ["message 1 of `chosen`", "role 'asistant'", "assistant?"],
        ),
        ({**without(""), "prompt": [{"content": "a"}]}, ["message 1 of `prompt`", "role None"]),
        ({**without(""), "prompt": USER + BLUE}, ["the prompt", "ends", "the assistant"]),
        ({**without(""), "rejected": GREEN + USER}, ["the rejected answer", "role 'user'"]),
        (
            {**without(""), "prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            ["content of message 1 of `prompt`", "image", "a string", "a list"],
        ),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": 3}]},
            ["content of message 1 of `chosen` is 3", "a string", "a list"],
        ),
        (
            {**without(""), "chosen": [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]},
            ["no chosen answer", "messages", "empty"],
        ),
        ({**without(""), "tools": "{"}, ["`tools` is not JSON"]),
        ({**without(""), "tools": [3]}, ["`tools` is [3]", "list of objects"]),
        ({**without(""), "chat_template_kwargs": [3]}, ["`chat_template_kwargs` is [3]", "an object"]),
    ],
)
def test_a_row_that_can_t_be_used_is_named(row, facts):
    with raises_naming(UserError, "pairs.jsonl:3", *facts):
        preference_pairs.parse(row, "pairs.jsonl:3")

"""Conversations as prompts: where the template comes from, the tokens, the batches, and what is refused."""

import json

import numpy as np
import pytest
from chat_folders import chat_folder, tokenizer
from chat_templates import LLAMA_3
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ChatPromptInput, huggingface_tokenizer

TALK = [
    {"messages": [{"role": "user", "content": "Hi"}], "id": 7},
    {"messages": [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "2"}]},
    {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture
def folder(tmp_path):
    return chat_folder(tmp_path / "model")


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in TALK) + "\n")
    return str(path)


def make(files, tokenizer, **kwargs):
    settings = {"batch_size": 2, "prefix_len": 160, **kwargs}
    return base_hyperparams.instantiate(
        pax_fiddle.Config(ChatPromptInput, files=files, tokenizer=tokenizer, **settings)
    )


def test_a_prompt_is_the_conversation_as_the_template_writes_it(talk, folder):
    source = make(talk, str(folder))
    batch, last = drain(source)
    system = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    expected = [
        f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        f"{system}<|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>assistant\n",
        f"{system}<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ]
    assert [source.text_of_prompt(i) for i in range(3)] == expected
    for row, (text, index) in enumerate(zip(expected, (0, 1, 2), strict=True)):
        here, at = (batch, row) if row < 2 else (last, 0)
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        length = here.prefix_lengths[at]
        assert here.ids[at, :length].tolist() == ids
        assert ids.count(tokenizer().token_to_id("<|im_start|>")) == text.count("<|im_start|>")
        np.testing.assert_array_equal(here.paddings[at], np.arange(160) >= length)
        assert (here.prompt_index[at], here.eval_sample_weights[at]) == (index, 1)
    assert (last.prompt_index[1], last.eval_sample_weights[1], last.weights[1].sum()) == (-1, 0, 0)
    specs = {name: (spec.shape, spec.dtype) for name, spec in source.input_specs().items()}
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == specs


def test_the_template_may_come_from_several_places(talk, folder, tmp_path):
    short = "{% for m in messages %}{{ m.content }};{% endfor %}{{ eos_token }}"

    def text(**kwargs):
        return make(talk, str(folder), **kwargs).text_of_prompt(1)

    assert text(chat_template=short) == "Größe?;2;</s>"
    (tmp_path / "short.jinja").write_text(short + "!")
    assert text(chat_template=str(tmp_path / "short.jinja")) == "Größe?;2;</s>!"
    several = [{"name": "default", "template": "d{{ bos_token }}"}, {"name": "tool_use", "template": "t"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": several}))
    assert text() == "d"  # no bos_token is stated
    assert text(chat_template="tool_use") == "t"
    # Files of their own take precedence, as in transformers.
    (folder / "chat_template.jinja").write_text("f")
    assert text() == "f"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert text(chat_template="rag") == "r"
    with raises_naming(UserError, "ChatPromptInput '", "chat_template='rug' can't"):
        text(chat_template="rug")


def test_further_templates_that_are_no_folder_are_refused(talk, folder):
    (folder / "additional_chat_templates").write_text("t")
    with raises_naming(UserError, "ChatPromptInput '", folder / "additional_chat_templates", "folder"):
        make(talk, str(folder))


def test_a_conversation_with_tools_gets_the_template_for_tools(folder, tmp_path):
    several = {"default": "d", "tool_use": "{{ tools[0].name }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": several}))
    path = tmp_path / "tools.jsonl"
    lines = [{**TALK[0], "tools": [{"name": "add"}]}, TALK[0]]
    path.write_text("\n".join(map(json.dumps, lines)))
    source = make(str(path), str(folder))
    assert [source.text_of_prompt(i) for i in range(2)] == ["add", "d"]


def test_variables_of_the_input_and_of_a_line(talk, folder):
    template = "{{ enable_thinking }},{{ other }}"
    variables = {"enable_thinking": "mine", "other": 3}
    source = make(talk, str(folder), chat_template=template, template_variables=variables)
    assert [source.text_of_prompt(i) for i in (0, 2)] == ["mine,3", "False,3"]


def test_a_tokenizer_of_bytes_can_have_a_template_too(talk):
    source = make(talk, None, chat_template="{{ messages[0].content }}", add_generation_prompt=False)
    batch = source.get_next()
    assert source.ids_to_strings(batch.ids, batch.prefix_lengths) == ["Hi", "Größe?"]


def test_without_a_generation_prompt(talk, folder):
    assert make(talk, str(folder), add_generation_prompt=False).text_of_prompt(0).endswith("Hi<|im_end|>\n")


def test_a_line_may_ask_for_no_generation_prompt(talk, folder):
    with open(talk, "w") as file:
        file.write(json.dumps({**TALK[0], "chat_template_kwargs": {"add_generation_prompt": False}}) + "\n")
    line = make(talk, str(folder)).text_of_prompt(0)
    with open(talk, "w") as file:
        file.write(json.dumps(TALK[0]) + "\n")
    assert line == make(talk, str(folder), add_generation_prompt=False).text_of_prompt(0)


def test_a_number_of_prompts_and_several_files(talk, folder):
    batches = drain(make([talk, talk], str(folder), num_prompts=4))
    assert [batch.prompt_index.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert_same([batches[1]], drain(make([talk, talk], str(folder), num_prompts=4))[1:])
    np.testing.assert_array_equal(batches[0].ids[0], batches[1].ids[1])


def test_two_processes_share_the_conversations(talk, folder):
    shares = [make(talk, str(folder), batch_size=1, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    assert_same(stack_processes(*map(drain, shares)), drain(make(talk, str(folder))))


def test_a_position_belongs_to_the_prompts_as_they_were_rendered(talk, folder):
    source = make(talk, str(folder))
    take(source, 1)
    resumed = make(talk, str(folder))
    resumed.set_state(source.get_state())
    assert_same(drain(resumed), drain(source))
    with pytest.raises(ValueError, match=r"prompts was \d+ and is \d+"):
        make(talk, str(folder), chat_template=LLAMA_3).set_state(source.get_state())


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ('{"messages"', ["not JSON"]),
        ("[1]", ["not a conversation", '{"messages": ']),
        ('{"message": []}', ["not a conversation", "it has message"]),
        ('{"messages": []}', ["`messages` is []", "list of objects"]),
        ('{"messages": ["Hi"]}', ['`messages` is ["Hi"]', "list of objects"]),
        ('{"messages": [{}], "tools": 3}', ["`tools` is 3"]),
        ('{"messages": [{}], "chat_template_kwargs": [3]}', ["`chat_template_kwargs` is [3]"]),
        ('{"messages": [{"role": "user"}]}', ["chat template 'default'", "can't render"]),
        (
            '{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"messages": []}}',
            ["messages", "an entry", "the line", "variable"],
        ),
        (
            r'{"messages": [{"role": "user", "content": "Hi \ud83d"}]}',
            ["surrogate pair"],
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "long " * 40}]}),
            ["the conversation", "tokens", "prefix_len=160"],
        ),
    ],
)
def test_a_line_that_can_t_be_used_is_named(line, facts, talk, folder):
    with open(talk, "w") as file:
        file.write(json.dumps(TALK[0]) + "\n" + line + "\n")
    with raises_naming(UserError, "ChatPromptInput '", "talk.jsonl:2", *facts):
        drain(make(talk, str(folder)))


@pytest.mark.parametrize(
    ("kwargs", "facts"),
    [
        ({"start": "bos"}, ["'input': start='bos'", "leave it out", "chat template"]),
        ({"is_training": True}, ["'train': is_training", "decode"]),
        ({"prefix_len": 0}, ["'input': prefix_len=0"]),
        ({"chat_template": "{{"}, ["not a chat", "template: line 1"]),
        ({"tokenizer": None}, ["ByteTokenizer", "no chat template"]),
    ],
)
def test_settings_that_can_t_be_used(kwargs, facts, talk, folder):
    with raises_naming(UserError, *facts):
        make(**{"files": talk, "tokenizer": str(folder), **kwargs})


def test_a_tokenizer_that_reads_special_tokens_as_text_is_refused(talk, folder):
    given = huggingface_tokenizer.HuggingFaceTokenizer(folder, encode_special_tokens=True)
    with raises_naming(UserError, "encode_special_tokens=True", "special tokens", "plain text"):
        make(talk, given)


def test_a_token_that_the_model_lacks_is_refused(talk, folder):
    source = make(talk, str(folder))
    source.limit_vocabulary(256)
    with raises_naming(UserError, "talk.jsonl:1", "token 259", "vocabulary", "0 to 255"):
        drain(source)

"""Conversations for training: which labels count, how they are packed, and which rows are refused."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import pickle
import sys

import numpy as np
import pytest
from chat_goldens import DATA, encoded_of, make, tokenizer_of
from facts import assert_names, raises_naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_helpers import assert_same, drain, stack_processes, take
from tokenizers import Tokenizer, models

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import HuggingFaceTokenizer

TOKENIZER = HuggingFaceTokenizer(tokenizer_of("chatml"))
CHATML = str(DATA / "templates" / "chatml.jinja")
# The roles are special tokens of one token, and nothing else is written.
SHORT = (
    "<|begin_of_text|>{% for m in messages %}{{ '<|eom_id|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# The same without marks.
UNMARKED_SHORT = (
    "<|begin_of_text|>{% for m in messages %}{{ '<|eom_id|>' + m.content }}{% if m.role == 'assistant' %}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|eom_id|>' }}{% endif %}"
)


def user(text, **entries):
    return {"role": "user", "content": text, **entries}


def own(text, **entries):
    return {"role": "assistant", "content": text, **entries}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def talk(*messages, **entries):
    return {"messages": list(messages), **entries}


@pytest.fixture
def chats(tmp_path):
    rows = [talk(user("x" * (i % 5 + 1)), own("yes" * (i % 7 + 1)), user("and?"), own(f"ok{i}🙂")) for i in range(23)]
    return write(tmp_path / "chats.jsonl", *rows)


def counted_texts(batches):
    """The text of the labels with weight 1, by segment."""
    found = []
    for batch in batches:
        for labels, weights, numbers in zip(batch.labels, batch.weights, batch.segment_ids, strict=True):
            assert not weights[numbers == 0].any()
            for number in range(1, numbers.max() + 1):
                here = (numbers == number) & (weights == 1)
                found.append(TOKENIZER.spell(labels[here]))
    return found


def test_the_rows_of_a_small_file(tmp_path):
    path = write(tmp_path / "a.jsonl", talk(user("hi"), own("ok")), talk(user("a"), own("b")))
    (batch,) = drain(make(path, chat_template=SHORT, seq_len=12, batch_size=1))
    known = TOKENIZER.vocabulary
    bos, role, end = (known[name] for name in ("<|begin_of_text|>", "<|eom_id|>", "<|eot_id|>"))
    hi, ok, a, b = (TOKENIZER.encode(text, "").tolist() for text in (b"hi", b"ok", b"a", b"b"))
    first, second = [bos, role, *hi, role, *ok, end], [bos, role, *a, role, *b, end]
    padding = [0] * (12 - len(first) - len(second) + 2)
    assert batch.ids[0].tolist() == [*first[:-1], *second[:-1], *padding]
    assert batch.labels[0].tolist() == [*first[1:], *second[1:], *padding]
    weights = [0] * (1 + len(hi) + 1) + [1] * (len(ok) + 1) + [0, 0, 0, 1, 1, *padding]
    assert batch.weights[0].tolist() == weights
    sizes = (len(first) - 1, len(second) - 1, len(padding))
    assert batch.segment_ids[0].tolist() == [1] * sizes[0] + [2] * sizes[1] + [0] * sizes[2]
    assert batch.segment_pos[0].tolist() == [*range(sizes[0]), *range(sizes[1]), *padding]
    np.testing.assert_array_equal(batch.paddings, batch.segment_ids == 0)
    np.testing.assert_array_equal(batch.eval_sample_weights, [1])


@pytest.mark.parametrize("name", ["template", "self", "is_marked"])
def test_a_variable_of_the_template_may_have_any_name(name, tmp_path):
    path = write(
        tmp_path / "a.jsonl", talk(user("hi"), own("ok"), chat_template_kwargs={name: 1}), talk(user("a"), own("b"))
    )
    batches = drain(make(path, chat_template=SHORT, seq_len=12))
    assert counted_texts(batches) == ["ok<|eot_id|>", "b<|eot_id|>"]
    assert_same(drain(make(path, chat_template=SHORT, seq_len=12, template_variables={name: 2})), batches)


def test_batches_are_what_input_specs_says(chats):
    source = make(chats, seq_len=160)
    specs = {name: (spec.shape, spec.dtype) for name, spec in source.input_specs().items()}
    for batch in drain(source):
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == specs


def test_a_saved_position_continues_with_the_same_batches(chats):
    source = make(chats, seq_len=160, is_training=True, input_random_seed=3)
    take(source, 5)
    resumed = make(chats, seq_len=160, is_training=True, input_random_seed=3)
    resumed.set_state(source.get_state())
    parts = {"seq_len": 160, "batch_size": 1, "is_training": True, "input_random_seed": 3, "num_infeed_hosts": 2}
    shares = [make(chats, infeed_host_index=i, **parts) for i in (0, 1)]
    for share in shares:
        share.set_state(source.get_state())
    expected = take(source, 9)
    assert_same(take(resumed, 9), expected)
    assert_same(stack_processes(*(take(share, 9) for share in shares)), expected)
    for changed, named in (
        ({"turns": "last"}, "turns was all and is last"),
        ({"chat_template": CHATML}, r"chat_template was \w+ and is \w+"),
        ({"too_long": "drop"}, "too_long was error and is drop"),
    ):
        with pytest.raises(ValueError, match=named):
            make(chats, seq_len=160, is_training=True, input_random_seed=3, **changed).set_state(source.get_state())


def test_turns_says_which_messages_count(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        talk(user("a"), own("one"), user("b"), own("two")),
        talk(user("a"), own("one"), user("b"), own("two"), turns="all"),
        talk(user("a"), own("one"), user("b"), own("two"), user("c"), turns="last"),
    )
    for template, end in ((None, "<|im_end|>"), (CHATML, "<|im_end|>\n")):
        fields = {} if template is None else {"chat_template": template}
        found = counted_texts(drain(make(path, turns="last", seq_len=128, packing="pad", **fields)))
        assert found == [f"two{end}", f"one{end}two{end}", f"two{end}"]
        found = counted_texts(drain(make(path, seq_len=128, packing="pad", **fields)))
        assert found == [f"one{end}two{end}", f"one{end}two{end}", f"two{end}"]


# A template as those of reasoning models: it drops the reasoning of all answers but the last.
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}{{ m.reasoning_content }}:{% endif %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED_DROPS = DROPS.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_templates_that_drop_earlier_reasoning_need_marks(tmp_path):
    answers = [own("one", reasoning_content="think"), own("two", reasoning="hm")]
    path = write(tmp_path / "a.jsonl", talk(user("a"), answers[0], user("b"), answers[1]))
    assert counted_texts(drain(make(path, chat_template=DROPS))) == ["one<|im_end|>hm:two<|im_end|>"]
    assert counted_texts(drain(make(path, chat_template=DROPS, turns="last"))) == ["hm:two<|im_end|>"]
    assert counted_texts(drain(make(path, chat_template=UNMARKED_DROPS, turns="last"))) == ["hm:two<|im_end|>"]
    with raises_naming(
        UserError, "a.jsonl:1:", "message 2", "character 50", "'think:one<", "'one<", "{% generation %}"
    ):
        drain(make(path, chat_template=UNMARKED_DROPS))


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        # The prompt ends with an empty reasoning, which the answer lacks.
        (
            UNMARKED_DROPS.replace("assistant\n", "assistant\n<think>"),
            ["generation prompt", "before message 2", "message 2 begins"],
        ),
        (
            "{% if messages[-1].role == 'user' %}{{ raise_exception('answer me') }}{% endif %}" + UNMARKED_DROPS,
            ["message 2", "assistant's", "alone", "answer me)"],
        ),
        (
            "{% macro m(x) %}a{% generation %}{{ x }}{% endgeneration %}{% endmacro %}{{ m('b') }}",
            ["a macro", "{% set %}"],
        ),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", ["text begins", "the assistant's"]),
        ("a{% generation %}{% endgeneration %}", ["no label", "chat_template", "nothing between"]),
        ("{{ messages[0].content }}", ["no label", "chat_template", "for the assistant"]),
        ("a{{ strftime_now('%Y') }}", ["template", "current date", "set date"]),
    ],
)
def test_templates_that_don_t_tell_the_assistant_s_text_are_refused(template, facts, tmp_path):
    path = write(tmp_path / "a.jsonl", "", talk(user("a"), own("b")))
    with raises_naming(UserError, "ChatInput 'chats':", "a.jsonl:2:", *facts):
        drain(make(path, chat_template=template))


def test_marks_of_the_last_turn_that_can_t_be_told_are_refused(tmp_path):
    template = "{{ messages | length }}{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    path = write(tmp_path / "a.jsonl", talk(user("a"), own("b"), user("c"), own("d")))
    with raises_naming(UserError, "turns='last'", "marks 1", "2 messages", "assistant"):
        drain(make(path, chat_template=template, turns="last"))


@pytest.mark.parametrize(
    ("template", "limits", "facts"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            {"max_render_seconds": 0.05},
            "0.05 s",
        ),
        ("{{ 'x'.center(10**11) }}", {}, "max_rendered_chars"),
        ("{{ 'x' * 101 }}", {"max_rendered_chars": 100}, "max_rendered_chars=100"),
    ],
)
def test_a_template_that_reaches_a_limit_is_refused(template, limits, facts, tmp_path):
    path = write(tmp_path / "a.jsonl", talk(user([{"type": "text", "text": "a"}]), own("b")))
    with raises_naming(UserError, "ChatInput 'chats':", "a.jsonl:1:", facts):
        drain(make(path, chat_template=template, **limits))


def test_the_date_is_that_of_the_settings(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    path = write(tmp_path / "a.jsonl", talk(user("a"), own("b")))
    (batch,) = drain(make(path, chat_template=template, date="2024-07-26"))
    inside = batch.segment_ids[0] > 0
    assert TOKENIZER.spell([batch.ids[0, 0], *batch.labels[0][inside]]) == "26 Jul 2024b"


def test_contents_in_parts_are_their_texts(tmp_path):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    path = write(tmp_path / "a.jsonl", talk(user(parts("a")), own(parts("one", "two"))))
    plain = write(tmp_path / "b.jsonl", talk(user("a"), own("one\ntwo")))
    assert_same(drain(make(path)), drain(make(plain)))
    for template in ("{{ m.content | trim }}", "{{ m.content | tojson }}"):
        text = "a{% for m in messages %}{% generation %}" + template + "{% endgeneration %}{% endfor %}"
        (found,) = counted_texts(drain(make(path, chat_template=text)))
        reads_lists = "tojson" in template
        assert found == ('[{"type": "text", "text": "a"}]' * reads_lists or "a") + (
            '[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]' * reads_lists or "one\ntwo"
        )


def test_tools_may_be_json_text(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = talk(user("a"), own("b"))
    path = write(tmp_path / "a.jsonl", {**row, "tools": tools}, {**row, "tools": json.dumps(tools)})
    first, second = encoded_of(make(path, chat_template=str(DATA / "templates" / "llama_3.jinja"), seq_len=512))
    assert first.tokens.tolist() == second.tokens.tolist()
    assert '"name": "add"' in TOKENIZER.spell(first.tokens)


def test_compressed_lines_are_those_rows(chats, tmp_path):
    whole = drain(make(chats, seq_len=256))
    path = tmp_path / "packed.jsonl.gz"
    path.write_bytes(gzip.compress(chats.read_bytes()))
    assert_same(drain(make(path, seq_len=256)), whole)
    assert sum(batch.weights.sum() for batch in whole) > 23
    path.write_bytes(path.read_bytes()[:-9])
    with raises_naming(UserError, path, "is damaged"):
        drain(make(path, seq_len=256))


def test_parquet_files_are_those_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rows = [
        {**talk(user("1?"), call, {"role": "tool", "content": "3"}, own("3 🎉")), "id": 7},
        {**talk(user("b"), own("c"), turns="last"), "id": 8},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    lines = write(tmp_path / "a.jsonl", *rows)
    fields = {"chat_template": str(DATA / "templates" / "llama_3_marked.jinja"), "seq_len": 128}
    assert_same(drain(make(path, **fields)), drain(make(lines, **fields)))
    parquet.write_table(pyarrow.Table.from_pylist([rows[1], talk(user("?"))]), path)
    with raises_naming(UserError, "a.parquet row group 1, row 2:", "no message", "assistant's"):
        drain(make(path, **fields))
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), path)
    with raises_naming(UserError, "a.parquet row group 1, row 1", "not a conversation", "it has text"):
        drain(make(path, **fields))
    path.write_bytes(b"PAR1 and nothing else")
    with raises_naming(UserError, path, "can't be read", "as Parquet"):
        drain(make(path, **fields))
    path.write_bytes(lines.read_bytes())
    with raises_naming(UserError, path, "can't be read", "as Parquet"):
        make(path, **fields)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1....PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises_naming(UserError, f"{path}:", "pyarrow", "pip install 'spmd-trainer[data]'"):
        drain(make(path))


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ('{"messages": [', ["not JSON"]),
        ("[]", ["not a conversation", '{"messages": ']),
        ({"conversations": []}, ["not a conversation", "it has conversations"]),
        ({"messages": "hi"}, ['`messages` is "hi"', "list of objects"]),
        ({"messages": []}, ["`messages` is []"]),
        ({"messages": [3]}, ["`messages` is [3]"]),
        (talk(user("a")), ["no message", "assistant's"]),
        (
            talk(user("a"), {"role": "asistant", "content": "b"}),
            ["message 2", "unknown role 'asistant'", "assistant?"],
        ),
        (talk({"content": "a"}, own("b")), ["message 1", "unknown role None", "assistant, developer"]),
        (talk(user(""), own("b")), ["message 1 (user)", "no content"]),
        (talk(user("a"), own(" \n")), ["message 2 (assistant)", "no content"]),
        (talk(user("a"), {"role": "assistant"}), ["message 2 (assistant)", "no content"]),
        (talk(user([]), own("b")), ["message 1 (user)", "no content"]),
        (talk(user(3), own("b")), ["content of message 1 (user) is 3", "a string", "a list"]),
        (talk(user([{"type": "image", "url": "x"}]), own("b")), ["content of message 1 (user) is [", "image"]),
        (talk({"role": "tool"}, own("b")), ["message 1 (tool)", "no content"]),
        (talk(user("a"), own("b"), turns="lst"), ["turns='lst'", "'all'", "'last'", "last?"]),
        (talk(user("a"), own("b"), tools="[{"), ["`tools` is not JSON"]),
        (talk(user("a"), own("b"), chat_template_kwargs={"tools": []}), ["tools", "an entry", "the line"]),
        (
            talk(user("a"), own("b"), chat_template_kwargs={"add_generation_prompt": True}),
            ["add_generation_prompt", "for prompts"],
        ),
        (talk(user("\ud83d"), own("b")), ["surrogate pair"]),
        (talk(user("a"), own("b", tool_calls=[{}], content=None)), ["can't render"]),
        (
            talk(user("a" * 90), own("b")),
            ["the conversation", "tokens", "seq_len + 1 = 65", "raise seq_len"],
        ),
    ],
)
def test_a_row_that_can_t_be_used_is_named(row, facts, tmp_path):
    path = write(tmp_path / "bad.jsonl", talk(user("a"), own("b")), "", row)
    with raises_naming(UserError, "ChatInput 'chats':", "bad.jsonl:3", *facts):
        drain(make(path))


def test_a_tool_may_return_nothing_and_further_roles_can_be_named(tmp_path):
    path = write(
        tmp_path / "a.jsonl", talk({"role": "tool", "content": ""}, {"role": "critic", "content": "x"}, own("b"))
    )
    with raises_naming(UserError, "message 2", "unknown role 'critic'", "other_roles=[...]"):
        drain(make(path))
    assert counted_texts(drain(make(path, other_roles=["critic"]))) == ["b<|im_end|>"]


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"turns": "first"}, ["'chats': turns='first'", "'all'", "'last'"]),
        ({"too_long": "crop"}, ["'chats': too_long='crop'", "'error'", "'cut'", "'drop'"]),
        ({"tokenizer": None}, ["a ByteTokenizer", "characters"]),
        ({"date": "26 Jul"}, ["'chats': date='26 Jul'", "year-month-day"]),
        ({"start": "bos"}, ["'chats': start='bos'", "leave it out"]),
        ({"seq_len": 0}, ["'chats': seq_len=0"]),
        ({"template_variables": {"add_generation_prompt": True}}, ["add_generation_prompt", "for prompts"]),
        ({"chat_template": "{% generation %}"}, ["not a chat", "template: line 1"]),
    ],
)
def test_settings_that_can_t_be_used(fields, facts, chats):
    with raises_naming(UserError, "ChatInput 'chats':", *facts):
        make(chats, **fields)


def test_a_token_that_the_model_lacks_is_refused(chats):
    source = make(chats)
    source.limit_vocabulary(200)
    with raises_naming(UserError, "chats.jsonl:1", "token 343", "vocabulary", "0 to 199"):
        drain(source)


def test_too_long_conversations_are_dropped_or_cut_and_counted(tmp_path, caplog):
    rows = [talk(user("a"), own("b")), talk(user("a"), own("yes " * 40)), talk(user("a"), own("c"))]
    path = write(tmp_path / "a.jsonl", *rows)
    fields = {"chat_template": SHORT, "seq_len": 30}
    source = make(path, too_long="drop", **fields)
    with caplog.at_level(logging.WARNING):
        dropped = drain(source)
        cut = drain(make(path, too_long="cut", **fields))
    first, second = (record.getMessage() for record in caplog.records if "a.jsonl:2" in record.getMessage())
    assert_names(first, "tokens", "more than seq_len + 1 = 31", "left out")
    assert_names(second, "tokens", "more than seq_len + 1 = 31", "cut")
    assert source.skipped == {"documents": 1}
    assert sorted(counted_texts(dropped)) == ["b<|eot_id|>", "c<|eot_id|>"]
    found = sorted(counted_texts(cut))
    assert [found[0], found[1]] == ["b<|eot_id|>", "c<|eot_id|>"]
    assert ("yes " * 40).startswith(found[2])
    whole = encoded_of(make(path, chat_template=SHORT, seq_len=512))[1]
    assert sum(batch.weights.sum() for batch in cut) == 4 + whole.counted[:31].sum()


def test_what_is_left_of_a_conversation_must_have_an_answer(tmp_path):
    path = write(tmp_path / "a.jsonl", talk(user("a" * 50), own("b")))
    with raises_naming(UserError, "a.jsonl:1:", "too_long='cut'", "seq_len + 1 = 31", "assistant"):
        drain(make(path, chat_template=SHORT, seq_len=30, too_long="cut"))
    with raises_naming(UserError, "no record that can be used", "1 record", "left out"):
        drain(make(path, chat_template=SHORT, seq_len=30, too_long="drop"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(lambda text: f"t{text}t")
MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    talks=st.lists(MESSAGES, min_size=1, max_size=8),
    batch_size=st.integers(1, 3),
    seq_len=st.integers(60, 150),
    turns=st.sampled_from(["all", "last"]),
    template=st.sampled_from([SHORT, UNMARKED_SHORT]),
)
def test_every_label_of_the_assistant_counts_once_and_no_other(talks, batch_size, seq_len, turns, template, tmp_path):
    talks = [[*messages, ("assistant", "tdone")] for messages in talks]
    rows = [talk(*({"role": role, "content": text} for role, text in messages)) for messages in talks]
    path = write(tmp_path / "a.jsonl", *rows)
    source = make(path, chat_template=template, seq_len=seq_len, batch_size=batch_size, turns=turns, too_long="drop")
    whole = encoded_of(make(path, chat_template=template, seq_len=4096, turns=turns))
    if not any(len(one) <= seq_len + 1 for one in whole):
        return
    expected_counted, expected_all = [], []
    for messages, one in zip(talks, whole, strict=True):
        if len(one.tokens) > seq_len + 1:
            continue
        own_texts = [text + "<|eot_id|>" for role, text in messages if role == "assistant"]
        expected_counted.append("".join(own_texts[-1:] if turns == "last" else own_texts))
        expected_all.append(one.tokens[1:].tolist())
    batches = drain(source)
    assert sorted(counted_texts(batches)) == sorted(expected_counted)
    found_all = [
        labels[numbers == number].tolist()
        for batch in batches
        for labels, numbers in zip(batch.labels, batch.segment_ids, strict=True)
        for number in range(1, numbers.max() + 1)
    ]
    assert sorted(found_all) == sorted(expected_all)
    assert source.skipped == {"documents": sum(len(one) > seq_len + 1 for one in whole)}


def test_a_copied_tokenizer_encodes_alike():
    texts, wheres = ["a 🙂", "<|im_end|> b"], ["x", "y"]
    expected = TOKENIZER.encode_with_offsets(texts, wheres)
    for other in (copy.deepcopy(TOKENIZER), pickle.loads(pickle.dumps(TOKENIZER))):
        for (ids, offsets), (same_ids, same_offsets) in zip(
            expected, other.encode_with_offsets(texts, wheres), strict=True
        ):
            np.testing.assert_array_equal(ids, same_ids)
            np.testing.assert_array_equal(offsets, same_offsets)
            assert offsets[-1, 1] in (3, 12)


def test_a_character_without_a_token_is_refused_with_its_text():
    lossy = HuggingFaceTokenizer(Tokenizer(models.BPE({"a": 0}, [])), eos="a")
    with raises_naming(UserError, "y:", "no token", "'é'"):
        lossy.encode_with_offsets(["a", "é"], ["x", "y"])

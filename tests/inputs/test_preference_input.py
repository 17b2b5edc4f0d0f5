"""`PreferenceInput`: tokens and weights of pairs, batches, the reference, and what is refused."""

import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_folders import chat_folder, tokenizer
from chat_templates import CHATML
from facts import assert_names, raises_naming
from input_helpers import drain, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import huggingface_tokenizer
from spmd_trainer.inputs.preferences import PreferenceInput

SYSTEM = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
HI, GO = ([{"role": "user", "content": text}] for text in ("Hi", "Go"))


def said(text):
    return [{"role": "assistant", "content": text}]


TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green and red."},
    {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3</s>"},
]
TALKS = [
    {"prompt": HI, "chosen": said("Hello!"), "rejected": said("No.")},
    {"chosen": HI + said("a") + GO + said("b"), "rejected": HI + said("a") + GO + said("cc")},
]


@pytest.fixture
def folder(tmp_path):
    return str(chat_folder(tmp_path / "model"))


def write(tmp_path, rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def make(files, tokenizer, **kwargs):
    settings = {"name": "pairs", "batch_size": 2, "seq_len": 160, "start": "none", **kwargs}
    return base_hyperparams.instantiate(
        pax_fiddle.Config(PreferenceInput, files=files, tokenizer=tokenizer, **settings)
    )


def counted(rows, index):
    """The whole text of a row, and the part that counts."""
    inside = rows.paddings[index] == 0
    ids = [*rows.ids[index][inside][:1], *rows.labels[index][inside]]
    answer = rows.labels[index][rows.weights[index] > 0]
    spell = tokenizer()
    return spell.decode(ids, skip_special_tokens=False), spell.decode(answer, skip_special_tokens=False)


def test_texts_end_with_end_of_text(tmp_path, folder):
    (batch,) = drain(make(write(tmp_path, TEXTS), folder))
    assert counted(batch.chosen, 0) == ("The sky is blue.</s>", " blue.</s>")
    assert counted(batch.rejected, 0) == ("The sky is green and red.</s>", " green and red.</s>")
    assert counted(batch.rejected, 1) == ("1 + 1 = 3</s>", " 3</s>")


def test_the_token_before_a_text(tmp_path, folder):
    (batch,) = drain(make(write(tmp_path, TEXTS), folder, start="bos"))
    assert counted(batch.chosen, 0) == ("<s>The sky is blue.</s>", " blue.</s>")


def test_conversations_are_as_the_template_writes_them(tmp_path, folder):
    (batch,) = drain(make(write(tmp_path, TALKS), folder))
    first = f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert counted(batch.chosen, 0) == (f"{first}Hello!<|im_end|>\n", "Hello!<|im_end|>\n")
    assert counted(batch.rejected, 0) == (f"{first}No.<|im_end|>\n", "No.<|im_end|>\n")
    second = f"{first}a<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    assert counted(batch.chosen, 1) == (f"{second}b<|im_end|>\n", "b<|im_end|>\n")
    assert counted(batch.rejected, 1) == (f"{second}cc<|im_end|>\n", "cc<|im_end|>\n")


def test_batches_are_rows_of_a_language_model(tmp_path, folder):
    source = make(write(tmp_path, [*TEXTS, *TALKS, TEXTS[0]]), folder, batch_size=3)
    first, last = drain(source)
    specs = jax.tree.map(lambda x: (x.shape, x.dtype), source.input_specs())
    for batch in (first, last):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == specs
    assert last.eval_sample_weights.tolist() == [1, 1, 0]
    filled = sum((side.segment_ids > 0).sum() for batch in (first, last) for side in (batch.chosen, batch.rejected))
    assert source.fill == filled / (5 * 2 * source.seq_len)
    assert (first.pair_index.tolist(), last.pair_index.tolist()) == ([0, 1, 2], [3, 4, -1])
    assert [rows.weights[2].sum() for rows in (last.chosen, last.rejected)] == [0, 0]
    rows = first.rejected
    for row in range(3):
        length = int((1 - rows.paddings[row]).sum())
        np.testing.assert_array_equal(rows.ids[row, 1:length], rows.labels[row, : length - 1])
        np.testing.assert_array_equal(rows.segment_pos[row, :length], np.arange(length))
        np.testing.assert_array_equal(rows.segment_ids[row], 1 - rows.paddings[row])
        assert not rows.ids[row, length:].any()
        assert not rows.weights[row, length:].any()


def test_an_epoch_has_each_pair_once_and_processes_share_it(tmp_path, folder):
    rows = [{"prompt": f"{i}:", "chosen": " a", "rejected": " b"} for i in range(6)]
    path, settings = write(tmp_path, rows), {"is_training": True, "input_random_seed": 3}
    whole = take(make(path, folder, **settings), 6)
    seen = [counted(batch.chosen, row)[0] for batch in whole for row in (0, 1)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == [f"{i}: a</s>" for i in range(6)]
    assert seen[:6] != seen[6:]
    shares = [
        take(make(path, folder, batch_size=1, num_infeed_hosts=2, infeed_host_index=index, **settings), 6)
        for index in (0, 1)
    ]
    for batch, *parts in zip(whole, *shares, strict=True):
        together = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        jax.tree.map(np.testing.assert_array_equal, batch, together)


def test_a_position_belongs_to_the_pairs(tmp_path, folder):
    source = make(write(tmp_path, TALKS), folder, is_training=True)
    take(source, 1)
    state = source.get_state()
    again = make(write(tmp_path, TALKS), folder, is_training=True)
    again.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, take(again, 1), take(source, 1))
    changed = make(write(tmp_path, TALKS), folder, is_training=True, chat_template=CHATML.replace("helpful", "helpfuI"))
    assert changed.pairs_checksum != source.pairs_checksum
    with raises_naming(ValueError, "other batches", "chat_template was"):
        changed.set_state(state)


def test_the_reference(tmp_path, folder):
    logps = np.array([[-1.5, -2.25], [-300.7, -1e-3]], np.float32)
    path = write(tmp_path, TEXTS)
    source = make(path, folder, reference="file", batch_size=3)
    assert source.input_specs().chosen.reference_logps.shape == (3,)
    with raises_naming(UserError, "no reference log-probabilities", "job_log_dir"):
        source.get_next()
    with pytest.raises(ValueError, match=r"shape \(1, 2\), and there are 2 pairs"):
        source.use_reference(logps[:1])
    assert source.lacks_reference
    source.use_reference(logps)
    assert not source.lacks_reference
    batch = source.get_next()
    for column, rows in enumerate((batch.chosen, batch.rejected)):
        np.testing.assert_array_equal(rows.reference_logps.view(np.float32)[:2], logps[:, column])
    assert source.pairs_checksum == make(path, folder, batch_size=1, is_training=True).pairs_checksum
    assert source.pairs_checksum != make(path, folder, start="bos").pairs_checksum


def test_a_pair_without_a_reference_is_refused_and_rows_that_fill_up_need_none(tmp_path, folder):
    short, long = TEXTS[1], {**TEXTS[0], "chosen": " blue" * 40}
    source = make(write(tmp_path, [long, short]), folder, reference="file", too_long="drop", batch_size=2)
    source.use_reference(np.array([[np.nan, np.nan], [-1, -2]], np.float32))
    (batch,) = drain(source)
    assert batch.pair_index.tolist() == [1, -1]
    assert batch.chosen.reference_logps.view(np.float32).tolist() == [-1, 0]
    source = make(write(tmp_path, TEXTS), folder, reference="file")
    source.use_reference(np.array([[-1, -2], [np.nan, -1]], np.float32))
    with raises_naming(UserError, "'pairs'", "pair 1", "no reference log-probabilities", "folder reference_logps"):
        source.get_next()


def test_pairs_that_are_too_long(tmp_path, folder, caplog):
    path = write(tmp_path, [TEXTS[1], TEXTS[0]])
    longest = len("The sky is green and red.") + 1
    assert len(drain(make(path, folder, seq_len=longest - 1))) == 1
    with raises_naming(UserError, "pairs.jsonl:2:", f"{longest} tokens", f"seq_len={longest - 2}"):
        drain(make(path, folder, seq_len=longest - 2))
    source = make(path, folder, seq_len=longest - 2, too_long="drop")
    assert counted(source.get_next().chosen, 0)[0] == "1 + 1 = 2</s>"
    assert_names(caplog.text, "pairs.jsonl:2", f"{longest} tokens", f"seq_len={longest - 2}", "left out")
    with raises_naming(UserError, "no record that can be used", "2 records", "left out"):
        drain(make(path, folder, seq_len=3, too_long="drop"))
    with raises_naming(UserError, "no record can be used", "the last is", "pairs.jsonl:"):
        make(path, folder, seq_len=3, too_long="drop", is_training=True).get_next()


def test_a_template_that_ends_the_prompt_in_another_way(tmp_path, folder, caplog):
    """As some published ones do: an empty thought that is left out before an answer."""
    path = write(tmp_path, TALKS[:1])
    template = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>' }}")
    (batch,) = drain(make(path, folder, chat_template=template))
    assert counted(batch.chosen, 0)[1] == "Hello!<|im_end|>\n"
    assert_names(caplog.text, "pairs.jsonl:1", "the prompt", "other tokens", "answer")
    other = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with raises_naming(UserError, "pairs.jsonl:1:", "the prompt", "when an answer", "another chat_template"):
        drain(make(path, folder, chat_template=other))


def test_contents_that_are_lists_of_texts(tmp_path, folder):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    row = {
        "prompt": [{"role": "user", "content": parts("Hi")}],
        "chosen": said(parts("Hello", "you")),
        "rejected": said("No."),
    }
    (batch,) = drain(make(write(tmp_path, [row]), folder))
    first = f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert counted(batch.chosen, 0) == (f"{first}Hello\nyou<|im_end|>\n", "Hello\nyou<|im_end|>\n")
    assert counted(batch.rejected, 0) == (f"{first}No.<|im_end|>\n", "No.<|im_end|>\n")
    # A template that reads lists gets them.
    reads = (
        "{% for m in messages %}{{ m.role }}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
    )
    (batch,) = drain(make(write(tmp_path, [row]), folder, chat_template=reads))
    assert counted(batch.chosen, 0) == ("userHi;assistantHello;", "assistantHello;")


def test_parquet_files_are_those_rows(tmp_path, folder):
    rows = [{"prompt": HI, "chosen": said("a"), "rejected": said("b"), "score": i} for i in range(3)]
    rows[1]["prompt"] = [{**HI[0], "name": "Ann"}]  # null in the other rows
    path = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    found = drain(make(str(path), folder))
    for batch, expected in zip(found, drain(make(write(tmp_path, rows), folder)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with raises_naming(UserError, "pairs.parquet row group 1, row 1:", "no `chosen`", "it has text"):
        drain(make(str(path), folder))


def test_the_date_is_that_of_the_settings(tmp_path, folder):
    template = f"{{{{ strftime_now('%d %b %Y') }}}}{CHATML}"
    (batch,) = drain(make(write(tmp_path, TALKS[:1]), folder, chat_template=template, date="2024-07-26"))
    assert counted(batch.chosen, 0)[0].startswith(f"26 Jul 2024{SYSTEM}")


def test_variables_of_a_pair_may_have_any_name(tmp_path, folder):
    names = {"self": 1, "template": 2, "is_marked": 3}
    (batch,) = drain(make(write(tmp_path, [{**TALKS[0], "chat_template_kwargs": names}]), folder))
    (expected,) = drain(make(write(tmp_path, TALKS[:1]), folder))
    jax.tree.map(np.testing.assert_array_equal, batch, expected)


def test_roles_that_the_template_knows(tmp_path, folder):
    path = write(tmp_path, [{**TALKS[0], "prompt": [{"role": "critic", "content": "Hi"}]}])
    with raises_naming(UserError, "pairs.jsonl:1:", "role 'critic'", "other_roles=[...]"):
        drain(make(path, folder))
    (batch,) = drain(make(path, folder, other_roles=["critic"]))
    assert "<|im_start|>critic\nHi<|im_end|>" in counted(batch.chosen, 0)[0]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"prompt": "p", "chosen": "a"}, ["no rejected answer"]),
        ({"prompt": "p", "chosen": "a", "rejected": "a</s>"}, ["the same tokens"]),
        ({"prompt": HI, "chosen": said("a"), "rejected": [{"role": "boss", "content": "b"}]}, ["role 'boss'"]),
        ({"prompt": "p", "chosen": "\ud83d", "rejected": "b"}, ["surrogate pair"]),
        (
            {**TALKS[0], "chat_template_kwargs": {"messages": []}},
            ["messages", "an entry", "the line", "variable"],
        ),
        ({**TALKS[0], "prompt": [{"role": "user", "content": {"a": 1}}]}, ["content of message 1 of `prompt`"]),
    ],
)
def test_a_pair_that_can_t_be_used_is_named(row, facts, tmp_path, folder):
    with raises_naming(UserError, "PreferenceInput 'pairs':", "pairs.jsonl:2:", *facts):
        drain(make(write(tmp_path, [TEXTS[0], row]), folder))


@pytest.mark.parametrize(
    ("kwargs", "facts"),
    [
        ({"seq_len": 0}, ["'pairs': seq_len=0"]),
        ({"too_long": "cut"}, ["'pairs': too_long='cut'", "'error'", "'drop'"]),
        ({"reference": "live"}, ["'pairs': reference='live'", "'file'", "None"]),
        ({"chat_template": "{{"}, ["not a chat", "template: line 1"]),
        ({"date": "26 Jul"}, ["'pairs': date='26 Jul'", "year-month-day"]),
        (
            {"chat_template": f"{{{{ strftime_now('%Y') }}}}{CHATML}"},
            ["pairs.jsonl:1:", "current date", "set date"],
        ),
    ],
)
def test_settings_that_are_refused(kwargs, facts, tmp_path, folder):
    with raises_naming(UserError, *facts):
        drain(make(write(tmp_path, TALKS), folder, **kwargs))


def test_templates_need_special_tokens(tmp_path, folder):
    plain = huggingface_tokenizer.HuggingFaceTokenizer(folder, encode_special_tokens=True)
    assert drain(make(write(tmp_path, TEXTS), plain))
    with pytest.raises(UserError, match=r"pairs.jsonl:1: .*encode_special_tokens=True"):
        drain(make(write(tmp_path, TALKS), plain))


def test_a_token_that_the_model_lacks(tmp_path, folder):
    source = make(write(tmp_path, TALKS), folder)
    source.limit_vocabulary(256)
    with raises_naming(UserError, "pairs.jsonl:1", "token 259", "vocabulary", "0 to 255"):
        source.get_next()

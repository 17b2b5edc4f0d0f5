"""Conversations and pairs of answers on the way of text: mixed, packed, tokenised ahead, and read by several processes."""

from __future__ import annotations

import datetime
import gzip
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from chat_goldens import DATA, tokenizer_of
from facts import raises_naming
from input_helpers import drain, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import Chat, ChatInput, CorpusInput, Documents, Mixture, PreferenceInput, chat_text
from spmd_trainer.inputs.corpus import encoding, prepare, prepared_source, text_files
from spmd_trainer.inputs.corpus.documents import Document
from spmd_trainer.inputs.corpus.tokens import CountedTokens
from spmd_trainer.inputs.preferences import Pairs
from spmd_trainer.inputs.text_settings import TokeniseConfig
from spmd_trainer.inputs.tokenizers import ByteTokenizer

TOKENIZER, TEMPLATE = tokenizer_of("chatml"), str(DATA / "templates" / "chatml_marked.jinja")
# Conversations have 38 to 65 tokens, and pairs 38 to 44.
LONG = {"seq_len": 64}


def talk(number):
    said = ("x" * (number % 5 + 1), "yes!" * (number % 9 + 1))
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
    }


def pair(number):
    prompt = [{"role": "user", "content": f"{number}?"}]
    answers = ("a-" * (number % 3 + 1), "no" * (number % 7 + 1))
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(kind, *, host=0, hosts=1, **fields):
    settings = {"tokenizer": TOKENIZER, "is_training": True, "input_random_seed": 3, "batch_size": 4 // hosts, **LONG}
    settings |= {"num_infeed_hosts": hosts, "infeed_host_index": host, **fields}
    if kind is not CorpusInput:
        settings.setdefault("chat_template", TEMPLATE)
    return base_hyperparams.instantiate(pax_fiddle.Config(kind, name="mine", **settings))


def assert_equal(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)


def stored(kind, output, **fields):
    """Tokenises the documents of an input into a store; returns an input over the store."""
    (one,) = make(kind, **fields).sources
    found = prepare.prepare(prepare.Preparation(one.documents, TOKENIZER, str(output), documents_per_part=10))
    return make(kind, **{**fields, "files": str(output)}), found


@pytest.mark.parametrize(
    ("kind", "row", "cut"), [(ChatInput, talk, 48), (PreferenceInput, pair, 41)], ids=["chat", "pairs"]
)
def test_any_processes_a_store_and_a_restart_give_the_same_batches(kind, row, cut, tmp_path):
    files = write(tmp_path / "a.jsonl", map(row, range(40)))
    fields = {"files": files, "window_rows": 6, "seq_len": cut, "too_long": "drop"}
    source = make(kind, **fields)
    expected = take(source, 9)
    assert source.skipped["documents"]
    shares = [make(kind, host=host, hosts=2, **fields) for host in (0, 1)]
    parts = [take(share, 9) for share in shares]
    assert_equal([jax.tree.map(lambda *x: np.concatenate(x), *same) for same in zip(*parts, strict=True)], expected)
    from_store, made = stored(kind, tmp_path / "tokens", **fields)
    assert_equal(take(from_store, 9), expected)
    assert 0 < made.statistics["skipped"] < 40
    again = make(kind, **fields)
    first = make(kind, **fields)
    take(first, 4)
    again.set_state(first.get_state())
    assert_equal(take(again, 5), expected[4:])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "row"), [(ChatInput, talk), (PreferenceInput, pair)], ids=["chat", "pairs"])
def test_a_worker_tokenises_them_and_batches_stay_the_same(kind, row, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_source, "tokenise", lambda *_, **__: None)
    path = tmp_path / "a.jsonl.gz"  # read in windows
    path.write_bytes(gzip.compress("".join(json.dumps(row(number)) + "\n" for number in range(60)).encode()))
    fields = {"files": str(path), "window_rows": 6, "seq_len": 48, "too_long": "drop"}
    expected_from = make(kind, **fields)
    expected = take(expected_from, 20)
    source = make(kind, **fields)
    stores = {name: str(tmp_path / store) for name, store in source.store_names().items()}
    source.tokenise_ahead(stores, prepared_source.Helpers(index=0, count=1, workers=1, job="mine"))
    begun = take(source, 3)
    (prepared,) = (one.source for one in source.sources)
    prepared.tokenise()
    assert prepared.is_ready
    assert_equal(begun + take(source, 17), expected)
    assert source.skipped == expected_from.skipped


def test_evaluation_gives_each_record_once_also_from_a_store(tmp_path):
    files = write(tmp_path / "a.jsonl", map(pair, range(13)))
    fields = {"files": files, "is_training": False, "window_rows": 3, "input_random_seed": None}
    batches = drain(make(PreferenceInput, **fields))
    assert np.concatenate([batch.pair_index for batch in batches]).tolist() == [*range(13), -1, -1, -1]
    assert_equal(drain(stored(PreferenceInput, tmp_path / "tokens", **fields)[0]), batches)


def test_a_store_says_which_tokens_count_and_how_they_were_made(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    fields = {"files": write(tmp_path / "a.jsonl", map(talk, range(12)))}
    source, _ = stored(ChatInput, tmp_path / "tokens", **fields)
    part = pyarrow.ipc.open_file(str(tmp_path / "tokens" / "tokens-00000-of-00002.arrow")).read_all()
    assert part.column_names == ["tokens", "bytes", "counted"]
    spelled = source.tokenizer.spell(np.array(part["tokens"][3].as_py())[part["counted"][3].as_py()])
    assert spelled == "yes!" * 4 + "<|im_end|>"
    store = str(tmp_path / "tokens")
    with raises_naming(UserError, "another processor", "turns was all and is last"):
        make(ChatInput, files=store, turns="last")
    with raises_naming(UserError, "another processor", "most_tokens was 65 and is None"):
        make(CorpusInput, source=Documents(store))


def test_a_position_and_a_store_belong_to_the_special_tokens_that_the_template_names(tmp_path):
    files, template = write(tmp_path / "a.jsonl", map(talk, range(12))), tmp_path / "bos.jinja"
    template.write_text("{{ bos_token }}" + pathlib.Path(TEMPLATE).read_text())

    def source(bos, files=files, template=template):
        folder = tmp_path / bos.strip("<|>")
        if not folder.exists():
            shutil.copytree(TOKENIZER, folder)
            (folder / "special_tokens_map.json").unlink(missing_ok=True)
            stated = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**stated, "bos_token": bos}))
        return make(ChatInput, files=files, tokenizer=str(folder), chat_template=str(template))

    one, other = (source(bos) for bos in ("<|eot_id|>", "<|eom_id|>"))
    assert one.store_names() != other.store_names()
    with raises_naming(ValueError, "special_tokens was", "'<|eot_id|>'", "'<|eom_id|>'"):
        other.set_state(one.get_state())
    plain = [source(bos, template=TEMPLATE) for bos in ("<|eot_id|>", "<|eom_id|>")]
    plain[1].set_state(plain[0].get_state())


def test_a_position_and_a_reference_belong_to_the_largest_record(tmp_path):
    files = write(tmp_path / "a.jsonl", [pair(1), {**pair(2), "note": "x" * 1000}])

    def source(most):
        return make(PreferenceInput, source=Documents(files, max_record_bytes=most), bad_records="skip")

    one, other = source(500), source(5000)
    with raises_naming(ValueError, "max_record_bytes was 500 and is 5000"):
        other.set_state(one.get_state())
    assert one.pairs_checksum != other.pairs_checksum
    usual = make(PreferenceInput, files=files)
    assert b"max_record_bytes" not in usual.get_state()


def test_the_mode_prepares_conversations(tmp_path, capsys):
    fields = {"files": write(tmp_path / "a.jsonl", map(talk, range(12))), "is_training": False, "turns": "last"}
    given = {"output": tmp_path / "tokens", "tokenizer": TOKENIZER, "seq_len": 64, "workers": 1}
    given |= {"chat_template": TEMPLATE, "turns": "last"}
    prepare.tokenise(TokeniseConfig([fields["files"]], conversations=True, **given))
    assert "12 documents" in capsys.readouterr().out
    assert_equal(
        drain(make(ChatInput, **{**fields, "files": str(tmp_path / "tokens")})), drain(make(ChatInput, **fields))
    )
    with raises_naming(UserError, "--conversations needs --seq_len"):
        TokeniseConfig([fields["files"]], output="x", conversations=True)
    with raises_naming(UserError, "--seq_len goes with --conversations"):
        TokeniseConfig([fields["files"]], **given)


def test_conversations_mix_with_conversations_and_with_text_by_weight(tmp_path):
    chats = [Documents(write(tmp_path / f"{name}.jsonl", map(talk, range(30)))) for name in "ab"]
    source = make(ChatInput, source=Mixture({"a": (chats[0], 0.75), "b": (chats[1], 0.25)}))
    take(source, 30)
    a, b = source.tokens_of.values()
    assert abs(a - 3 * b) < 4 * 40
    text = Documents(write(tmp_path / "c.jsonl", ({"text": f"plain {n}"} for n in range(30))))
    chat = Documents(chats[0].files, processor=Chat(chat_template=TEMPLATE))
    mixed = make(CorpusInput, source=Mixture({"chat": (chat, 0.5), "text": (text, 0.5)}), is_training=False)
    counted = {True: 0, False: 0}
    for batch in drain(mixed):
        for labels, weights, numbers in zip(batch.labels, batch.weights, batch.segment_ids, strict=True):
            for number in range(1, numbers.max() + 1):
                here = numbers == number
                is_text = mixed.tokenizer.spell(labels[here]).startswith("plain")
                assert weights[here].all() == is_text
                assert weights[here].any()
                counted[is_text] += 1
    assert counted == {True: 30, False: 30}
    with raises_naming(UserError, "packing='split'", "'best_fit'", "'pad'"):
        make(CorpusInput, source=chat, packing="split")


def test_an_end_of_text_of_id_0_counts_among_conversations(tmp_path):
    text = Documents(write(tmp_path / "c.jsonl", ({"text": f"plain {n}"} for n in range(4))))
    chat = Documents(write(tmp_path / "a.jsonl", map(talk, range(4))), processor=Chat(chat_template=TEMPLATE))
    mixed = {"source": Mixture({"text": text, "chat": chat}), "is_training": False}
    batch, expected = (drain(make(CorpusInput, eos_id=eos_id, **mixed))[0] for eos_id in (0, 5))
    np.testing.assert_array_equal(batch.weights, expected.weights)
    assert (expected.labels[expected.weights > 0] == 5).sum() == 4


def test_a_first_batch_needs_the_first_windows_and_not_all_conversations(tmp_path, monkeypatch):
    files, made = write(tmp_path / "a.jsonl", map(talk, range(3000))), []
    encode = chat_text.Chat.encode
    monkeypatch.setattr(chat_text.Chat, "encode", lambda self, some: made.extend(some) or encode(self, some))
    source = make(ChatInput, files=files, window_rows=4)
    source.get_next()
    assert len(made) < 300


def test_bytes_in_columns_are_utf_8_and_other_values_without_json_are_bad_records(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    settings = {"files": str(tmp_path / "a.parquet"), "is_training": False, "start": "none"}

    def rows(**columns):
        table = {"prompt": ["a "], "chosen": ["x"], "rejected": ["y"], **columns}
        parquet.write_table(pyarrow.table(table), settings["files"])
        return drain(make(PreferenceInput, **settings))

    assert_equal(rows(prompt=["é "], chosen=["ü"]), rows(prompt=["é ".encode()], chosen=["ü".encode()]))
    with raises_naming(UserError, "row 1", "column 'chosen'", "not UTF-8"):
        rows(chosen=[b"\xff"])
    with raises_naming(UserError, "row 1", "column 'prompt'", "type date"):
        rows(prompt=[datetime.date(2020, 1, 1)])
    parquet.write_table(pyarrow.table({"image": [b"\xff"]}), settings["files"])
    with raises_naming(UserError, "no `chosen`", "it has image"):
        drain(make(PreferenceInput, **settings))


def test_tokens_that_are_kept_have_room_for_their_bytes_and_those_of_the_record():
    made = []

    class Hundred:
        def encode(self, documents):
            made.extend(documents)
            return [CountedTokens(np.arange(100, dtype=np.int32), np.ones(100, bool)) for _ in documents]

    encoder = encoding.Encoder(ByteTokenizer(), 256, Hundred(), room=1600)
    documents = [Document(b"%010d" % number, "x") for number in range(10)]
    first = encoder.encode(documents)
    again = encoder.encode(documents)
    assert len(made) == 10 + 10 - 3
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_first_batch_of_pairs_counts_no_later_file(tmp_path, monkeypatch):
    files, read = [tmp_path / f"{name}.jsonl.gz" for name in "abc"], []
    for path, numbers in zip(files, (range(3), range(3, 6), range(6, 1000)), strict=True):
        path.write_bytes(gzip.compress("".join(json.dumps(pair(number)) + "\n" for number in numbers).encode()))
    record_of = text_files.record_of
    monkeypatch.setattr(text_files, "record_of", lambda *args: read.append(1) or record_of(*args))
    source = make(PreferenceInput, files=list(map(str, files)), shuffle=False, window_rows=4, batch_size=4)
    batches = take(source, 2)
    assert [batch.pair_index.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(read) < 200
    assert source.num_pairs == 1000


@pytest.mark.parametrize(
    ("kind", "processor", "facts"),
    [
        (
            PreferenceInput,
            Chat(chat_template=TEMPLATE),
            ("a Chat", "PreferenceInput takes pairs", "leave `processor` out"),
        ),
        (CorpusInput, Pairs(), ("a Pairs", "CorpusInput takes documents", "to a PreferenceInput")),
        (ChatInput, Pairs(), ("a Pairs", "ChatInput takes documents", "to a PreferenceInput")),
    ],
    ids=["chat as pairs", "pairs as text", "pairs as chat"],
)
def test_a_processor_that_an_input_has_no_use_for_is_refused(kind, processor, facts, tmp_path):
    source = Documents(write(tmp_path / "a.jsonl", [pair(1)]), processor=processor)
    with raises_naming(UserError, f"{kind.__name__} 'mine'", *facts):
        make(kind, source=source)


def test_files_without_records_of_messages_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(1024))
    with raises_naming(UserError, "ChatInput 'mine'", "kind 'tar'", "'jsonl'", "'parquet'"):
        make(ChatInput, files=str(path))
    with raises_naming(UserError, "files and source"):
        make(ChatInput, files="a.jsonl", source=Documents("a.jsonl"))

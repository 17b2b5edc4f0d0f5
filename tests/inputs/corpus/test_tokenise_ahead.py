"""Corpora that are tokenised while a run trains: the batches are those of reading text, before and after the change."""

import dataclasses
import functools
import gzip
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import chat_goldens
import killed_input
import numpy as np
import pytest
from input_helpers import assert_same, drain, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.inputs import HuggingFaceTokenizer
from spmd_trainer.inputs.corpus import corpus_input, part_worker, prepare, prepared_source
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.mixture import Mixture
from spmd_trainer.inputs.corpus.prepared_source import Helpers, PreparedSource
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE

ALONE = Helpers(index=0, count=1, workers=1, job="mine")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Parts are made in a thread of this process: a worker takes a second to start."""
    monkeypatch.setattr(prepared_source, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(corpus_input, "Preparation", functools.partial(prepare.Preparation, documents_per_part=8))

    class InThread:
        def __init__(self, task, *, nice):
            assert nice
            self._task = task

        def make(self, number):
            return part_worker.make_part(self._task, number)

        def stop(self):
            pass

    monkeypatch.setattr(prepare, "Worker", InThread)


def write(folder, *, compressed=False, broken=()):
    """Two files of 30 documents each, some of them without text."""
    random = np.random.default_rng(1)
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"text": "xy"[n % 2] * int(random.integers(0, 40))}) for n in range(30)]
        for number in broken:
            lines[number] = "{broken"
        content = ("\n".join(lines) + "\n").encode()
        path = folder / f"{name}.jsonl{'.gz' if compressed else ''}"
        path.write_bytes(gzip.compress(content) if compressed else content)
    return str(folder / "*")


def make(documents, *, host=0, hosts=1, **fields):
    settings = {"is_training": True, "seq_len": 32, "batch_size": 2, "input_random_seed": 3, "window_rows": 4, **fields}
    config = pax_fiddle.Config(
        corpus_input.CorpusInput,
        name="train",
        source=documents,
        num_infeed_hosts=hosts,
        infeed_host_index=host,
        **settings,
    )
    return base_hyperparams.instantiate(config)


def ahead(source, root, helpers=ALONE):
    source.tokenise_ahead({name: os.path.join(root, store) for name, store in source.store_names().items()}, helpers)
    return [one.source for one in source.sources if isinstance(one.source, PreparedSource)]


def wait(*sources, seconds=20):
    ends = time.monotonic() + seconds
    while not all(source.is_ready for source in sources):
        assert time.monotonic() < ends, "the store did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("shuffle", ["auto", 5, None])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("changes_after", [0, 3])
def test_the_batches_are_those_of_reading_text(tmp_path, monkeypatch, shuffle, compressed, changes_after):
    monkeypatch.setattr(
        corpus_input.windows, "_AUTO_WINDOW_BYTES", 200
    )  # 'auto' counts the bytes of texts and bad records
    files = write(tmp_path / "web", compressed=compressed, broken=(4, 17))
    documents = Documents(files, shuffle=shuffle)
    expected_from = make(documents, bad_records="skip")
    expected = take(expected_from, 40)
    source = make(documents, bad_records="skip")
    begun = take(source, changes_after)
    position = source.get_state()
    source = make(documents, bad_records="skip")
    (prepared,) = ahead(source, str(tmp_path / "cache"))
    source.set_state(position)
    wait(prepared)
    assert_same(begun + take(source, 40 - changes_after), expected)
    assert source.skipped == expected_from.skipped
    assert source.skipped["documents"] > 4
    # What was saved while reading tokens continues with text, and the other way round.
    again = make(documents, bad_records="skip")
    again.set_state(source.get_state())
    assert_same(take(again, 3), take(source, 3))


def test_the_change_in_the_midst_of_a_file_read_in_order(tmp_path, monkeypatch):
    files = write(tmp_path / "web", compressed=True)
    expected = drain(make(Documents(files), is_training=False))
    source = make(Documents(files), is_training=False)
    monkeypatch.setattr(prepared_source, "tokenise", lambda *_, **__: None)
    (prepared,) = ahead(source, str(tmp_path / "cache"))
    found = take(source, 2)
    prepared.tokenise()
    assert prepared.is_ready
    assert_same(found + drain(source), expected)


def test_processes_make_the_parts_together_and_each_once(tmp_path, monkeypatch):
    files = write(tmp_path / "web")
    expected = [take(make(Documents(files), host=host, hosts=3), 20) for host in range(3)]
    made = []
    whole = part_worker.make_part
    monkeypatch.setattr(part_worker, "make_part", lambda task, number: made.append(number) or whole(task, number))
    inputs = [make(Documents(files), host=host, hosts=3) for host in range(3)]
    sources = [
        source
        for host in (2, 1, 0)
        for source in ahead(inputs[host], str(tmp_path / "cache"), dataclasses.replace(ALONE, index=host, count=3))
    ]
    wait(*sources)
    assert sorted(made) == list(range(8))  # of 60 documents, 8 in a part, and no part of two files
    for host in range(3):
        assert_same(take(inputs[host], 20), expected[host])
    # Another job, on another number of processes, finds all of it.
    (later,) = ahead(make(Documents(files), seq_len=16), str(tmp_path / "cache"))
    wait(later)
    assert len(made) == 8


def test_a_second_job_at_the_same_time_makes_no_part_again(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_source.locked.__wrapped__, "__kwdefaults__", {
        **prepared_source.locked.__wrapped__.__kwdefaults__, "stale_seconds": 0.5, "heartbeat_seconds": 0.05
    })  # fmt: skip
    files = write(tmp_path / "web")
    made = []
    whole = part_worker.make_part

    def slow(task, number):
        made.append(number)
        time.sleep(0.2)
        return whole(task, number)

    monkeypatch.setattr(part_worker, "make_part", slow)
    (first,) = ahead(make(Documents(files)), str(tmp_path / "cache"))
    (second,) = ahead(make(Documents(files)), str(tmp_path / "cache"), dataclasses.replace(ALONE, job="another"))
    wait(first, second)
    assert sorted(made) == list(range(8))


def test_other_versions_of_files_have_another_store(tmp_path):
    files = write(tmp_path / "web")
    before = make(Documents(files)).store_names()
    assert make(Documents(files)).store_names() == before
    assert make(Documents(files), seq_len=16).store_names() == before
    assert make(Documents(files), bad_records="skip").store_names() != before
    assert make(Documents(files), eos_id=300).store_names() != before
    path = tmp_path / "web" / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"x", b"z"))  # of the same size
    os.utime(path, ns=(0, 0))
    assert make(Documents(files)).store_names() != before


@pytest.mark.parametrize("fault", ["a bad record", "the folder is a file"])
def test_what_can_not_be_tokenised_ahead_is_read_as_text(tmp_path, caplog, fault):
    files = write(tmp_path / "web", broken=(29,) if fault == "a bad record" else ())
    if fault != "a bad record":
        (tmp_path / "cache").write_text("")
    mixture = Mixture({"web": (Documents(files, shuffle=None), 1.0)})
    source = make(mixture, shuffle=False)
    (prepared,) = ahead(source, str(tmp_path / "cache"))
    prepared.tokenise()
    assert not prepared.is_ready
    assert "can't be tokenised ahead" in caplog.text
    assert_same(take(source, 2), take(make(mixture, shuffle=False), 2))


def test_one_process_that_fails_leaves_no_other_waiting(tmp_path, caplog):
    """The bad record is in the last part, which is the second process's."""
    files = write(tmp_path / "web", broken=(29,))
    inputs = [make(Documents(files), host=host, hosts=2) for host in range(2)]
    sources = [
        source
        for host in (0, 1)
        for source in ahead(inputs[host], str(tmp_path / "cache"), dataclasses.replace(ALONE, index=host, count=2))
    ]
    ends = time.monotonic() + 20
    while caplog.text.count("can't be tokenised ahead") < 2:
        assert time.monotonic() < ends, caplog.text
        time.sleep(0.01)
    assert not any(source.is_ready for source in sources)


def test_files_of_one_name_size_and_time_in_two_folders_are_two_corpora(tmp_path):
    names = []
    for folder, letter in (("one", "a"), ("two", "b")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "data.jsonl"
        path.write_text(json.dumps({"text": letter * 20}) + "\n")
        os.utime(path, ns=(0, 0))
        names.append(make(Documents(str(path))).store_names())
    assert names[0] != names[1]


def test_a_damaged_store_is_made_again(tmp_path, caplog):
    files = write(tmp_path / "web")
    (prepared,) = ahead(make(Documents(files)), str(tmp_path / "cache"))
    wait(prepared)
    part = next((tmp_path / "cache").glob("corpus-*/tokens-00001-*.arrow"))
    part.write_bytes(part.read_bytes()[:-700])
    source = make(Documents(files))
    (prepared,) = ahead(source, str(tmp_path / "cache"))
    wait(prepared)
    assert "cut short" in caplog.text
    assert_same(take(source, 10), take(make(Documents(files)), 10))


def test_a_job_of_several_processes_makes_a_damaged_store_again(tmp_path):
    """The second process comes first, and sees the damaged store before the first one repairs it."""
    files = write(tmp_path / "web")
    (prepared,) = ahead(make(Documents(files)), str(tmp_path / "cache"))
    wait(prepared)
    part = next((tmp_path / "cache").glob("corpus-*/tokens-00001-*.arrow"))
    part.write_bytes(part.read_bytes()[:-700])
    helpers = [Helpers(index, 2, 1, "another") for index in range(2)]
    (second,) = ahead(make(Documents(files), host=1, hosts=2), str(tmp_path / "cache"), helpers[1])
    time.sleep(0.2)  # so it has looked
    (first,) = ahead(make(Documents(files), host=0, hosts=2), str(tmp_path / "cache"), helpers[0])
    wait(first, second)


def test_a_file_of_one_document_beside_others_with_a_separator(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    (tmp_path / "b.txt").write_text("only one")
    source = make(Documents(str(tmp_path / "*.txt"), separator="\n\n"), is_training=False)
    wait(*ahead(source, str(tmp_path / "cache")))


def test_a_bucket_that_can_not_be_asked_is_no_end_of_an_evaluation(tmp_path, monkeypatch):
    files = write(tmp_path / "web")
    expected = drain(make(Documents(files), is_training=False))

    def forbidden(path):
        raise PermissionError("403")

    source = make(Documents(files), is_training=False)
    monkeypatch.setattr(prepared_source.reading, "exists", forbidden)
    ahead(source, str(tmp_path / "cache"))
    assert_same(drain(source), expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["texts", pytest.param("conversations", marks=pytest.mark.slow)])
def test_kills_while_it_is_made_lose_no_finished_part(tmp_path, kind):
    """Real workers of a real process that is killed again and again."""
    files = tmp_path / "web"
    files.mkdir()
    if kind == "texts":
        tokenizer, documents = None, Documents(str(files / "a.txt"), separator="\n")
        lines = [f"document {n} " + "x" * (n % 50) for n in range(60_000)]
    else:
        tokenizer = HuggingFaceTokenizer(chat_goldens.tokenizer_of("chatml"))
        documents = Documents(str(files / "a.jsonl"), processor=killed_input.chat().bound(tokenizer, 64))
        lines = [json.dumps(killed_input.conversation(n)) for n in range(60_000)]
    pathlib.Path(documents.files).write_text("\n".join(lines))
    store = tmp_path / "store"
    (tmp_path / "task").write_bytes(
        pickle.dumps(prepare.Preparation(documents, tokenizer, str(store), documents_per_part=5_000))
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, pickle, sys, time\n"
        "from spmd_trainer.inputs.corpus.open_source import open_documents\n"
        "from spmd_trainer.inputs.corpus.prepared_source import Helpers, PreparedSource, tokenise\n"
        "task = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "source = PreparedSource(open_documents(task.documents), task, Helpers(0, 1, 2, str(time.time())))\n"
        "tokenise([source])\n"
        "while not source.is_ready: time.sleep(0.01)\n"
    )
    command = [sys.executable, str(program), str(tmp_path / "task")]
    times: dict[str, int] = {}
    for kill in range(20):
        process = subprocess.Popen(command, start_new_session=True)
        try:
            process.wait(1.5 + 0.2 * (kill % 5))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        for record in store.glob("tokens-*.json"):
            assert times.setdefault(record.name, record.stat().st_mtime_ns) == record.stat().st_mtime_ns
    subprocess.run(command, check=True, timeout=300)
    assert (store / DESCRIPTION_FILE).exists()
    stored = dataclasses.replace(documents, files=str(store), separator=None)
    settings = {"tokenizer": tokenizer, "seq_len": 64}
    assert_same(take(make(stored, **settings), 5), take(make(documents, **settings), 5))

"""Corpora that are tokenised ahead: the same batches as tokenising on the fly, resumable, and clear about what is wrong."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from corpus_files import WRITERS
from facts import assert_names, raises_naming
from input_helpers import assert_same, drain, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus import corpus_input, encoding, part_worker, prepare
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, Description, TokenStore

COMMAND = [sys.executable, "-m", "spmd_trainer.main", "--mode=tokenise"]


@pytest.fixture
def web(tmp_path):
    """Three JSON-lines files of 7, 5 and 9 documents; one is empty."""
    random = np.random.default_rng(0)
    folder = tmp_path / "web"
    folder.mkdir()
    for name, count in (("a", 7), ("b", 5), ("c", 9)):
        texts = ["x" * int(n) + name for n in random.integers(1, 60, count)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines[2] = json.dumps({"text": ""})
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run(output, files, **fields):
    return prepare.prepare(prepare.Preparation(Documents(files), None, str(output), **fields))


def batches(source, count=6, **fields):
    config = pax_fiddle.Config(
        corpus_input.CorpusInput, name="train", is_training=True, source=source, seq_len=32, batch_size=4, **fields
    )
    return take(base_hyperparams.instantiate(config), count)


@pytest.mark.parametrize("shuffle", ["global", 3, None])
@pytest.mark.parametrize("packing", ["best_fit", "pad", "split"])
def test_batches_are_those_of_tokenising_on_the_fly(web, tmp_path, shuffle, packing):
    files = str(web / "*.jsonl")
    run(tmp_path / "tokens", files, documents_per_part=4)
    expected = batches(Documents(files, shuffle=shuffle), input_random_seed=3, packing=packing)
    assert_same(
        batches(Documents(str(tmp_path / "tokens"), shuffle=shuffle), input_random_seed=3, packing=packing), expected
    )


def test_the_description_counts_everything(web, tmp_path):
    found = run(tmp_path / "tokens", str(web / "*.jsonl"), documents_per_part=4)
    assert found == Description.read(str(tmp_path / "tokens"))
    texts = [json.loads(line)["text"] for path in sorted(web.iterdir()) for line in path.read_text().splitlines()]
    assert found.statistics["documents"] == len(texts) == 21
    assert found.statistics["tokens"] == found.statistics["bytes"] == sum(map(len, texts))
    assert found.statistics["empty"] == 3
    assert sum(found.statistics["lengths"].values()) == 18
    assert found.chunks == [7, 5, 9]
    assert len(found.parts) == 2 + 2 + 3
    assert found.tokenizer == tokenizers.ByteTokenizer().fingerprint()


@pytest.mark.full
def test_several_processes_write_the_same(web, tmp_path):
    files = Documents(str(web / "*.jsonl"))
    for workers in (1, 2):
        prepare.prepare(
            prepare.Preparation(files, None, str(tmp_path / str(workers)), documents_per_part=6), workers=workers
        )
    one, two = (sorted((tmp_path / str(workers)).iterdir()) for workers in (1, 2))
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_a_stopped_preparation_goes_on_where_it_was(web, tmp_path, monkeypatch):
    output, done = tmp_path / "tokens", []
    whole = prepare.make_part

    def counted(task, number):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(number)
        return whole(task, number)

    monkeypatch.setattr(prepare, "make_part", counted)
    with pytest.raises(KeyboardInterrupt):
        run(output, str(web / "*.jsonl"), documents_per_part=4)
    assert not (output / DESCRIPTION_FILE).exists()
    with raises_naming(UserError, output / DESCRIPTION_FILE, "--mode=tokenise", "stopped"):
        TokenStore(str(output))
    again = []
    monkeypatch.setattr(prepare, "make_part", lambda *args: again.append(args[1]) or whole(*args))
    run(output, str(web / "*.jsonl"), documents_per_part=4)
    assert sorted(done + again) == list(range(7))


def test_changed_files_or_another_tokenizer_are_prepared_again(web, tmp_path):
    run(tmp_path / "tokens", str(web / "*.jsonl"))
    with (web / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": "new"}) + "\n")
    assert run(tmp_path / "tokens", str(web / "*.jsonl")).chunks == [7, 6, 9]


def test_another_tokenizer_than_that_of_the_corpus_is_refused(web, tmp_path):
    run(tmp_path / "tokens", str(web / "*.jsonl"))
    with raises_naming(UserError, f"{tmp_path / 'tokens'} was", "another tokenizer", "eos_id was 256", "is 300"):
        batches(Documents(str(tmp_path / "tokens")), eos_id=300)


def test_bad_records_are_named_or_left_out_and_counted(web, tmp_path):
    path = web / "b.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:1], "{broken", *lines[1:]]) + "\n")
    with pytest.raises(UserError, match=r"b\.jsonl:2 is not JSON.*--bad_records=skip"):
        run(tmp_path / "tokens", str(web / "*.jsonl"))
    found = run(tmp_path / "tokens", str(web / "*.jsonl"), bad_records="skip")
    assert found.statistics["skipped"] == 1
    assert "b.jsonl:2" in found.statistics["named"][0]
    assert found.chunks == [7, 6, 9]


def test_a_folder_whose_parts_are_of_two_preparations_is_no_corpus(web, tmp_path, monkeypatch):
    output, files = tmp_path / "tokens", str(web / "*.jsonl")
    run(output, files)
    whole = prepare.make_part

    def stops_at_the_last(*args):
        if args[1] == 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(prepare, "make_part", stops_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        run(output, files, bad_records="skip")  # another preparation: its parts are not kept
    with raises_naming(UserError, output / DESCRIPTION_FILE, "--mode=tokenise", "stopped"):
        TokenStore(str(output))


def test_a_part_without_its_record_is_made_again(web, tmp_path, monkeypatch):
    """A process that ends between a part and its record must leave no older record beside the new part."""
    output, files = tmp_path / "tokens", str(web / "*.jsonl")
    run(output, files)
    write = prepare.files.write_atomically

    def ends(path, lines):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare.files, "write_atomically", ends)
    with pytest.raises(KeyboardInterrupt):
        run(output, files, bad_records="skip")
    monkeypatch.setattr(prepare.files, "write_atomically", write)
    made = []
    part = prepare.make_part
    monkeypatch.setattr(prepare, "make_part", lambda *args: made.append(args[1]) or part(*args))
    run(output, files)
    assert made == [0]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"bad_records": "rasie"}, ["bad_records='rasie'", "'raise'", "'skip'", "raise?"]),
        ({"documents_per_part": 0}, ["documents_per_part=0"]),
    ],
)
def test_wrong_settings_are_refused(web, tmp_path, settings, facts):
    with raises_naming(UserError, *facts):
        run(tmp_path / "tokens", str(web / "*.jsonl"), **settings)


def test_paths_may_be_a_list_or_a_function(web, tmp_path):
    files = sorted(map(str, web.iterdir()))
    assert run(tmp_path / "a", files).chunks == run(tmp_path / "b", lambda: files).chunks == [7, 5, 9]


def test_a_corpus_without_documents_and_an_unusable_output_are_refused(web, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="hold no document"):
        run(tmp_path / "tokens", str(tmp_path / "empty.jsonl"))
    (tmp_path / "file").write_text("x")
    with raises_naming(UserError, f"--output={tmp_path / 'file'}", "can't be used"):
        run(tmp_path / "file", str(web / "*.jsonl"))


def test_a_prepared_corpus_is_not_tokenised_again(web, tmp_path):
    run(tmp_path / "tokens", str(web / "*.jsonl"))
    with raises_naming(UserError, str(tmp_path / "tokens"), "tokenised already"):
        run(tmp_path / "again", str(tmp_path / "tokens"))
    assert not (tmp_path / "again").exists()


def test_a_damaged_corpus_is_an_error(web, tmp_path):
    folder = tmp_path / "tokens"
    run(folder, str(web / "*.jsonl"), documents_per_part=4)
    description = folder / DESCRIPTION_FILE
    found = json.loads(description.read_text())
    for changed, facts in (
        ({"chunks": [7, 5, 10]}, ["holds 21 documents", "says 22"]),
        ({"format": 7}, [description, "format 2"]),
        ({"parts": {name: [[1, 2]] for name in found["parts"]}}, [description, "damaged"]),
        ({"parts": []}, [description, "damaged"]),
        ({"dtype": "float64"}, [description, "damaged", "float64"]),
        ({"statistics": {"largest": 3}}, [description, "damaged", "statistics"]),
        ({"statistics": {**found["statistics"], "largest": -1}}, [description, "damaged", "statistics"]),
        ({"chunks": [24, -1, -1]}, [description, "damaged", "chunks", "-1"]),
        ({"tokenizer": [1]}, [description, "damaged", "tokenizer"]),
        ({"processor": [1]}, [description, "damaged", "processor"]),
        ({"parts": {name: [[-1] * 5] for name in found["parts"]}}, [description, "damaged", "parts"]),
    ):
        description.write_text(json.dumps({**found, **changed}))
        with raises_naming(UserError, *facts):
            TokenStore(str(folder))
    description.write_text(json.dumps(found))
    name, batches = list(found["parts"].items())[1]
    part, whole = folder / name, (folder / name).read_bytes()
    part.write_bytes(whole[:-700])
    with raises_naming(UserError, part, "cut short"):
        TokenStore(str(folder))
    part.unlink()
    with raises_naming(UserError, part, "No such file"):
        TokenStore(str(folder))
    ends = batches[0][2]  # where the ends of documents stand
    part.write_bytes(whole[:ends] + b"\xff" * 8 + whole[ends + 8 :])
    with raises_naming(UserError, part, "damaged"):
        TokenStore(str(folder)).read(np.arange(8))


def test_any_arrow_library_reads_the_tokens(web, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "tokens"
    found = run(folder, str(web / "*.jsonl"), documents_per_part=4)
    texts = []
    for name in found.parts:
        with pyarrow.memory_map(str(folder / name)) as file:
            texts += [bytes(one).decode() for one in pyarrow.ipc.open_file(file).read_all()["tokens"].to_pylist()]
    assert texts == [
        json.loads(line)["text"] for path in sorted(web.iterdir()) for line in path.read_text().splitlines()
    ]


@pytest.mark.parametrize("packing", ["best_fit", "pad", "split"])
@pytest.mark.parametrize("hosts", [2, 3])
def test_a_process_reads_the_tokens_of_its_own_rows_alone(web, tmp_path, monkeypatch, packing, hosts):
    run(tmp_path / "tokens", str(web / "*.jsonl"), documents_per_part=4)
    fetched = []
    whole = TokenStore.fetch
    monkeypatch.setattr(TokenStore, "fetch", lambda self, ranges: fetched.extend(ranges) or whole(self, ranges))
    given = 0
    for host in range(hosts):
        config = pax_fiddle.Config(
            corpus_input.CorpusInput,
            name="train",
            is_training=False,
            source=Documents(str(tmp_path / "tokens")),
            seq_len=16,
            batch_size=1,
            num_infeed_hosts=hosts,
            infeed_host_index=host,
            packing=packing,
            window_rows=5,
        )
        given += sum(int(batch.weights.sum()) for batch in drain(base_hyperparams.instantiate(config)))
    texts = Description.read(str(tmp_path / "tokens")).statistics["tokens"]
    assert given == texts + 18  # each document has its end-of-text
    # A piece of a long document begins with the token before it.
    pieces = sum(1 for _, start, _ in fetched)
    assert texts <= sum(stop - start for _, start, stop in fetched) <= texts + pieces


def test_a_store_of_several_batches_and_its_own_limit_of_the_vocabulary(web, tmp_path, monkeypatch):
    monkeypatch.setattr(part_worker, "_BATCH_DOCUMENTS", 3)
    found = run(tmp_path / "tokens", str(web / "*.jsonl"))
    assert [len(batches) for batches in found.parts.values()] == [3, 2, 3]
    assert found.statistics["largest"] == ord("x")
    expected = batches(Documents(str(web / "*.jsonl")), input_random_seed=3)
    assert_same(batches(Documents(str(tmp_path / "tokens")), input_random_seed=3), expected)
    source = TokenStore(str(tmp_path / "tokens"))
    encoder = encoding.Encoder(tokenizers.ByteTokenizer(), limit=ord("x"))
    (bad,) = encoder.encode(source.read(np.array([20])))
    assert_names(bad.problem, f"token {ord('x')}", "vocabulary")


@pytest.mark.full
def test_the_command_line(web, tmp_path):
    command = [*COMMAND, f"--output={tmp_path / 'tokens'}", str(web / "*.jsonl"), "--workers=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "21 documents" in done.stdout
    bad = subprocess.run([*command[:-1], "--column=body"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr
    assert "body" in bad.stderr


@pytest.mark.full
def test_ctrl_c_keeps_the_finished_parts(tmp_path):
    """Five parts; the signal comes when the first is finished."""
    path = tmp_path / "long.txt"
    path.write_text("\n".join(f"document {n}" for n in range(450_000)))
    command = [*COMMAND, f"--output={tmp_path / 'tokens'}", str(path), "--separator=\n", "--workers=1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list((tmp_path / "tokens").glob("tokens-*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert_names(stderr, "interrupted", "finished parts")
    assert "Traceback" not in stderr
    assert not (tmp_path / "tokens" / DESCRIPTION_FILE).exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert_names(again.stderr, "of 5", "from before")
    assert Description.read(str(tmp_path / "tokens")).statistics["documents"] == 450_000


@pytest.mark.parametrize("kind", sorted(WRITERS.keys() - {"saved dataset"}))
def test_a_part_needs_no_file_but_its_own(tmp_path, kind):
    paths = [WRITERS[kind](tmp_path, [f"{name}{number}" for number in range(7)], name=name) for name in "abc"]
    documents = Documents([str(path) for path in paths], separator="<END>" if kind == "text" else None)
    task = prepare.Preparing(prepare.Preparation(documents, None, str(tmp_path / "out"))).task
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes() + b" ")
    of_file = {str(path): [n for n, part in enumerate(task.parts) if part.path == str(path)] for path in paths}
    assert sum(part_worker.make_part(task, number)["documents"] for number in of_file[str(paths[2])]) == 7
    with raises_naming(UserError, paths[1]):  # which has changed
        part_worker.make_part(task, of_file[str(paths[1])][0])

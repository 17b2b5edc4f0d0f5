"""Files of inputs and tokenizers in object stores."""

import threading
import uuid

import numpy as np
import pytest
from etils import epath
from facts import raises_naming
from proxy import Proxy

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, record_files, tokenizer_field, tokenizers
from spmd_trainer.inputs.corpus import prepare, token_store
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.token_store import TokenStore
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.storage.object_store import ObjectStore


def record(data):
    length = len(data).to_bytes(8, "little")
    crc, data_crc = (record_files.masked_crc(x).to_bytes(4, "little") for x in (length, data))
    return length + crc + data + data_crc


@pytest.fixture
def corpus(anywhere):
    for name in ("a.txt", "b.txt", "deep/c.txt", ".hidden.txt"):
        write_atomically(anywhere / name, [name])
    return anywhere


def test_patterns(corpus):
    def found(pattern):
        return [path.removeprefix(f"{corpus}/") for path in files.find_files(f"{corpus}/{pattern}").paths]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("[b-z].txt") == ["b.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    assert found("*/c.txt") == ["deep/c.txt"]
    assert found("") == ["a.txt", "b.txt", "deep/c.txt"]
    assert files.find_files([corpus / "deep", corpus / "a.txt"]).sizes == (11, 6)


def test_contents(corpus):
    found = files.find_files([corpus / "b.txt", f"{corpus}/a.txt"])
    assert found.sizes == (6, 6)
    assert found.read(0) == b"b.txt\n"
    assert found.read(1, limit=3) == b"a.t"
    (corpus / "b.txt").write_text("longer than before")
    with raises_naming(UserError, corpus / "b.txt", "6 bytes", "changed"):
        found.read(0)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("b.text", r"b\.text can't be read: No such file or directory \(did you mean b\.txt"),
        ("*.jpg", r"\*\.jpg matches no file; .* holds a\.txt, b\.txt, deep"),
        ("de*", r"de\* matches folders only"),
        ("none/*.txt", r"matches no file: there is no folder .*none"),
    ],
)
def test_what_is_not_there(corpus, entry, says):
    with pytest.raises(UserError, match=says):
        files.find_files([f"{corpus}/{entry}"])


def test_an_unknown_scheme_is_refused():
    with pytest.raises(UserError, match="files=hdfs://x/y: hdfs:// is no storage"):
        files.find_files("hdfs://x/y")


def test_records(anywhere):
    contents = [bytes([number]) * size for number, size in enumerate([3, 0, 5000, 70_000, 1])]
    (anywhere / "x.tfrecord").parent.mkdir(parents=True, exist_ok=True)
    (anywhere / "x.tfrecord").write_bytes(b"".join(map(record, contents)))
    records = record_files.RecordFiles(anywhere / "x.tfrecord")
    assert records.data([4, 0, 3, 1, 2]) == [contents[number] for number in (4, 0, 3, 1, 2)]
    (anywhere / "y.tfrecord").write_bytes(b"".join(map(record, contents))[:-4])
    with raises_naming(UserError, "y.tfrecord", "record 4", "broken", "4 records"):
        record_files.RecordFiles(anywhere / "y.tfrecord")


def test_tokenizers(anywhere):
    (anywhere / "words.model").parent.mkdir(parents=True, exist_ok=True)
    with raises_naming(UserError, "word.model", "no such file"):
        tokenizer_field.make_tokenizer(str(anywhere / "word.model"))
    (anywhere / "words.model").write_bytes(b"not a model")
    with raises_naming(UserError, "words.model", "SentencePiece"):
        tokenizers.SentencePieceTokenizer(anywhere / "words.model")


def test_lengths_of_a_store_are_asked_for_once(address_of, use, tmp_path, monkeypatch):
    """A global shuffle jumps between more parts than are held in memory, and each time it asked for the part's version."""
    monkeypatch.setenv("SPMD_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_store, "_HELD", 2)
    (tmp_path / "a.txt").write_text("\n".join(f"document {number}" for number in range(60)))
    with Proxy(address_of("s3")) as proxy:
        use("s3", proxy.address)
        documents = Documents(str(tmp_path / "a.txt"), separator="\n")
        prepare.prepare(prepare.Preparation(documents, None, "s3://bkt/lengths", documents_per_part=10))
        store = TokenStore("s3://bkt/lengths")
        requests = []
        for _ in range(3):
            proxy.requests.clear()
            lengths = [len(one.content) for one in store.read(np.arange(60).reshape(6, 10).T.ravel())]
            requests.append(len(proxy.requests))
    assert sum(lengths) == store.description.statistics["tokens"]
    assert requests[0] <= 3 * 6
    assert requests[1:] == [0, 0]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_the_files_of_a_pattern_are_asked_about_once_and_together(scheme, address_of, use, monkeypatch):
    """Each match was asked whether it is a folder, one after another, and twice for its size."""
    count, both = 8, threading.Barrier(2)
    asked = []
    info = ObjectStore.info

    def counted(store, path):
        if str(path).endswith(".jsonl") and "*" not in str(path):
            asked.append(path)
            both.wait(timeout=10)  # an error if no second one is on its way
        return info(store, path)

    use(scheme, address_of(scheme))
    folder = epath.Path(f"{scheme}://bkt/{uuid.uuid4().hex}")
    for number in range(count):
        (folder / f"{number}.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr(ObjectStore, "info", counted)
    source = open_documents(Documents(f"{folder}/*.jsonl"))
    assert source.sizes == (14,) * count
    assert sorted(asked) == sorted(source.paths)

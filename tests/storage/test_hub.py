"""Data sets of the Hub as files of inputs: hf://datasets/ORG/NAME/FILE, against a server on loopback."""

import gzip
import io
import json

import hub_server
import numpy as np
import pytest
from facts import raises_naming
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer import storage
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import CorpusInput, Documents, files
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.storage import backends, local_copies, reading

huggingface_hub = pytest.importorskip("huggingface_hub")

ROOT = "hf://datasets/org/texts"
TEXTS = [f"text {n} " * n for n in range(1, 40)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(texts):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    target = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts}), target, row_group_size=5)
    return target.getvalue()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.serve() as server:
        server.files["org/texts", "main"] = {
            "README.md": b"# Texts\n",
            "data/a.jsonl": lines(TEXTS[:20]),
            "data/b.jsonl": lines(TEXTS[20:]),
            "packed/all.jsonl.gz": gzip.compress(lines(TEXTS)),
            "rows/deep/all.parquet": parquet(TEXTS),
        }
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv(local_copies.VARIABLE, str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # Tests of lm-eval work offline, and the library reads that once.
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        backends.object_store.cache_clear()
        yield server
    backends.object_store.cache_clear()


def texts_of(path):
    source = open_documents(Documents(path))
    return [record.content.decode() for chunk in range(source.num_chunks) for record in source.read_chunk(chunk, 0)]


def labels_of(source):
    labels = []
    while True:
        try:
            batch = source.get_next()
        except StopIteration:
            return np.concatenate(labels)
        labels.append(batch.labels[batch.weights > 0])


@pytest.mark.parametrize(
    "path", ["data/*.jsonl", "data", "packed/all.jsonl.gz", "rows/deep/all.parquet", "**/*.parquet", "rows"]
)
def test_documents_of_every_kind(hub, path):
    assert texts_of(f"{ROOT}/{path}") == TEXTS


def test_labels_are_those_of_the_same_files_on_disk(hub, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(hub.files["org/texts", "main"][f"data/{name}.jsonl"])
    found = []
    for given in (f"{ROOT}/data/*.jsonl", f"{tmp_path}/*.jsonl"):
        config = pax_fiddle.Config(CorpusInput, name="all", source=Documents(given), seq_len=64, batch_size=4)
        found.append(labels_of(base_hyperparams.instantiate(config)))
    assert len(found[0]) == sum(len(text) + 1 for text in TEXTS)
    np.testing.assert_array_equal(*found)


def test_a_revision_is_read_as_it_was(hub):
    hub.files["org/texts", "v1"] = {"data/a.jsonl": lines(["old"])}
    assert texts_of("hf://datasets/org/texts@v1/data/*.jsonl") == ["old"]
    with raises_naming(UserError, "a.jsonl", "no such revision"):
        files.find_files("hf://datasets/org/texts@v2/data/a.jsonl")


def test_a_part_costs_its_bytes_and_a_folder_one_list(hub):
    hub.files["org/texts", "main"] = {f"data/{n:03d}.txt": b"x" * 9_000_000 for n in range(3)}
    found = files.find_files(f"{ROOT}/data/*.txt")
    assert found.sizes == (9_000_000,) * 3
    lists = [path for path in hub.requests if "/tree/" in path]
    assert len(lists) <= 2
    assert reading.read(found.paths[1], 4_000_000, 4_000_100) == b"x" * 100
    assert hub.bytes_read == 100
    assert [path for path in hub.requests if "/tree/" in path] == lists


def test_a_long_list_comes_in_pages(hub):
    hub.files["org/texts", "main"] = {f"data/{n:03d}.txt": b"%d" % n for n in range(25)}
    hub.page = 10
    assert len(files.find_files(f"{ROOT}/data/*.txt").paths) == 25


def test_an_outage_is_outlasted(hub, monkeypatch):
    monkeypatch.setattr("spmd_trainer.storage.retry.time.sleep", lambda seconds: None)
    hub.failures = 2
    assert texts_of(f"{ROOT}/data/a.jsonl") == TEXTS[:20]


def test_a_private_repository_needs_a_token(hub, monkeypatch):
    hub.private.add("org/texts")
    path = f"{ROOT}/data/a.jsonl"
    with raises_naming(UserError, path, "no such repository", "`hf auth login`", "HF_TOKEN"):
        files.find_files(path)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    backends.object_store.cache_clear()
    assert texts_of(path) == TEXTS[:20]


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("datasets/org/none/a.jsonl", ["no such repository"]),
        ("datasets/org/texts/data/c.jsonl", ["No such file", "a.jsonl"]),
        ("datasets/org/texts/data/*.txt", ["no file", "holds a.jsonl, b.jsonl"]),
        ("datasets/org", ["no repository", "hf://datasets/ORG/NAME/FILE"]),
        ("", ["no repository", "hf://datasets/ORG/NAME/FILE"]),
    ],
)
def test_what_is_not_there(hub, path, facts):
    with raises_naming(UserError, f"hf://{path}", *facts):
        files.find_files(f"hf://{path}")


def test_a_copy_on_disk_is_made_again_when_the_content_changes(hub):
    path = f"{ROOT}/README.md"
    with open(local_copies.local_copy(path), "rb") as file:
        assert file.read() == b"# Texts\n"
    hub.files["org/texts", "main"]["README.md"] = b"# Other\n"  # of the same size
    backends.object_store.cache_clear()
    with open(local_copies.local_copy(path), "rb") as file:
        assert file.read() == b"# Other\n"


def test_nothing_is_written_to_the_hub():
    with raises_naming(UserError, "--job_log_dir=hf://datasets/org/texts/run", "files of inputs", "`hf download`"):
        storage.directory("--job_log_dir", f"{ROOT}/run")


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    find_spec = backends.importlib.util.find_spec
    monkeypatch.setattr(
        backends.importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find_spec(name)
    )
    with raises_naming(UserError, "hf://", "huggingface_hub", "spmd-trainer[hf]"):
        open_documents(Documents(f"{ROOT}/data/*.jsonl"))

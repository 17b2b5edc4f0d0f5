"""Runs on packed corpora: one that stops and resumes trains on the same batches, and evaluation finds tokens in their store."""

import functools
import json
import sys
import time

import jax
import numpy as np
import pytest
from facts import raises_naming
from praxis import pax_fiddle
from trained_helpers import make_job

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import CorpusInput, Documents, Mixture
from spmd_trainer.inputs.corpus import encoding
from spmd_trainer.training import train
from spmd_trainer.training.dataset_batches import FiniteDataset
from spmd_trainer.training.summary_writers import read_metrics

STEPS, STOP = 6, 3


@pytest.fixture
def documents(request, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(request.config.rootpath / "tests/inputs/corpus")])
    import memory_documents

    return memory_documents


def run(directory, steps, documents):
    """Trains until a step; returns the loss of each step."""

    def customize(config):
        sources = {
            "web": (documents.documents([*documents.texts(300), *[None] * 100]), 3),
            "code": (documents.documents(documents.texts(40, letter=b"c"), shuffle=7, by_number=False), 1),
        }
        before = config.train_datasets[0]
        config.train_datasets[0] = pax_fiddle.Config(
            CorpusInput,
            name="mixture",
            source=Mixture(sources),
            seq_len=before.seq_len,
            batch_size=before.batch_size,
            window_rows=12,
            bad_records="skip",
            is_training=True,
            input_random_seed=1,
        )

    fields = [
        f"task.train.num_train_steps={steps}",
        "task.train.save_interval_steps=3",
        "task.train.summary_interval_steps=1",
        "task.train.log_train_output_interval_steps=1",
    ]
    train.train(make_job(directory, fields=fields, customize=customize))
    records = read_metrics(directory, "train")
    assert records[steps]["input/skipped/web"] > 0
    assert "input/skipped/code" not in records[steps]
    return {step: record["loss"] for step, record in records.items()}


@pytest.mark.full
def test_a_resumed_run_on_a_mixture_trains_on_the_same_batches(tmp_path, documents):
    whole = run(tmp_path / "whole", STEPS, documents)
    first = run(tmp_path / "parts", STOP, documents)
    both = run(tmp_path / "parts", STEPS, documents)
    assert sorted(whole) == sorted(both)
    assert max(first) == STOP
    assert {**both, **first} == whole


def test_a_token_outside_of_the_vocabulary_of_the_model_is_an_error_with_its_record(tmp_path, documents):
    class Special:
        """Bytes, and a token that only the text '<s>' gives."""

        vocab_size, encoded_vocab_size, eos_id, bytes_per_token = 1000, 257, 256, 1

        def encode(self, text, path="", *, cut=False):
            return np.array([999]) if text == b"<s>" else np.frombuffer(text, np.uint8)

        def decode(self, ids, lengths):
            return ["" for _ in ids]

        def fingerprint(self):
            return {"kind": "special"}

    config = pax_fiddle.Config(
        CorpusInput,
        name="text",
        source=documents.documents([b"a", b"<s>"]),
        tokenizer=Special(),
        seq_len=8,
        batch_size=2,
    )
    built = make_job(tmp_path, mesh=(1, 1, 1)).build_input(config)
    with raises_naming(UserError, "m0:2", "token 999", "vocabulary", "0 to 256"):
        built.get_next()


@pytest.mark.parametrize("kind", ["eval", "decode"])
def test_evaluation_and_decode_read_tokens_from_their_store(tmp_path, monkeypatch, kind):
    texts = [f"document {number} " + "x" * (number % 30) for number in range(90)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = pax_fiddle.Config(
        CorpusInput,
        name="held",
        source=Documents(str(tmp_path / "held.jsonl")),
        seq_len=32,
        batch_size=4,
        window_rows=8,
    )
    build = functools.partial(make_job, tmp_path, mesh=(1, 1, 1), mode=kind)

    def batches(job):
        return [batch for _, batch in FiniteDataset(job, config, kind, 0).each_batch("reading", lambda: None)]

    expected, caching = batches(build()), build(data_cache_dir=str(tmp_path / "cache"))
    dataset = FiniteDataset(caching, config, kind, 0)
    ends = time.monotonic() + 30
    while not list((tmp_path / "cache").glob("corpus-*/corpus.json")):
        assert time.monotonic() < ends, "the store did not come"
        time.sleep(0.05)
    del dataset
    encoded = []
    monkeypatch.setattr(encoding, "encode_texts", lambda _, texts, wheres: encoded.extend(texts) or texts)
    found = batches(caching)
    assert encoded == []
    assert len(found) == len(expected) > 10
    for batch, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)

"""Runs on packed corpora: one that stops and resumes trains on the same batches, and evaluation finds tokens in their store."""

import functools
import gc
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


def held_out(folder, name):
    """Config of an input over 90 documents, whose file it writes."""
    texts = [f"{name} {number} " + "x" * (number % 30) for number in range(90)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return pax_fiddle.Config(
        CorpusInput, name=name, source=Documents(str(path)), seq_len=32, batch_size=4, window_rows=8
    )


def wait_for_stores(cache, *, without=None):
    """Returns the finished stores once there is one that isn't in `without`."""
    ends = time.monotonic() + 30
    while not (found := {path.parent for path in cache.glob("corpus-*/corpus.json")}) - set(without or ()):
        assert time.monotonic() < ends, found
        time.sleep(0.05)
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["eval", "decode"])
def test_evaluation_and_decode_read_tokens_from_their_store(tmp_path, monkeypatch, kind):
    config = held_out(tmp_path, "held")
    build = functools.partial(make_job, tmp_path, mesh=(1, 1, 1), mode=kind)

    def batches(job):
        return [batch for _, batch in FiniteDataset(job, config, kind, 0).each_batch("reading", lambda: None)]

    expected, caching = batches(build()), build(data_cache_dir=str(tmp_path / "cache"))
    dataset = FiniteDataset(caching, config, kind, 0)
    wait_for_stores(tmp_path / "cache")
    del dataset
    encoded = []
    monkeypatch.setattr(encoding, "encode_texts", lambda _, texts, wheres: encoded.extend(texts) or texts)
    found = batches(caching)
    assert encoded == []
    assert len(found) == len(expected) > 10
    for batch, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)


@pytest.mark.full
def test_a_store_that_nobody_uses_makes_room_for_the_next(tmp_path):
    cache = tmp_path / "cache"
    job = make_job(tmp_path, mesh=(1, 1, 1), mode="eval", data_cache_dir=str(cache), data_cache_limit=100)
    first = FiniteDataset(job, held_out(tmp_path, "first"), "eval", 0)
    stored = wait_for_stores(cache)
    second = FiniteDataset(job, held_out(tmp_path, "second"), "eval", 0)
    both = wait_for_stores(cache, without=stored)
    assert stored < both  # the first is in use, and so is the second, although they have more than 100 bytes
    del first
    gc.collect()
    third = FiniteDataset(job, held_out(tmp_path, "third"), "eval", 0)
    assert wait_for_stores(cache, without=both) & both == both - stored
    del second, third


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"data_cache_limit": "1GB"}, ["--data_cache_limit", "--data_cache_dir"]),
        ({"data_cache_dir": "gs://bucket/cache", "data_cache_limit": "1GB"}, ["gs://bucket/cache", "local disk"]),
        ({"data_cache_dir": "cache", "data_cache_limit": "much"}, ["--data_cache_limit=much", "500GB"]),
    ],
)
def test_limits_that_can_not_be_kept_are_refused(tmp_path, settings, facts):
    with raises_naming(UserError, *facts):
        FiniteDataset(make_job(tmp_path, mesh=(1, 1, 1), mode="eval", **settings), held_out(tmp_path, "one"), "eval", 0)

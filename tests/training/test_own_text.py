"""`lm.own_text.OwnText`: a file of texts and the same file prepared ahead give the same losses; what --mode=data says."""

import json

import pytest
from facts import assert_names
from praxis import base_hyperparams, pax_fiddle

import spmd_trainer
from spmd_trainer.inputs import CorpusInput, Documents
from spmd_trainer.inputs.corpus import prepare
from spmd_trainer.training import experiment_config, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch.pages import corpus_summary, show_data

SMALL = ("NUM_LAYERS=1", "MODEL_DIMS=16", "HIDDEN_DIMS=32", "NUM_HEADS=2", "MAX_SEQ_LEN=32", "GLOBAL_BATCH_SIZE=8")
STEPS = (
    "NUM_TRAIN_STEPS=3",
    "WARMUP_STEPS=1",
    "CHECKPOINT_EVERY_N_STEPS=3",
    "EVAL_INTERVAL_STEPS=3",
    "task.train.summary_interval_steps=1",
)
TEXTS = [f"{n} squared is {n * n}." for n in range(300)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def job(directory, files, mode="train"):
    overrides = (f"FILES={str(files)!r}", *SMALL, *STEPS)
    return Job.build(make_run_config("lm.own_text.OwnText", directory, mode=mode, overrides=overrides))


@pytest.mark.full
def test_a_prepared_corpus_trains_like_its_files(corpus, tmp_path):
    prepare.prepare(prepare.Preparation(Documents(str(corpus)), None, str(tmp_path / "tokens")))
    losses = []
    for files in (corpus, tmp_path / "tokens"):
        directory = tmp_path / f"run_of_{files.name}"
        train.train(job(directory, files))
        losses.append({step: record["loss"] for step, record in read_metrics(directory, "train").items()})
    assert losses[0]
    assert losses[0] == losses[1]


@pytest.fixture
def tokenizer(tmp_path):
    """A SentencePiece model of 64 pieces, which has no other characters than those of the texts."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = tmp_path / "m.model"
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            vocab_size=64,
            eos_id=1,
            unk_id=0,
            bos_id=-1,
            minloglevel=2,
        )
    return model


def test_vocabulary_and_prompts_are_those_of_the_tokenizer(corpus, tokenizer, tmp_path):
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"text": ""}\n' + "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[-3:]))
    overrides = (f"FILES={str(corpus)!r}", f"EVAL_FILES={str(heldout)!r}", f"TOKENIZER={str(tokenizer)!r}")
    resolved = experiment_config.resolve("lm.own_text.OwnText", overrides)
    assert resolved.task_p.model.lm_tpl.spec.vocab_size == 64
    (prompts,) = map(base_hyperparams.instantiate, resolved.config.decode_datasets)
    batch = prompts.get_next()
    shown = prompts.ids_to_strings(batch.ids, batch.prefix_lengths)
    # The beginnings of the first held-out documents with text: something is left to continue.
    for prompt, text in zip(shown, TEXTS[-3:], strict=False):
        assert prompt
        assert text.startswith(prompt)
        assert prompt != text
    assert batch.eval_sample_weights.tolist() == [1, 1, 1, 0, 0]


@pytest.mark.full
def test_it_decodes_and_exports_with_a_tokenizer(corpus, tokenizer, tmp_path):
    overrides = [f"FILES={str(corpus)!r}", f"TOKENIZER={str(tokenizer)!r}", *SMALL, *STEPS, "DECODE_STEPS=3"]
    spmd_trainer.train("lm.own_text.OwnText", tmp_path / "run", overrides=overrides)
    decoded = spmd_trainer.decode("lm.own_text.OwnText", tmp_path / "run", overrides=overrides)
    assert len(decoded.examples["prompts"]) == 5
    step = spmd_trainer.export("lm.own_text.OwnText", tmp_path / "run", tmp_path / "out", overrides=overrides)
    assert step == 3
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (64, 1)


def test_what_data_mode_says_of_a_corpus(corpus, tmp_path, capsys):
    show_data.show_data(job(tmp_path / "shown", corpus, mode="data"))
    out = capsys.readouterr().out
    assert_names(out, "train: CorpusInput", "positions filled", "1 file of", "squared is")
    page = (tmp_path / "shown" / "data.html").read_text()
    assert_names(page, "row 0", "squared is")  # the text of its rows, as the terminal shows it


def test_the_summary_counts_rows_that_are_given(corpus):
    config = pax_fiddle.Config(
        CorpusInput, name="all", source=Documents(str(corpus)), seq_len=64, batch_size=7, packing="pad"
    )
    source = base_hyperparams.instantiate(config)
    found = corpus_summary.measure(source)
    tokens = sum(len(text) + 1 for text in TEXTS)  # with end-of-text
    assert (found.tokens, found.segments, found.positions) == (tokens, 300, 300 * 64)
    assert sum(found.lengths.values()) == sum(found.fills.values()) == 300
    assert found.sources[0].documents == 300
    (first, *_) = corpus_summary.lines(found)
    assert f"{tokens:,} tokens" in first
    assert source.get_next() is not None  # it is at its beginning again

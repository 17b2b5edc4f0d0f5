"""Requests on the mesh, without lm-eval: likelihoods, shapes and their padding, each request once, texts, flags, refusals."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from facts import raises_naming
from praxis import layers
from praxis.pax_fiddle import Config
from trained_helpers import TINY, logits, make_job, restored

from spmd_trainer.cli import run_flags
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.tokenizer_field import default_start
from spmd_trainer.inputs.tokenizers import ByteTokenizer
from spmd_trainer.lm_eval import harness_runner, mode, steps
from spmd_trainer.lm_eval.requests import Answers, Requests, Scored, Source, _score_arrays, request_key
from spmd_trainer.lm_eval.settings import LmEvalSettings, ModelArgs, parse_arguments
from spmd_trainer.lm_eval.steps import score_step
from spmd_trainer.lm_eval.texts import Texts
from spmd_trainer.settings import settings_of
from spmd_trainer.training.phases import Phase

pytestmark = pytest.mark.xdist_group("trained")

FOLDER = pathlib.Path(__file__).parents[1] / "interop" / "data" / "hf" / "llama_tokenizer"


def plan(lengths, *, tokens=16384, devices=8, limit=512):
    chosen = steps.choose_shapes(
        lengths,
        limit=limit,
        rows_of=lambda width: max(devices, tokens // width // devices * devices),
        num_devices=devices,
    )
    return chosen, steps.batches(lengths, chosen)


def padding(lengths, planned):
    """The fraction of the batches' tokens that is padding."""
    return 1 - sum(lengths) / sum(batch.shape.rows * batch.shape.width for batch in planned)


@pytest.mark.parametrize("count", [200, 1000, 10_000])
def test_padding_of_lengths_from_10_to_500_is_under_15_percent(count):
    lengths = np.random.default_rng(count).integers(10, 501, count).tolist()
    chosen, planned = plan(lengths)
    assert len(chosen) <= steps.MAX_SHAPES
    assert padding(lengths, planned) < 0.15
    assert sorted(index for batch in planned for index in batch.requests) == list(range(count))
    for batch in planned:
        assert all(lengths[index] <= batch.shape.width <= 512 for index in batch.requests)
        assert len(batch.requests) <= batch.shape.rows
        assert batch.shape.rows % 8 == 0
    assert all(len(batch.requests) == batch.shape.rows for batch in planned[:-1]), (
        "only the last batch may have empty rows"
    )


def test_shapes_fit_the_lengths():
    assert plan([]) == ([], [])
    assert plan([7])[0] == [steps.Shape(8, 8)]
    # One width is enough for lengths near each other, and no width is over the limit.
    assert plan([500] * 100)[0] == [steps.Shape(32, 504)]
    assert plan([500] * 33)[0] == [steps.Shape(24, 504)], "two batches of equal size, not 32 rows and one"
    assert plan([500, 501, 499], limit=501)[0] == [steps.Shape(8, 501)]
    chosen, planned = plan([10] * 512 + [500] * 60)
    assert chosen == [steps.Shape(32, 504), steps.Shape(512, 16)]
    # What a group of long requests leaves free is filled with shorter ones.
    assert [len(batch.requests) for batch in planned] == [32, 32, 508]
    assert padding([10] * 512 + [500] * 60, planned) < 0.15


def source_of(state, directory):
    return Source(state, "model", Answers(epath.Path(directory)), lambda what, total: Phase(what, announce_after=60.0))


def requests_of(job, **options):
    return Requests(job.task, job.partitioner, **{"tokens_per_batch": 256, "max_length": 32, **options})


def test_likelihoods_are_those_of_the_logits(tmp_path):
    job, state = restored((1, 4, 2))
    random = np.random.default_rng(0)
    rows = [
        Scored(tuple(random.integers(32, 120, length).tolist()), scored)
        for length, scored in [(9, 3), (33, 30), (2, 1)]
    ]
    alone, whole = restored((1, 1, 1))
    # One whose continuation is the most likely one.
    text = list(b"def f(")
    greedy = np.argmax(logits(alone, whole, np.array([text + [0]]))[0, len(text) - 1])
    rows += [Scored((*text, int(greedy)), 1), rows[0]]
    runner = requests_of(job)
    found = runner.scores(rows, source_of(state, tmp_path))
    for (tokens, scored), (score, is_greedy) in zip(rows, found, strict=True):
        log_probs = jax.nn.log_softmax(logits(alone, whole, np.array([tokens[:-1]]))[0])
        wanted = jnp.take_along_axis(log_probs, np.array(tokens[1:])[:, None], axis=1)[-scored:].sum()
        assert abs(score - wanted) < 1e-4
        assert is_greedy == bool((jnp.argmax(log_probs, -1)[-scored:] == np.array(tokens[-scored:])).all())
    assert [is_greedy for _, is_greedy in found] == [False, False, False, True, False]
    assert runner.computed == 4, "equal requests run once"


@pytest.mark.full
def test_answers_are_kept(tmp_path):
    job, state = restored((1, 4, 2))
    rows = [Scored(tuple(range(40, 40 + length)), 2) for length in (5, 17, 9)]
    first = requests_of(job).scores(rows[:2], source_of(state, tmp_path))
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"key": "5a')  # a process that was killed while it wrote
    runner = requests_of(job)
    again = runner.scores(rows, source_of(state, tmp_path))
    assert (again[:2], runner.computed) == (first, 1)
    third = requests_of(job)
    assert third.scores(rows, source_of(state, tmp_path)) == again
    assert (third.computed, third.compiled) == (0, 0)
    other = Source(state, "another model", Answers(epath.Path(tmp_path)), source_of(state, tmp_path).progress)
    assert requests_of(job).scores(rows, other) == again
    lines = [line for line in (tmp_path / "answers.jsonl").read_text().splitlines() if line.endswith("}")]
    assert len({json.loads(line)["key"] for line in lines}) == 6
    assert request_key("a", [1, 2]) != request_key("a", [1], 2)


@pytest.mark.full
def test_nothing_as_large_as_the_vocabulary_leaves_the_devices():
    job, _ = restored((1, 4, 2))
    runner = requests_of(job)
    arrays = runner_arrays(runner)
    step = job.partitioner.partition(
        score_step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays), is_eval=True
    )
    lowered = step.lower(jax.random.key(0))
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [(8,), (8,), (8,)]


def runner_arrays(runner):
    (shape,) = runner.shapes([8])
    return _score_arrays([Scored(tuple(range(40, 49)), 2)], shape)


def test_rows_of_a_batch():
    job, _ = restored((1, 4, 2))
    assert [shape.rows for shape in requests_of(job, batch_size=20).shapes([31] * 100)] == [24]
    assert [shape.rows for shape in requests_of(job, tokens_per_batch=1024).shapes([32] * 100)] == [32]
    assert [shape.rows for shape in requests_of(job).shapes([32] * 3)] == [8]


def test_a_batch_of_pairs_has_two_rows_for_each_pair():
    ids = jax.ShapeDtypeStruct((6, 10), np.int32)
    assert steps.training_rows({"ids": ids}) == (6, 10)
    assert steps.training_rows({"chosen": {"ids": ids}, "rejected": {"ids": ids}}) == (12, 10)
    with raises_naming(UserError, "`ids`", "`chosen.ids`", "has images"):
        steps.training_rows({"images": ids})


def test_texts_begin_as_in_training():
    begin, end = 1, 2
    plain = Texts(HuggingFaceTokenizer(FOLDER), None, vocab_size=211)
    encoded = plain.encode("the mesh")
    assert plain.prefix_id == begin
    assert plain.encode_pair("the", " mesh") == (encoded[:-1], encoded[-1:])
    assert plain.encode_pair("the ", "mesh") == plain.encode_pair("the", " mesh"), "spaces belong to the continuation"
    assert plain.encode_pair("", "the mesh") == ([begin], encoded)
    assert plain.encode_prompt("") == [begin]
    started = Texts(HuggingFaceTokenizer(FOLDER), begin)
    assert started.encode("the mesh") == [begin, *encoded]
    assert started.encode("the mesh", special=False) == encoded
    assert started.encode("<|begin|>the mesh") == [begin, *encoded], "not twice"
    assert started.encode_prompt("<|begin|>the mesh") == [begin, *encoded]
    by_argument = Texts(
        HuggingFaceTokenizer(FOLDER), begin, arguments=ModelArgs(add_bos_token=False, prefix_token_id=5)
    )
    assert by_argument.encode_pair("", "the mesh") == ([5], encoded)
    as_bytes = Texts(ByteTokenizer(), 256)
    assert as_bytes.encode("ab") == [256, 97, 98]
    assert as_bytes.decode([97, 98, 256]) == "ab"
    assert plain.decode([*encoded, end]) == "the mesh"


def test_texts_that_are_refused():
    small = Texts(HuggingFaceTokenizer(FOLDER), None, vocab_size=20)
    with raises_naming(UserError, "vocabulary", "0 to 19", "tokenizer=PATH"):
        small.encode("the mesh")
    with raises_naming(UserError, "''", "'a context'", "no token"):
        Texts(ByteTokenizer(), 256).encode_pair("a context", "")
    with pytest.raises(UserError, match="no beginning-of-text"):
        Texts(ByteTokenizer(), 256, arguments=ModelArgs(add_bos_token=True))
    with raises_naming(UserError, "chat template 'tools'", "default"):
        Texts(HuggingFaceTokenizer(FOLDER), None, chat_template="tools")


def test_chat_templates():
    texts = Texts(HuggingFaceTokenizer(FOLDER), None, chat_template=True)
    messages = [{"role": "user", "content": "Hello "}, {"role": "assistant", "content": " The answer is "}]
    assert texts.chat(messages[:1], add_generation_prompt=True) == "<|user|>Hello<|end|><|assistant|>"
    # The model continues the last message; this template strips it.
    assert texts.chat(messages, add_generation_prompt=False) == "<|user|>Hello<|end|><|assistant|>The answer is"


def test_settings():
    assert LmEvalSettings(["a, b", "b,c"]).tasks == ("a", "b", "c")
    assert parse_arguments("--gen_kwargs", "temperature=0.5,do_sample=true,until=x") == {
        "temperature": 0.5,
        "do_sample": True,
        "until": "x",
    }
    assert parse_arguments("--gen_kwargs", "{'until': ['a', 'b']}") == {"until": ["a", "b"]}

    def model_args(text):
        return LmEvalSettings(("a",), model_args=text).model_args

    assert model_args("max_length=64,tokenizer=a/b") == ModelArgs(max_length=64, tokenizer="a/b")
    for make, facts in [
        (lambda: model_args("max_lenght=3"), ("no 'max_lenght'", "mean max_length")),
        (lambda: model_args("batch_size=0"), ("batch_size=0", "whole number", "1 or more")),
        (lambda: model_args("batch_size"), ("'batch_size'", "key=value")),
        (lambda: LmEvalSettings(()), ("no tasks", "needs --tasks")),
        (lambda: LmEvalSettings(("a",), limit=0), ("--limit=0",)),
        (lambda: LmEvalSettings(("a",), fewshot_as_multiturn=True), ("needs --apply_chat_template",)),
    ]:
        with raises_naming(UserError, *facts):
            make()


def spmd_trainer(*arguments):
    command = [sys.executable, "-m", "spmd_trainer.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_flags(tmp_path):
    for arguments, message in [
        (["--mode=lm_eval"], "--mode=lm_eval needs --tasks=NAME,NAME"),
        (["--tasks=a"], "--tasks goes with --mode=lm_eval"),
    ]:
        finished = spmd_trainer(f"--exp={TINY}", f"--job_log_dir={tmp_path}", *arguments)
        assert finished.returncode == 2
        assert message in finished.stderr
    assert settings_of(LmEvalSettings).keys() <= {about.flag for about in run_flags.all_settings()}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(harness_runner.importlib.util, "find_spec", lambda name: None)
    with raises_naming(UserError, "lm-eval", "not installed", "pip install 'spmd-trainer[lm-eval]'"):
        harness_runner.Tasks(LmEvalSettings(("a",)))


def test_an_old_package_is_named(monkeypatch):
    monkeypatch.setattr(harness_runner.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(harness_runner.importlib.metadata, "version", lambda name: "0.4.9.1")
    with raises_naming(UserError, "lm-eval 0.4.9.1", "0.4.13", "pip install 'spmd-trainer[lm-eval]' --upgrade"):
        harness_runner.Tasks(LmEvalSettings(("a",)))


def test_the_tokenizer_is_that_of_the_training_input(tmp_path):
    job = make_job(tmp_path)
    tokenizer, start_id = mode.tokenizer_of(job.config.experiment)
    assert isinstance(tokenizer, ByteTokenizer)
    assert start_id == tokenizer.eos_id
    other = str(FOLDER)
    assert isinstance(mode.tokenizer_of(job.config.experiment, other)[0], HuggingFaceTokenizer)
    for name in ("train_datasets", "eval_datasets", "decode_datasets"):
        setattr(job.config.experiment.config, name, [])
    with raises_naming(UserError, job.config.experiment.label, "a tokenizer", "--model_args=tokenizer=PATH"):
        mode.tokenizer_of(job.config.experiment)
    tokenizer, start_id = mode.tokenizer_of(job.config.experiment, other)
    assert start_id is None


def test_texts_start_as_their_tokenizer_says_if_no_start_is_given():
    assert default_start(ByteTokenizer()) == "eos"
    assert default_start(HuggingFaceTokenizer(FOLDER)) == "tokenizer"


class WithoutPredictions(layers.LanguageModel):
    """A language model that gives only scores."""

    def compute_loss(self, predictions, input_batch):
        metrics, outputs = super().compute_loss(predictions, input_batch)
        return metrics, {"scores": outputs.per_sequence_xent if self.return_predictions else outputs.scores}


@pytest.mark.full
def test_a_model_without_logits_is_refused(tmp_path):
    def no_predictions(config):
        config.task.model = Config(WithoutPredictions, **dict(config.task.model.__arguments__))

    job = make_job(tmp_path, mesh=(1, 1, 1), customize=no_predictions)
    state = job.partitioner.initialize_train_state(jax.random.key(0), with_opt_states=False)
    with raises_naming(UserError, "logits", "task.model.per_example", "returns scores"):
        requests_of(job).scores([Scored((40, 41, 42), 1)], source_of(state, tmp_path))

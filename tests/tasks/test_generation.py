"""Generation: greedy tokens are those of the model without a cache, rows end on their own, any mesh gives the same text."""

import functools
import json
import logging
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import assert_names, raises_naming
from praxis import base_hyperparams, base_layer, decoder_hparams, pax_fiddle
from praxis.py_utils import NestedMap
from trained_helpers import make_job, read_lines

from spmd_trainer.decoder.generation import decode as generation
from spmd_trainer.decoder.generation import settings as settings_lib
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder
from spmd_trainer.inputs import ChatPromptInput
from spmd_trainer.inputs.tokenizers import ByteTokenizer
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.training import decode as decode_program

VOCAB = 100  # the tokens are ASCII characters
WIDTH, STEPS = 7, 12
SIZES = {"model_dims": 12, "hidden_dims": 17, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "head_dims": 4}
LENGTHS = np.array([7, 3, 1, 5, 2])


def batch_of(rows, lengths, **more):
    ids = np.random.default_rng(3).integers(1, VOCAB, (len(LENGTHS), WIDTH)).astype(np.int32)
    inside = np.arange(WIDTH) < LENGTHS[:, None]
    ids = np.where(inside, ids, 0)[rows]
    fields = {"prefix_lengths": LENGTHS[rows], "prompt_index": np.array(rows), **more}
    return NestedMap(ids=jnp.asarray(ids), **{name: jnp.asarray(value) for name, value in fields.items()})


ALL = [0, 1, 2, 3, 4]


def model(**options):
    spec = DecoderSpec(vocab_size=VOCAB, **SIZES)
    model_p = pax_fiddle.Config(DecoderLanguageModel, name="lm")
    model_p.lm_tpl.spec = spec
    model_p.generation = GenerationSettings(max_tokens=STEPS, **options)
    return base_hyperparams.instantiate(model_p)


@functools.cache
def variables():
    rows = np.ones((1, WIDTH), np.int32)
    batch = NestedMap(
        ids=rows, labels=rows, paddings=rows * 0.0, weights=rows * 1.0, segment_ids=rows, segment_pos=rows
    )
    found = jax.jit(model().init)(jax.random.key(5), batch)
    return jax.tree.map(lambda x: 3 * x, found)  # so that the model is surer of its tokens


@functools.cache
def decoder(tokenizer=ByteTokenizer(), **options):  # noqa: B008  # it has no state
    made = model(**options)

    @jax.jit
    def run(given, batch):
        rngs = {"random": jax.random.key(9)}
        with generation.tokenizer_of_texts(tokenizer):
            return made.apply(given, batch, method=made.decode, mutable=[base_layer.DECODE_CACHE], rngs=rngs)[0]

    return lambda batch: jax.tree.map(np.asarray, run(variables(), batch))


@functools.cache
def greedy():
    return decoder()(batch_of(ALL, LENGTHS))[1]


@functools.cache
def all_log_probs():
    """The model's log-probabilities [B, T, V] of the tokens after each token of the greedy texts, without a cache."""
    ids = greedy().output_ids[:, 0]
    zeros, places = jnp.zeros(ids.shape, jnp.float32), jnp.tile(jnp.arange(ids.shape[1]), (len(ids), 1))
    rows = NestedMap(ids=jnp.asarray(ids), labels=jnp.asarray(ids), paddings=zeros, weights=1 - zeros)
    rows.update(segment_ids=jnp.ones_like(places), segment_pos=places)
    made = model()
    return jax.jit(lambda given: made.apply(given, rows, method=made.compute_predictions).log_probs)(variables())


def test_greedy_tokens_are_those_of_the_model_without_a_cache():
    found, expected = greedy(), np.asarray(all_log_probs())
    for row, length in enumerate(LENGTHS):
        end = length + STEPS
        best = expected[row, length - 1 : end - 1]
        assert found.output_ids[row, 0, length:end].tolist() == best.argmax(-1).tolist()
        np.testing.assert_allclose(found.logprobs[row, 0, length:end], best.max(-1), rtol=1e-4, atol=1e-5)
        assert not found.logprobs[row, 0, :length].any()
        assert not found.output_ids[row, 0, end:].any()
    assert len({tuple(row) for row in found.output_ids[:, 0].tolist()}) == 5


def test_the_results_are_in_praxis_form():
    batch = batch_of(ALL, LENGTHS)
    scalars, found, metrics = decoder()(batch)
    assert (float(scalars.num_decoded[0]), float(scalars.generated_tokens[0]), metrics) == (5, STEPS, {})
    assert found.output_ids.shape == found.logprobs.shape == (5, 1, WIDTH + STEPS)
    np.testing.assert_array_equal(found.prefix_lengths, LENGTHS)
    np.testing.assert_array_equal(found.decode_lengths[:, 0], LENGTHS + STEPS)
    np.testing.assert_array_equal(found.prefix_ids[:, 0], batch.ids)

    class Characters:
        def ids_to_strings(self, ids, lengths, key=None):
            return ["".join(map(chr, row[:n])) for row, n in zip(ids, lengths, strict=True)]

    _, rows, _ = model().process_decode_out(Characters(), found)
    (prompt, row) = rows[1]
    assert prompt == "".join(map(chr, batch.ids[1, :3].tolist()))
    assert row["decoded_substr"] == "".join(map(chr, greedy().output_ids[1, 0, 3 : 3 + STEPS]))


def text_of(row):
    length = LENGTHS[row]
    return greedy().output_ids[row, 0, length : length + STEPS].tolist()


def test_rows_end_on_their_own():
    """At one of several ends of text, at a stop string that two tokens spell, or never."""
    tokens = [text_of(row) for row in range(5)]
    eos_ids = (tokens[0][2], tokens[1][4])
    stop = "".join(map(chr, tokens[3][6:8]))
    ends = []
    for row in tokens:
        by_eos = [i + 1 for i, token in enumerate(row) if token in eos_ids]
        at = "".join(map(chr, row)).find(stop)
        ends.append(min([*by_eos, at + len(stop) if at >= 0 else STEPS, STEPS]))
    assert len(set(ends)) > 2
    scalars, found, _ = decoder(eos_ids=eos_ids, stop=(stop, "never"), pad_id=1)(batch_of(ALL, LENGTHS))
    assert found.decode_lengths[:, 0].tolist() == [*(LENGTHS + ends)]
    for row, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
        assert found.output_ids[row, 0, length : length + end].tolist() == tokens[row][:end]
        assert set(found.output_ids[row, 0, length + end :].tolist()) <= {1}
        assert not found.logprobs[row, 0, length + end :].any()
    assert float(scalars.generated_tokens[0]) == pytest.approx(np.mean(ends))


@pytest.mark.full
def test_the_default_end_is_that_of_the_tokenizer_of_the_prompts():
    first = text_of(0)[0]
    found = decoder(ByteTokenizer(eos_id=first))(batch_of(ALL, LENGTHS))[1]
    assert found.decode_lengths[0, 0] == LENGTHS[0] + 1


@pytest.mark.full
def test_a_repetition_penalty_is_that_of_transformers():
    found = decoder(repetition_penalty=1e6)(batch_of(ALL, LENGTHS))[1]
    # With so large a penalty, positive logits of seen tokens become 0 and negative ones very negative.
    for row, length in enumerate(LENGTHS):
        tokens = found.output_ids[row, 0, : length + STEPS].tolist()
        assert not set(tokens[length:]) & set(tokens[:length])
        assert len(set(tokens[length:])) == STEPS


SAMPLING = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "num_samples": 2}


@pytest.mark.full
def test_a_row_s_samples_do_not_depend_on_the_other_rows():
    run = decoder(**SAMPLING)
    together = run(batch_of(ALL, LENGTHS))[1]
    for rows in ([4, 2, 0, 1, 3], [2, 2, 2, 1, 1]):
        found = run(batch_of(rows, LENGTHS))[1]
        np.testing.assert_array_equal(found.output_ids, together.output_ids[rows])
        np.testing.assert_array_equal(found.decode_lengths, together.decode_lengths[rows])
    samples = together.output_ids
    assert (samples[:, 0] != samples[:, 1]).any(axis=-1).all()
    sums = together.logprobs.sum(-1)
    assert (sums[:, 0] >= sums[:, 1]).all()
    other_index = run(batch_of(ALL, LENGTHS, prompt_index=np.arange(5) + 7))[1]
    assert (other_index.output_ids != samples).any()


@pytest.mark.full
def test_rows_that_fill_the_batch_are_not_continued():
    weights = np.array([1.0, 0, 1, 1, 0], np.float32)
    scalars, found, _ = decoder()(batch_of(ALL, LENGTHS, eval_sample_weights=weights))
    np.testing.assert_array_equal(found.decode_lengths[:, 0] - LENGTHS, np.where(weights > 0, STEPS, 0))
    np.testing.assert_array_equal(found.output_ids[weights > 0], greedy().output_ids[weights > 0])
    assert [float(x) for x in scalars.generated_tokens] == [STEPS, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0}, r"task\.model\.generation\.top_p=0; set it above 0"),
        ({"top_p": "0.9"}, r"top_p='0.9'; set it to a number"),
        ({"top_k": -1}, r"top_k=-1; set it to a whole number, 0 or more"),
        ({"temperature": -1.0}, r"temperature=-1.0; set it to 0 \(greedy\) or more"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0; set it above 0"),
        ({"stop": "User"}, r"stop='User'; give a tuple of non-empty texts"),
        ({"stop": ("",)}, r"stop=\('',\); give a tuple of non-empty texts"),
        ({"eos_ids": (VOCAB,)}, r"eos_ids=\(100,\); give a tuple of tokens from 0 to 99"),
        ({"eos_ids": 2}, r"eos_ids=2; give a tuple of tokens from 0 to 99"),
        ({"eos_ids": 0}, r"eos_ids=0; give a tuple of tokens from 0 to 99"),
        ({"pad_id": -1}, r"pad_id=-1; give a token from 0 to 99"),
        ({"num_samples": 2}, r"num_samples=2; greedy samples are all the same"),
        ({"max_tokens": 0}, r"max_tokens=0; set it to a whole number, 1 or more"),
    ],
)
def test_settings_that_can_t_be_used_are_named(options, message):
    with pytest.raises(UserError, match=message):
        GenerationSettings(**options).check(VOCAB)


def test_stop_strings_without_a_tokenizer_are_refused():
    with raises_naming(UserError, "stop=('x',)", "tokenizer"):
        decoder(None, stop=("x",))(batch_of(ALL, LENGTHS))


def test_praxis_own_decode_settings_are_refused_with_their_counterparts():
    generation.refuse_decoder_tpl(decoder_hparams.GreedyDecoderHParams())
    given = decoder_hparams.GreedyDecoderHParams(eos_id=3, seqlen=9)
    with raises_naming(UserError, "task.model.generation.eos_ids", "eos_id=3", "seqlen", "no counterpart"):
        generation.refuse_decoder_tpl(given)
    given = decoder_hparams.SampleDecoderHParams(p=0.9, temperature=0.7)
    with pytest.raises(UserError, match=r"top_k for k=40, .*top_p for p=0.9, .*temperature for temperature=0.7"):
        generation.refuse_decoder_tpl(given)


def test_settings_of_a_generation_config(tmp_path, caplog):
    def read(**config):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return settings_lib.from_folder(tmp_path)

    assert settings_lib.from_folder(tmp_path) == GenerationSettings()
    assert read(eos_token_id=2, top_p=0.5) == GenerationSettings(eos_ids=(2,), pad_id=2)
    given = read(do_sample=True, eos_token_id=[2, 3], pad_token_id=0, temperature=0.6, top_p=0.9, max_new_tokens=7)
    assert given == GenerationSettings(max_tokens=7, temperature=0.6, top_k=50, top_p=0.9, eos_ids=(2, 3), pad_id=0)
    given = read(do_sample=True, top_k=20, repetition_penalty=1.1, stop_strings="User")
    assert given == GenerationSettings(temperature=1.0, top_k=20, repetition_penalty=1.1, stop=("User",))
    assert settings_lib.from_folder(tmp_path, stop=(), max_tokens=3).max_tokens == 3
    with caplog.at_level(logging.WARNING):
        read(num_beams=4, min_p=0.1, typical_p=1.0)
    assert_names(caplog.text, "min_p=0.1, num_beams=4", "not support")
    for content in ("[1]", "{"):
        (tmp_path / "generation_config.json").write_text(content)
        with raises_naming(UserError, "generation_config.json", "JSON"):
            settings_lib.from_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    os.mkfifo(tmp_path / "generation_config.json")
    with raises_naming(UserError, "generation_config.json", "named pipe"):
        settings_lib.from_folder(tmp_path)


TALK = ["Hello there", "Hi", "How are you?", "Good"]
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}a:"


class Chat(SyntheticDecoder):
    """Conversations for a decoder whose 257 tokens, 3 heads and widths no mesh divides."""

    FILE = ""
    FPROP_DTYPE = jnp.float32
    MAX_SEQ_LEN = 8
    VOCAB_SIZE = 257
    MODEL_DIMS, HIDDEN_DIMS, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = SIZES.values()

    def decode_datasets(self):
        fields = {"files": self.FILE, "prefix_len": 17, "chat_template": TEMPLATE, "batch_size": 3}
        return [pax_fiddle.Config(ChatPromptInput, name="chat", **fields)]


def decode_dataset(directory, talk, mesh, *fields):
    fields = (f"FILE={str(talk)!r}", *fields)
    job = make_job(directory, mesh=mesh, exp=Chat, fields=fields, mode="decode_once")
    return decode_program.DecodeDataset(job, job.config.experiment.config.decode_datasets[0], 0), job


def decoded(directory, talk, mesh, *fields):
    dataset, job = decode_dataset(directory, talk, mesh, *fields)
    state = job.partitioner.initialize_train_state(jax.random.key(2), with_opt_states=False)
    state = state.replace(mdl_vars=jax.tree.map(lambda x: 3 * x, state.mdl_vars))
    metrics = dataset.decode(state, 0)
    return metrics, read_lines(directory / "decode_out" / "chat" / "step_0.jsonl")


@pytest.mark.full
def test_a_decode_of_conversations_is_the_same_on_any_mesh(tmp_path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in TALK))
    sampling = ("max_tokens=10", "temperature=0.9", "top_p=0.95", "num_samples=2", "stop=('e', ' ', 'a', 'o')")
    fields = [f"task.model.generation.{field}" for field in sampling]
    metrics, alone = decoded(tmp_path / "alone", talk, (1, 1, 1), *fields)
    assert [record["prompt"] for record in alone] == [f"u:{text}\na:" for text in TALK]
    assert metrics["num_decoded"] == 4
    lengths = [len(ids) for record in alone for ids in record["ids"]]
    assert metrics["generated_tokens"] == pytest.approx(np.mean(lengths))
    for record in alone:
        for ids, text in zip(record["ids"], record["outputs"], strict=True):
            whole = bytes(token for token in ids if token < 256)
            cut = min([at for at in map(whole.find, (b"e", b" ", b"a", b"o")) if at >= 0], default=len(whole))
            assert text == whole[:cut].decode(errors="replace")
            assert len(ids) == 10 or cut == len(whole) - 1 or ids[-1] == 256
    assert any(len(ids) < 10 for record in alone for ids in record["ids"])
    _, spread = decoded(tmp_path / "spread", talk, (1, 2, 3), *fields)
    for ours, theirs in zip(alone, spread, strict=True):
        assert (ours["ids"], ours["outputs"]) == (theirs["ids"], theirs["outputs"])
        np.testing.assert_allclose(ours["scores"], theirs["scores"], rtol=1e-4)


@pytest.mark.full
def test_the_cache_is_split_over_rows_and_heads(tmp_path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    sizes = ("NUM_HEADS=4", "NUM_KV_HEADS=2", "HEAD_DIMS=16", "decode_datasets[0].batch_size=8")
    dataset, _ = decode_dataset(tmp_path, talk, (1, 4, 2), *sizes, "task.model.generation.max_tokens=6")
    loops = [line for line in dataset.lower().compile().as_text().splitlines() if " while(" in line]
    # Keys and values of two layers: 8 rows over 'data' (4), 17 + 6 tokens, 2 heads over 'mdl' (2), width 16.
    carried = [re.findall(r"f32\[([\d,]+)\]", line.split(" while(")[0]) for line in loops]
    assert max(shapes.count("2,23,1,16") for shapes in carried) == 4
    assert not any(re.match(r"8,23,|\d+,23,2,16", shape) for shapes in carried for shape in shapes)

"""Prompts from the beginnings of files, and their decoding by praxis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take, write_files
from praxis import base_hyperparams, base_layer, decoder_hparams, layers, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import text

EOS = 256


def make(files, **kwargs):
    defaults = {"prefix_len": 4, "batch_size": 2}
    return base_hyperparams.instantiate(pax_fiddle.Config(text.PromptInput, files=files, **{**defaults, **kwargs}))


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path, b"hello", b"a\xff", b"")


def test_a_prompt_is_the_start_token_and_the_beginning_of_a_file(files):
    batch, last = drain(make(files))
    h, e, l = b"hel"  # noqa: E741
    np.testing.assert_array_equal(batch.ids, [[EOS, h, e, l], [EOS, ord("a"), 255, 0]])
    np.testing.assert_array_equal(batch.paddings, [[0, 0, 0, 0], [0, 0, 0, 1]])
    np.testing.assert_array_equal(batch.weights, [[1, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.prefix_lengths, [4, 3])
    np.testing.assert_array_equal(batch.prompt_index, [0, 1])
    np.testing.assert_array_equal(batch.eval_sample_weights, [1, 1])
    # The empty file's prompt, and a row that fills up the batch.
    np.testing.assert_array_equal(last.ids, [[EOS, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(last.prefix_lengths, [1, 1])
    np.testing.assert_array_equal(last.weights, [[1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.prompt_index, [2, -1])
    np.testing.assert_array_equal(last.eval_sample_weights, [1, 0])


def test_batches_are_what_input_specs_says(files):
    source = make(files)
    specs = {name: (spec.shape, spec.dtype) for name, spec in source.input_specs().items()}
    assert {name: (x.shape, x.dtype) for name, x in source.get_next().items()} == specs


def test_prompts_end_and_start_over(files):
    source = make(files, num_prompts=2)
    first = drain(source)
    assert [batch.prompt_index.tolist() for batch in first] == [[0, 1]]
    assert source.paths == tuple(files[:2])
    source.reset()
    assert_same(drain(source), first)


def test_two_processes_share_the_prompts(files):
    shares = [make(files, batch_size=1, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    assert_same(stack_processes(*map(drain, shares)), drain(make(files)))


def test_a_decode_continues_where_it_stopped(files):
    source = make(files)
    take(source, 1)
    resumed = make(files)
    resumed.set_state(source.get_state())
    assert_same(drain(resumed), drain(source))


def test_prompts_are_not_for_training(files):
    with raises_naming(ValueError, "PromptInput 'train': is_training", "decode", "use TextInput"):
        make(files, is_training=True)


def small_language_model(prefix_len, decode_steps):
    lm_p = pax_fiddle.Config(layers.TransformerLm, model_dims=8, vocab_size=257)
    stack_p = lm_p.stacked_transformer_tpl
    stack_p.model_dims, stack_p.hidden_dims, stack_p.num_layers, stack_p.num_heads = 8, 16, 1, 2
    model_p = pax_fiddle.Config(layers.LanguageModel, name="lm", lm_tpl=lm_p)
    model_p.decoder_tpl = decoder_hparams.GreedyDecoderHParams(
        seqlen=prefix_len + decode_steps, max_decode_steps=decode_steps, fprop_for_prefix=True, eos_id=EOS
    )
    return base_hyperparams.instantiate(model_p)


@pytest.mark.full
def test_praxis_decode_continues_the_prompts(files):
    source = make(files, batch_size=4, prefix_len=5)
    model = small_language_model(prefix_len=5, decode_steps=3)
    batch = source.get_next()
    rngs = {"random": jax.random.key(0)}

    @jax.jit
    def decode(variables, batch):
        (_, out, _), _ = model.apply(
            variables, batch, method=model.decode, mutable=[base_layer.DECODE_CACHE], rngs=rngs
        )
        return out

    @jax.jit
    def predict(variables, ids):
        zeros = jnp.zeros(ids.shape, jnp.float32)
        inputs = NestedMap(ids=ids, labels=ids, paddings=zeros, weights=1 - zeros)
        return jnp.argmax(model.apply(variables, inputs, method=model.compute_predictions, rngs=rngs).logits, axis=-1)

    trained_on = text.TextInput(files=files, seq_len=5, batch_size=4).get_next()
    variables = jax.jit(model.init)(jax.random.key(1), trained_on)
    out = jax.tree.map(np.asarray, decode(variables, batch))
    best = np.asarray(predict(variables, out.output_ids[:, 0]))
    for row, length in enumerate(batch.prefix_lengths):
        output = out.output_ids[row, 0]
        np.testing.assert_array_equal(output[:length], batch.ids[row, :length])
        np.testing.assert_array_equal(output[length : length + 3], best[row, length - 1 : length + 2])
    # praxis keeps the batch's own fields, so a decoded row can be traced; rows that fill up are left out.
    assert out.prompt_index.tolist() == [0, 1, 2, -1]
    _, rows, _ = model.process_decode_out(source, out)
    assert [prompt for prompt, _ in rows] == ["hell", "a\ufffd", ""]

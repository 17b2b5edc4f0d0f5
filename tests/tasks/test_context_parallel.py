"""Rows split over a sequence axis: training and generation give what one device gives, and nothing keeps whole rows."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest
from etils import epath
from facts import assert_names, raises_naming
from jax.sharding import NamedSharding, PartitionSpec
from praxis import base_hyperparams, base_layer, pax_fiddle
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer import sharding
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.llama import TinyLlamaLong
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.models.decoder_spec import DecoderSpec, DeltaSpec
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.training import experiment_config, verify
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import InspectConfig, VerifyConfig

AXES = ("replica", "data", "seq", "mdl")


def mesh_of(**sizes):
    """Returns a mesh on the first devices; axes that are not named have size 1."""
    shape = [(axis, sizes.get(axis, 1)) for axis in AXES]
    return sharding.create_device_mesh(shape, devices=jax.devices()[: math.prod(sizes.values())])


def packed_rows(rows=6, length=13):
    """Returns rows of several texts with padding at the end."""
    rng = np.random.default_rng(0)
    starts = np.sort(rng.integers(0, length, (rows, 2)), axis=1)
    index = np.arange(length)
    segment_ids = 1 + (index >= starts[:, :1]) + (index >= starts[:, 1:])
    segment_ids = np.where(index < length - rng.integers(0, 4, (rows, 1)), segment_ids, 0)
    first = np.stack([np.argmax(row[:, None] == row[None, :], axis=1) for row in segment_ids])
    return {
        "ids": rng.integers(0, 61, (rows, length)).astype(np.int32),
        "labels": rng.integers(0, 61, (rows, length)).astype(np.int32),
        "weights": (segment_ids > 0).astype(np.float32),
        "paddings": (segment_ids == 0).astype(np.float32),
        "segment_ids": segment_ids.astype(np.int32),
        "segment_pos": (index - first).astype(np.int32),
    }


class Packed(TinyLlamaLong):
    """Rows of several texts, and dropout, whose masks must not depend on the order of the tokens on the mesh."""

    DROPOUT = 0.2

    def datasets(self):
        return [Config(ArrayInput, name="train", is_training=True, arrays=packed_rows(), batch_size=6)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ({"data": 2, "seq": 4}, "ring"),
        ({"data": 2, "seq": 2, "mdl": 2}, "ring"),
        ({"data": 2, "seq": 4}, "all_to_all"),
        ({"data": 2, "seq": 2, "mdl": 2}, "all_to_all"),
    ],
    ids=str,
)
def test_verify_passes(sizes, form, tmp_path, capsys):
    resolved = experiment_config.resolve(Packed, (f"CONTEXT_PARALLEL={form!r}",))
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(mesh_of(**sizes))
    verify.verify(Job.build(VerifyConfig(resolved, epath.Path(tmp_path), verify_steps=2)))
    assert_names(capsys.readouterr().out, "same numbers", "one device", "replica=1, data=2")


class PackedChunks(Packed):
    """Packed rows of a model with chunks, which devices and texts divide elsewhere."""

    LAYER_PATTERN, WINDOW, UNROTATED_KINDS = ("chunked", "global"), 3, ("global",)


class PackedLinear(Packed):
    """Packed rows of a model with linear attention."""

    LAYER_PATTERN, WINDOW = ("linear", "global"), None
    DELTA = DeltaSpec(num_heads=3, values_per_head=2, key_dims=5, value_dims=4)


@pytest.mark.full
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
@pytest.mark.parametrize("experiment", [PackedChunks, PackedLinear])
def test_rows_with_chunks_or_linear_attention_give_the_same_numbers(experiment, form, tmp_path, capsys):
    resolved = experiment_config.resolve(experiment, (f"CONTEXT_PARALLEL={form!r}",))
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(mesh_of(data=2, seq=2, mdl=2))
    verify.verify(Job.build(VerifyConfig(resolved, epath.Path(tmp_path), verify_steps=2)))
    assert_names(capsys.readouterr().out, "same numbers", "one device")


def test_inputs_arrive_split_on_the_sequence():
    mapping = experiment_config.resolve(TinyLlamaLong).task_p.train.inputs_split_mapping
    assert mapping.map_2d == (("replica", "data"), "seq")


@pytest.mark.full
def test_attention_dropout_is_refused_where_rows_are_split(tmp_path):
    resolved = experiment_config.resolve(Packed, ("task.model.lm_tpl.spec.attention_dropout=0.1",))
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(mesh_of(seq=2))
    with raises_naming(UserError, "attention dropout", "split length"):
        verify.verify(Job.build(VerifyConfig(resolved, epath.Path(tmp_path), verify_steps=1)))


@pytest.mark.full
def test_a_train_step_keeps_no_array_of_whole_rows_or_of_all_masks(tmp_path):
    """The layers are a loop, before which differentiation would compute the masks of all blocks and keep them."""
    seq, length = 4, 1024
    resolved = experiment_config.resolve(TinyLlamaLong, (f"MAX_SEQ_LEN={length}", "NUM_LAYERS=4"))
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(mesh_of(seq=seq))
    job = Job.build(InspectConfig(resolved, epath.Path(tmp_path)))
    step = job.partitioner.partition(step_fns.train_step, job.process_inputs_shape_dtype, is_eval=False)
    program = step.lower(job.prng_key).compile().as_text()
    rows, heads = 6, 3
    block = length // seq // 2  # one block is a chunk
    elements = [math.prod(map(int, found.split(","))) for found in re.findall(r"(?:f32|pred)\[([\d,]+)\]", program)]
    largest_logits, own_logits = rows * heads * block**2, rows * length // seq * 61  # the vocabulary has 61 tokens
    assert max(elements) <= max(largest_logits, own_logits)


# --- generation -------------------------------------------------------------------------------------------------------

WIDTH, STEPS, HEAD = 6, 11, 4
LENGTHS = np.array([6, 3, 1, 5])


def language_model(num_heads, num_kv_heads, linear=False):
    spec = DecoderSpec(
        vocab_size=31,
        model_dims=12,
        hidden_dims=10,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dims=HEAD,
        layer_pattern=("local", "global"),
        window=4,
        initializer_range=0.5,
    )
    if linear:
        delta = DeltaSpec(num_heads=num_kv_heads, values_per_head=2, key_dims=HEAD, value_dims=5)
        spec = dataclasses.replace(spec, layer_pattern=("linear", "local"), delta=delta, norm_epsilon=1e-2)
    model_p = pax_fiddle.Config(DecoderLanguageModel, name="lm", mesh_axis_names=AXES, ici_mesh_shape=[1] * 4)
    model_p.lm_tpl.set(spec=spec, mesh_axis_names=AXES, ici_mesh_shape=[1] * 4)
    model_p.generation = GenerationSettings(max_tokens=STEPS)
    return base_hyperparams.instantiate(model_p)


def prompts():
    ids = np.random.default_rng(3).integers(0, 31, (len(LENGTHS), WIDTH)).astype(np.int32)
    return NestedMap(ids=ids, prefix_lengths=LENGTHS)


@functools.cache
def variables(*heads):
    ones = np.ones((1, WIDTH), np.int32)
    batch = NestedMap(
        ids=ones, labels=ones, paddings=ones * 0.0, weights=ones * 1.0, segment_ids=ones, segment_pos=ones
    )
    return jax.device_get(jax.jit(language_model(*heads).init)(jax.random.key(5), batch))


def decode_on(mesh, *heads):
    """Returns the generated texts, and the text of the compiled program."""
    model = language_model(*heads)

    def run(given, batch):
        with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
            rngs = {base_layer.RANDOM: jax.random.key(9)}
            return model.apply(given, batch, method=model.decode, mutable=[base_layer.DECODE_CACHE], rngs=rngs)[0]

    with jax.set_mesh(mesh):
        arguments = jax.device_put((variables(*heads), prompts()), NamedSharding(mesh, PartitionSpec()))
        compiled = jax.jit(run).lower(*arguments).compile()
        return np.asarray(compiled(*arguments)[1].output_ids), compiled.as_text()


@functools.cache
def on_one_device(*heads):
    return decode_on(mesh_of(), *heads)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "heads", "cached"),
    [
        # [rows, tokens, heads] of the cache on one device. The cache holds 17 tokens.
        ({"data": 2, "mdl": 4}, (6, 2), (2, 17, 1)),  # 2 copies of each key head
        ({"data": 2, "mdl": 4}, (6, 3), (2, 17, 1)),  # the last device has only padding
        ({"data": 2, "seq": 4}, (6, 2), (2, 5, 2)),
        ({"data": 2, "seq": 2, "mdl": 2}, (6, 3), (2, 9, 2)),
    ],
    ids=str,
)
def test_generation_on_a_mesh_splits_the_cache_and_gives_the_same_tokens(sizes, heads, cached):
    expected, whole = on_one_device(*heads)
    found, program = decode_on(mesh_of(**sizes), *heads)
    np.testing.assert_array_equal(found, expected)
    # Two layers, keys and values, are carried by the loop over the new tokens.
    assert loop_arrays(whole).count((4, 17, heads[1], HEAD)) == 4
    assert loop_arrays(program).count((*cached, HEAD)) == 4
    assert not [shape for shape in shapes(program) if math.prod(shape) >= 4 * 17 * heads[1] * HEAD and 17 in shape]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"data": 2, "seq": 4}, {"data": 2, "seq": 2, "mdl": 2}], ids=str)
def test_generation_with_linear_attention_gives_the_same_tokens_on_a_mesh(sizes):
    heads = (6, 3, True)
    np.testing.assert_array_equal(decode_on(mesh_of(**sizes), *heads)[0], on_one_device(*heads)[0])


def loop_arrays(program):
    """Returns the shapes of the float32 arrays that the largest loop of a program carries."""
    loops = re.findall(r" = \((.*)\) while\(", program)
    return shapes(max(loops, key=len))


def shapes(text):
    return [tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)]

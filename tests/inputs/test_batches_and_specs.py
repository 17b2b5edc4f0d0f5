"""Padding of batches, and their shapes and dtypes."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from facts import raises_naming
from input_helpers import write_files
from praxis import base_hyperparams, base_input, pax_fiddle
from praxis.py_utils import NestedMap

import spmd_trainer.inputs
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import batches, synthetic, text


def as_shapes(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype).name), tree)


def test_pad_batch_adds_rows_of_weight_zero():
    batch = synthetic.SyntheticLmInput(seq_len=3, batch_size=2).get_next()
    padded = batches.pad_batch(batch, 5)
    assert isinstance(padded, NestedMap)
    for name, value in batch.items():
        assert padded[name].shape == (5, *value.shape[1:])
        assert padded[name].dtype == value.dtype
        np.testing.assert_array_equal(padded[name][:2], value)
    for name, fill in (("weights", 0), ("eval_sample_weights", 0), ("segment_ids", 0), ("paddings", 1)):
        assert (padded[name][2:] == fill).all()


def test_pad_batch_repeats_values_that_the_model_has_met():
    batch = NestedMap(
        x=NestedMap(images=np.array([[3.0], [4.0]])), prefix_lengths=np.array([2, 3]), prompt_index=np.array([0, 1]),
        weight=np.ones(2, np.float32),
    )  # fmt: skip
    padded = batches.pad_batch(batch, 3)
    np.testing.assert_array_equal(padded.x.images, [[3.0], [4.0], [3.0]])
    np.testing.assert_array_equal(padded.prefix_lengths, [2, 3, 2])
    np.testing.assert_array_equal(padded.prompt_index, [0, 1, -1])
    np.testing.assert_array_equal(padded.weight, [1, 1, 0])


def test_a_batch_of_the_right_size_is_left_alone():
    batch = NestedMap(x=np.zeros(2))
    assert batches.pad_batch(batch, 2) is batch


@pytest.mark.parametrize(
    ("batch", "to_size", "facts"),
    [
        ({"x": np.zeros((2, 3)), "weights": np.zeros(2)}, 1, ["2 rows", "to 1"]),
        ({"x": np.zeros(2), "src": {"ids": np.zeros(2)}}, 4, ["src/ids, x", "`eval_sample_weights`"]),
        ({"x": np.zeros(2), "weights": np.zeros(3)}, 4, ["weights: 3, x: 2"]),
        ({"x": np.float32(1), "weights": np.zeros(3)}, 4, ["x: a scalar"]),
        ({"weights": np.zeros(0)}, 4, ["0 rows", "padded"]),
    ],
)
def test_batches_that_cannot_be_padded(batch, to_size, facts):
    with raises_naming(ValueError, *facts):
        batches.pad_batch(batch, to_size)


def test_specs_of_a_text_dataset_cost_no_reading(tmp_path):
    config = pax_fiddle.Config(
        text.TextInput, files=write_files(tmp_path, b"hello"), seq_len=3, batch_size=2, is_training=True
    )
    provider = base_hyperparams.instantiate(pax_fiddle.Config(batches.DatasetSpecsProvider, input_p=config))
    expected = as_shapes(batches.lm_input_specs(2, 3))
    assert as_shapes(provider.get_input_specs()) == expected
    assert as_shapes(batches.dataset_input_specs(config)) == expected
    source = base_hyperparams.instantiate(config)
    assert as_shapes(batches.dataset_input_specs(source)) == expected
    assert as_shapes(source.get_next()) == expected


class PlainInput(base_input.BaseInput):
    """An input of somebody else, which knows no specs."""

    def get_next(self):
        return NestedMap(x=np.zeros((self.batch_size, 3), np.float16), y=np.zeros(self.batch_size, np.int32))


@pytest.mark.parametrize("settings", [{"files": "nowhere/*.txt"}, {"files": "x.txt", "tokenizer": "nowhere.json"}])
def test_an_input_s_own_error_has_no_configuration_behind_it(settings):
    config = pax_fiddle.Config(text.TextInput, name="corpus", seq_len=4, batch_size=2, **settings)
    provider = pax_fiddle.build(pax_fiddle.Config(batches.DatasetSpecsProvider, input_p=config))
    for get_specs in (provider.get_input_specs, lambda: batches.dataset_input_specs(config)):
        with pytest.raises(UserError, match=r"^TextInput 'corpus': .*there is no") as refused:
            get_specs()
        assert "Fiddle" not in str(refused.value)


def test_specs_of_any_other_dataset_are_measured():
    config = pax_fiddle.Config(PlainInput, batch_size=4, batch_padding_size=2)
    assert as_shapes(batches.dataset_input_specs(config)) == {"x": ((4, 3), "float16"), "y": ((4,), "int32")}
    with raises_naming(ValueError, "PlainInput", "no input_specs()", "config"):
        batches.dataset_input_specs(base_hyperparams.instantiate(config))


def test_specs_of_a_language_model_are_those_of_a_batch():
    batch = synthetic.SyntheticLmInput(seq_len=3, batch_size=2).get_next()
    assert as_shapes(batches.lm_input_specs(2, 3)) == as_shapes(batch)
    with pytest.raises(ValueError, match="no input_p; set it"):
        batches.DatasetSpecsProvider().get_input_specs()


def test_the_package_exports_its_names():
    assert {"TextInput", "pad_batch", "stdlib_heldout_files"} <= set(dir(spmd_trainer.inputs))
    for name in dir(spmd_trainer.inputs):
        assert getattr(spmd_trainer.inputs, name) is not None
    assert spmd_trainer.inputs.TextInput is text.TextInput
    with pytest.raises(AttributeError, match=r"No spmd_trainer\.inputs attribute Nope"):
        spmd_trainer.inputs.Nope  # noqa: B018


@pytest.mark.full
def test_imports_are_cheap():
    code = """
import sys
import spmd_trainer.inputs
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import prefetch, stdlib_text
assert not {"jax", "praxis", "tensorflow"} & set(sys.modules)
from spmd_trainer.inputs import *
assert TextInput and TfRecordInput and GrainInput
from spmd_trainer.inputs import batches, files, indexed, synthetic, text
from spmd_trainer.tasks.lm import input_generator
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

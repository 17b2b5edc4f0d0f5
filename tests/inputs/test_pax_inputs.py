"""Inputs under Pax's names, used as Pax's experiment files use them."""

import numpy as np
import pytest
from praxis import base_hyperparams, base_input, pax_fiddle

from spmd_trainer.inputs import batches
from spmd_trainer.tasks.lm import input_generator


def make_config(is_training=True):
    input_p = input_generator.SyntheticLmData.HParams()
    input_p.batch_size = 4
    input_p.seq_len = 6
    return pax_fiddle.Config(base_input.LingvoInputAdaptor, input=input_p, is_training=is_training)


@pytest.mark.parametrize("is_training", [True, False])
def test_synthetic_lm_data_through_the_adaptor(is_training):
    config = make_config(is_training)
    assert base_input.LingvoInputAdaptor.get_batch_size(config) == 4
    source = base_hyperparams.instantiate(config)
    for _ in range(2):
        batch = source.get_next_padded()
        for name in ("ids", "labels", "segment_ids", "weights"):
            np.testing.assert_array_equal(batch[name], np.ones((4, 6)))
        np.testing.assert_array_equal(batch.paddings, np.zeros((4, 6)))
        np.testing.assert_array_equal(batch.segment_pos, np.tile(np.arange(6), (4, 1)))
        np.testing.assert_array_equal(batch.eval_sample_weights, np.ones(4))
    specs = batches.dataset_input_specs(config)
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }
    source.reset()
    assert source.get_next().ids.shape == (4, 6)


def test_settings_that_were_forgotten():
    config = pax_fiddle.Config(
        base_input.LingvoInputAdaptor, input=input_generator.SyntheticLmData.HParams(), is_training=True
    )
    with pytest.raises(ValueError, match=r"batch_size=0 and seq_len=0; set both"):
        batches.dataset_input_specs(config)
    with pytest.raises(ValueError, match=r"batch_size=0 and seq_len=0; set both"):
        config.input.Instantiate()

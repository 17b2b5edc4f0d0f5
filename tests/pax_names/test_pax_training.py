"""Experiments of paxml train at tiny sizes, with `paxml` renamed and nothing else: data, evaluation and checkpoint included."""

import math

import numpy as np
import pax_helpers
import pytest
from praxis import pax_fiddle

import spmd_trainer as st
from spmd_trainer.inputs import ArrayInput

EXPERIMENTS = pax_helpers.pax_table()
SPMD = {"ICI_MESH_SHAPE": [1, 4, 2]}
PIPELINE = {"ICI_MESH_SHAPE": [2, 1, 2, 2], "NUM_STAGES": 2, "MICROBATCH_SIZE": 2, "EMB_W_DATA_DIMS": "data"}


def train(module, name, tmp_path, **attributes):
    cls = pax_helpers.tiny(EXPERIMENTS.experiments(module)[name], **attributes)
    result = st.train(cls, tmp_path / "run")
    assert result.step == 4
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert (tmp_path / "run" / "checkpoints" / "4").exists()
    return result


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("C4SpmdPipelineGpt3SmallAdam8Replicas", PIPELINE),
        pytest.param("C4Spmd1BAdam4Replicas", SPMD, marks=pytest.mark.slow),
        pytest.param("C4SpmdGpt3L16AdamOrgHP", SPMD, marks=pytest.mark.slow),
    ],
)
def test_c4_on_a_local_seqio_task(name, attributes, tmp_path):
    pax_helpers.add_token_task("tiny_c4")
    result = train("tasks.lm.params.c4", name, tmp_path, TRAIN_MIXTURE="tiny_c4", EVAL_MIXTURE="tiny_c4", **attributes)
    assert "C4Validation/log_pplx" in result.metrics


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("BertSpmdL4H128", {"MESH_SHAPE": [1, 4, 2], "MLPERF_REMASK": False}),
        pytest.param("BertAdamL4H128", {"MLPERF_REMASK": True}, marks=pytest.mark.slow),
    ],
)
def test_bert_on_a_made_up_record_file(name, attributes, tmp_path):
    records = pax_helpers.write_bert_records(tmp_path / "bert.tfrecord", count=24)
    module = "tasks.lm.params.bert"
    published = EXPERIMENTS.experiments(module)[name]

    def datasets(self):
        inputs = published.datasets(self)
        for p in inputs:
            p.input_file, p.max_sequence_length, p.max_predictions_per_seq = str(records), 16, 4
            p.prepacking_batch_size = 8
            p.mlm_augmenter.Set(vocab_size=64, mask_token_id=3)
        return inputs

    result = train(module, name, tmp_path, datasets=datasets, PERCORE_BATCH_SIZE=1, ENABLE_BFLOAT16=False, **attributes)
    assert "test/total_loss" in result.metrics


@pytest.mark.full
def test_mnist_on_arrays(tmp_path):
    module, name = "tasks.vision.params.mnist", "MnistExperiment"

    def datasets(self):
        arrays = {"inputs": np.zeros((16, 28, 28, 1), np.float32), "labels": np.arange(16, dtype=np.int32) % 10}
        return [
            pax_fiddle.Config(ArrayInput, name=name, arrays=arrays, batch_size=8, is_training=name == "train")
            for name in ("train", "test")
        ]

    result = train(module, name, tmp_path, datasets=datasets, ICI_MESH_SHAPE=[1, 8, 1])
    assert "accuracy" in result.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "attributes"),
    [
        ("tasks.lm.params.c4", "LmCloudSpmdAdam", SPMD),
        ("tasks.lm.params.nvidia", "TestSmallConfig", PIPELINE | {"DCN_MESH_SHAPE": [1, 1, 1, 1]}),
        ("contrib.gpu.scripts_gpu.configs", "Synthetic126M", SPMD | {"DCN_MESH_SHAPE": [1, 1, 1]}),
    ],
)
def test_experiments_on_synthetic_data(module, name, attributes, tmp_path):
    train(module, name, tmp_path, **attributes)


def test_the_table_names_the_experiments_that_train_here():
    here = {
        "BertAdamL4H128",
        "BertSpmdL4H128",
        "MnistExperiment",
        "LmCloudSpmdAdam",
        "TestSmallConfig",
        "Synthetic126M",
    }
    here |= {"C4SpmdPipelineGpt3SmallAdam8Replicas", "C4Spmd1BAdam4Replicas", "C4SpmdGpt3L16AdamOrgHP"}
    assert set(EXPERIMENTS.TRAINED) == here

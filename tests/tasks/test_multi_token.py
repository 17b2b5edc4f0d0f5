"""Multi-token prediction: the further losses by their definition, on any mesh, and a decoder that doesn't use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import Decoder, evaluating, random_ids, small_spec
from etils import epath
from facts import assert_names
from praxis import base_layer
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer import sharding
from spmd_trainer.decoder import context as context_lib
from spmd_trainer.decoder.layers import DecoderLayer
from spmd_trainer.experiments.lm import deepseek, llama
from spmd_trainer.kernels import sequence_order
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.step import pjit
from spmd_trainer.training import experiment_config, verify
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import VerifyConfig

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def defined_losses(decoder, ids, labels, weights):
    """The mean cross entropy of each layer, by loops over the tokens that it predicts."""
    params, spec = decoder.variables["params"], decoder.spec
    paddings = (SEGMENTS == 0).astype(np.float32)
    segments = np.where(SEGMENTS == 0, -1, SEGMENTS)
    with evaluating():
        logits = decoder.layer.apply(
            decoder.variables, ids, paddings, segment_ids=SEGMENTS, segment_pos=POSITIONS, mutable=True
        )[0].logits
        # The final norm's output, from the logits of a square output layer.
        hidden = np.linalg.lstsq(np.asarray(params["logits"]["w"]).T, np.asarray(logits).reshape(-1, 31).T, rcond=None)[
            0
        ]
        hidden = hidden.T.reshape(*ids.shape, -1).astype(np.float32)
        layer = base_layer.instantiate(Config(DecoderLayer, name="layer", spec=small_spec(mtp_layers=2)))
        context = context_lib.of_rows(
            spec, sequence_order.of_rows(ids.shape[1], (), None), jnp.asarray(segments), jnp.asarray(POSITIONS)
        )
        means = []
        for k in (1, 2):
            mtp = params["mtp"][f"layer_{k - 1}"]
            later = np.concatenate([ids[:, k:], np.zeros((2, k), int)], axis=1)
            embedded = np.asarray(params["token_emb"]["w"])[later]
            joined = rms(embedded, mtp["token_norm"]["scale"]) @ mtp["token"]["w"]
            joined += rms(hidden, mtp["hidden_norm"]["scale"]) @ mtp["hidden"]["w"]
            hidden = np.asarray(layer.apply({"params": mtp["layer"]}, jnp.asarray(joined), context))
            scores = rms(hidden, mtp["final_norm"]["scale"]) @ params["logits"]["w"]
            found = [
                (float(weights[b, t + k]), -float(jax.nn.log_softmax(scores[b, t])[labels[b, t + k]]))
                for b, t in np.ndindex(*ids.shape)
                if t + k < ids.shape[1] and segments[b, t] == segments[b, t + k]
            ]
            means.append(sum(w * x for w, x in found) / sum(w for w, _ in found))
    return means


def test_the_further_losses_are_those_of_the_definition():
    decoder = Decoder(small_spec(mtp_layers=2, mtp_weight=0.3))
    ids, labels = random_ids((2, 8)), random_ids((2, 8), seed=5)
    weights = (SEGMENTS > 0) * np.random.default_rng(2).integers(0, 3, SEGMENTS.shape).astype(np.float32)
    outputs = decoder(
        ids,
        paddings=(SEGMENTS == 0).astype(np.float32),
        labels=NestedMap(class_ids=labels, class_weights=weights),
        segment_ids=SEGMENTS,
        segment_pos=POSITIONS,
    )
    means = defined_losses(decoder, np.asarray(ids), np.asarray(labels), weights)
    assert outputs.aux_loss == pytest.approx(0.3 * sum(means) / 2, rel=1e-4)
    assert outputs.total_loss == pytest.approx(float(outputs.avg_xent) + 0.3 * sum(means) / 2, rel=1e-4)


def test_rows_shorter_than_a_layer_looks_ahead_add_nothing():
    decoder = Decoder(small_spec(mtp_layers=3))
    ids = random_ids((2, 1))
    outputs = decoder(ids, labels=NestedMap(class_ids=ids, class_weights=np.ones((2, 1), np.float32)))
    assert outputs.aux_loss == 0


def test_their_flops_are_counted():
    spec = DecoderSpec(vocab_size=50, model_dims=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dims=4)
    further = DecoderSpec(**{**vars(spec), "mtp_layers": 2})
    # The output layer, and attention to half of 10 tokens with 2 heads of 4, forward and backward, in each layer.
    expected = 2 * (6 * 50 * 8 + 6 * 2 * (4 + 4) * 5)
    assert further.matrix_flops(1000, 0, 10) - spec.matrix_flops(1000, 0, 10) == expected


class Long(llama.LongRows, deepseek.TinyDeepSeekMtp):
    """Rows split over a sequence axis."""

    ICI_MESH_SHAPE = (1, 2, 2, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("experiment", "sizes"),
    [
        (deepseek.TinyDeepSeekMtp, {"replica": 1, "data": 4, "mdl": 2}),
        (Long, {"replica": 1, "data": 2, "seq": 2, "mdl": 2}),
    ],
)
def test_verify_passes(experiment, sizes, tmp_path, capsys):
    resolved = experiment_config.resolve(experiment)
    mesh = sharding.create_device_mesh(list(sizes.items()), devices=jax.devices()[:8])
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(mesh)
    verify.verify(Job.build(VerifyConfig(resolved, epath.Path(tmp_path), verify_steps=2)))
    assert_names(capsys.readouterr().out, "same numbers", "one device")

"""The benchmarks' hand-written step has the same variables, loss and gradient as the trainer's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import baseline_lm, speed_lm
from spmd_trainer import sharding, tasks_lib
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns

SIZES = baseline_lm.Sizes(layers=2, width=32, heads=2, hidden=48, seq=12, batch=4)


class Small(speed_lm.SpeedLm):
    """SpeedLm in a size for tests."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = SIZES.layers, SIZES.width, SIZES.hidden, SIZES.heads
    MAX_SEQ_LEN, GLOBAL_BATCH_SIZE = SIZES.seq, SIZES.batch


def baseline_variables(params):
    """Returns the trainer's variables under the baseline's names, with the vocabulary padded."""
    padding = baseline_lm.PADDED_VOCAB - baseline_lm.VOCAB
    lm = params["lm"]
    logits = lm["softmax"]["logits_ffn"]

    def layer(i):
        of_layer = lm["transformer"][f"x_layers_{i}"]
        attention, ffn = of_layer["self_attention"], of_layer["ff_layer"]
        return {
            "ln1": of_layer["layer_norm"]["scale"],
            "ln1_shift": of_layer["layer_norm"]["bias"],
            "ln2": ffn["layer_norm"]["scale"],
            "ln2_shift": ffn["layer_norm"]["bias"],
            "qkv": attention["combined_qkv"]["w"],
            "out": attention["post"]["w"],
            "w1": ffn["ffn_layer1"]["linear"]["w"],
            "b1": ffn["ffn_layer1"]["bias"]["b"],
            "w2": ffn["ffn_layer2"]["linear"]["w"],
            "b2": ffn["ffn_layer2"]["bias"]["b"],
        }

    return {
        "emb": jnp.pad(logits["linear"]["w"].T, ((0, padding), (0, 0))),
        "bias": jnp.pad(logits["bias"]["b"], (0, padding)),
        "scale": lm["final_ln"]["scale"],
        "shift": lm["final_ln"]["bias"],
        "layers": [layer(i) for i in range(SIZES.layers)],
    }


@pytest.mark.full
def test_baseline_and_trainer_agree_on_variables_loss_and_gradient():
    task = tasks_lib.build_task(Small().task())
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), batches.lm_input_specs(SIZES.batch, SIZES.seq))
    tokens = np.random.default_rng(5).integers(0, 257, (SIZES.batch, SIZES.seq + 1)).astype(np.int32)
    batch.ids, batch.labels = tokens[:, :-1], tokens[:, 1:]
    batch.paddings = np.zeros_like(batch.paddings)
    batch.paddings[1, -4:] = 1
    batch.weights = 1 - batch.paddings
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    mesh = sharding.create_device_mesh([(name, 1) for name in baseline_lm.MESH], devices=jax.devices()[:1])
    partitioner = pjit.PjitPartitioner(mesh)
    partitioner.setup(task, shapes)
    state = partitioner.initialize_train_state(jax.random.key(2))
    variables = baseline_variables(state.mdl_vars["params"])

    def of_trainer(state):
        output, _, grads = step_fns.gradients(partitioner.layout, state.mdl_vars, jax.random.key(0), batch)
        accuracy, count = output.weighted_scalars["fraction_of_correct_next_step_preds"]
        return output.loss, accuracy, count, baseline_variables(grads["params"])

    @jax.jit
    def of_baseline(params):
        rows = {name: batch[name] for name in ("ids", "labels", "paddings", "weights")}
        (loss, metrics), grads = jax.value_and_grad(baseline_lm.loss_fn, has_aux=True)(params, rows)
        return loss, metrics["accuracy"], metrics["tokens"], grads

    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
        jnp.shape, jax.eval_shape(lambda: baseline_lm.init(jax.random.key(0), SIZES))
    )
    with jax.set_mesh(mesh):
        loss, accuracy, count, grads = jax.jit(of_trainer)(state)
        baseline_loss, baseline_accuracy, baseline_count, baseline_grads = of_baseline(variables)
    assert baseline_loss == pytest.approx(float(loss), rel=1e-5)
    assert (float(baseline_accuracy), float(baseline_count)) == (float(accuracy), float(count)) == (accuracy, 44.0)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * scale), baseline_grads, grads)

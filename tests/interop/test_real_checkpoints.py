"""Checkpoints that paxml wrote, on any mesh: the same bits, the same logits, the same losses as they are trained further."""

import jax
import numpy as np
import pytest
from pax_models import MESHES, assert_holds, job_on, restored, snapshot
from praxis import base_layer, py_utils

from spmd_trainer.models.base import praxis_rngs
from spmd_trainer.step import step_fns

CHECKPOINTS = [
    ("UnevenRepeatedAdam", "zarr_1.1"),
    ("PlainAdamEma", "zarr_1.1"),
    ("UnevenRepeatedAdafactor", "ocdbt_1.2"),
]
# `make test` runs one, on one mixed mesh.
SHORT = ("UnevenRepeatedAdam", (2, 2, 2))
CASES = [
    pytest.param(name, kind, mesh, marks=() if (name, mesh) == SHORT else pytest.mark.full)
    for name, kind in CHECKPOINTS
    for mesh in MESHES
]
TOLERANCE = 1e-5
KEY = jax.random.key(1)


def batch_of(expected, prefix):
    return py_utils.NestedMap({k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)})


def logits(job, state, batch):
    """The model's logits, computed on the job's mesh."""
    metadata = job.partitioner.metadata

    def run(state, batch):
        with base_layer.JaxContext.new_context(hparams=step_fns.model_context(job.task, do_eval=True)):
            return job.task.model.apply(
                metadata.slice(state).mdl_vars,
                method=lambda model: model.compute_predictions(batch).logits,
                rngs=praxis_rngs(KEY),
            )

    with jax.set_mesh(metadata.mesh):
        return np.asarray(jax.jit(run)(state, batch))


def further_losses(job, state, batches):
    """Trains on a state; the losses."""
    partitioner = job.partitioner
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    losses = []
    for batch in batches:
        state, output = step(state, KEY, partitioner.layout.put(batch))
        losses.append(float(output.loss))
    return losses


@pytest.mark.parametrize(("name", "kind", "mesh"), CASES, ids=str)
def test_bits_logits_and_further_losses(pax_data, name, kind, mesh):
    directory, expected = pax_data.checkpoints(name, kind), pax_data.expected(name)
    before = snapshot(directory)
    job = job_on(name, mesh)
    found = restored(directory, job)
    assert found.step == int(found.state.step) == 20
    assert_holds(found.state, job.partitioner.metadata.variables, expected)
    ours = logits(job, found.state, batch_of(expected, "input/"))
    np.testing.assert_allclose(ours, expected["logits"], rtol=0, atol=1e-5)
    batches = [batch_of(expected, f"train/{i}/") for i in range(5)]
    losses = further_losses(job, found.state, batches)
    np.testing.assert_allclose(losses, expected["train_losses_from_here"], rtol=TOLERANCE)
    assert snapshot(directory) == before


@pytest.mark.full
def test_several_optimizers_continue(pax_data):
    """Each variable has the state of its own optimizer; another assignment would give other losses at once."""
    job, expected = job_on("MultiOptimizer", (1, 4, 2)), pax_data.expected("MultiOptimizer")
    state = restored(pax_data.checkpoints("MultiOptimizer"), job).state
    momenta = [spec.path for spec in jax.tree.leaves(job.partitioner.metadata.variables) if "/trace/" in spec.path]
    assert len(momenta) == 2
    assert all("softmax" in path for path in momenta)
    batches = [batch_of(expected, f"train/{number}/") for number in range(5)]
    losses = further_losses(job, state, batches)
    np.testing.assert_allclose(losses, expected["train_losses_from_here"], rtol=TOLERANCE)

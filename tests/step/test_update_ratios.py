"""Norms of each layer's gradients, variables and updates are those of a plain computation, on any mesh, and absent by default."""

import jax
import numpy as np
import pytest
from trained_helpers import make_job

from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import step_fns
from spmd_trainer.step.packing import summary_name
from spmd_trainer.training.verify import _logical

pytestmark = pytest.mark.full
ON = "task.train.update_ratio_summary=True"
STACKED = "params/lm/transformer/repeat/sub/x_layers_0/ff_layer/ffn_layer1/linear/w"
BEFORE_CLIPPING = "task.train.learner.optimizer.clip_gradient_norm_to_value=0.01"


def summaries_and_states(mesh, *fields):
    """The summaries of the second step, and the variables before and after it at logical shapes."""
    job = make_job("/nowhere", mesh=mesh, fields=fields)
    partitioner = job.partitioner
    step = partitioner.partition(step_fns.train_step, job.inputs_shape_dtype, is_eval=False)
    state = partitioner.initialize_train_state(job.prng_key)
    batch = partitioner.layout.put(job.build_train_input().get_next_padded())
    state, _ = step(state, job.prng_key, batch)  # changes nothing: the learning rate begins at 0
    before = _logical(partitioner.metadata, state)
    state, output = step(state, job.prng_key, batch)
    found = {summary_name(name): np.asarray(x) for name, x in output.summary_tensors.items()}
    return found, before, _logical(partitioner.metadata, state)


def plain_gradients():
    """{variable: gradient} of the same batch on one device, without any mesh."""
    job = make_job("/nowhere", mesh=(1, 1, 1))
    state = job.partitioner.initialize_train_state(job.prng_key)
    batch = job.build_train_input().get_next_padded()
    key = jax.random.fold_in(job.prng_key, 0)
    with jax.set_mesh(job.partitioner.mesh):
        _, _, grads = jax.jit(lambda v, b: step_fns.gradients(job.partitioner.layout, v, key, b))(
            state.mdl_vars, jax.tree.map(np.asarray, batch)
        )
    return {name: np.asarray(x) for name, x in named_leaves(grads)}


def norm(x, name):
    return np.sqrt(np.sum(np.square(x), axis=tuple(range(1, x.ndim)) if "/repeat/" in name else None))


@pytest.mark.parametrize("mesh", [(1, 4, 2), (1, 1, 8)])
def test_norms_are_those_of_a_plain_computation(mesh):
    # 8 parts of a vocabulary of 257 and of a width of 67: most variables are padded.
    found, before, after = summaries_and_states(mesh, ON, BEFORE_CLIPPING)
    grads = plain_gradients()
    assert len(grads) == 15
    for name, grad in grads.items():
        old, new = (variables[f"mdl_vars/{name}"] for variables in (before, after))
        np.testing.assert_allclose(found[f"layers/grad_norm/{name}"], norm(grad, name), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found[f"layers/var_norm/{name}"], norm(old, name), rtol=1e-5)
        size = norm(old, name)
        ratio = np.where(size == 0, 0, norm(new - old, name) / np.where(size == 0, 1, size))
        np.testing.assert_allclose(found[f"layers/update_ratio/{name}"], ratio, rtol=1e-3, atol=1e-7)
    assert found[f"layers/grad_norm/{STACKED}"].shape == (2,)  # of the two layers
    assert found[f"layers/update_ratio/{STACKED}"].min() > 0
    total = np.sqrt(sum(np.sum(x**2) for name, x in found.items() if name.startswith("layers/grad_norm/")))
    np.testing.assert_allclose(total, found["learning/raw_grad_norm"], rtol=1e-5)


def test_by_default_there_are_none():
    found, _, _ = summaries_and_states((1, 1, 1))
    assert not [name for name in found if name.startswith("layers/")]

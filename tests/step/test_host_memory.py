"""Optimizer states and named activations in pinned host memory: the same numbers, and what the program holds where."""

import types

import jax
import numpy as np
import pytest

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.llama import TinyLlama
from spmd_trainer.inputs import batches
from spmd_trainer.step import host_states, step_fns
from tests.facts import raises_naming
from tests.step.test_partitioning import KEY, LENGTH, ROWS, make_batch, make_partitioner

pytestmark = pytest.mark.xdist_group("partitioning")

# Without instructions that multiply and add at once: the compiler chooses them for each loop anew, which changes the last bit.
SAME_BITS = {"xla_cpu_max_isa": "AVX"}


def make_task(experiment=TinyLlama, learner=None, **train):
    task_p = experiment().task()
    task_p.train.set(**train)
    task_p.train.learner.set(**(learner or {}))
    return tasks_lib.build_task(task_p)


def trained(sizes, learner=None, steps=2, batch=None, num_minibatches=1, **train):
    """Returns the partitioner, the state and the losses after a few steps, and the lowered and the compiled step."""
    from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny

    partitioner = make_partitioner(sizes, make_task(StdlibBytesTiny, learner, **train))
    partitioner.num_minibatches = num_minibatches
    step = partitioner.partition(step_fns.train_step, batches.lm_input_specs(ROWS, LENGTH), is_eval=False)
    lowered = step.lower(jax.eval_shape(lambda: KEY))
    with jax.set_mesh(partitioner.mesh):
        compiled = lowered.compile(compiler_options=SAME_BITS)
    state, losses = partitioner.initialize_train_state(KEY), []
    for _ in range(steps):
        state, output = compiled(state, KEY, partitioner.layout.put(batch or make_batch()))
        losses.append(float(output.loss))
    return types.SimpleNamespace(
        partitioner=partitioner, state=state, losses=losses, lowered=lowered, compiled=compiled
    )


def assert_same_bits(found, expected):
    assert found.losses == expected.losses
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found.state), jax.tree.leaves(expected.state), strict=True
    ):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def on_host(**learner):
    return {"opt_state_memory_kind": "pinned_host", **learner}


@pytest.mark.parametrize(
    ("sizes", "learner", "minibatches"),
    [
        ((1, 4, 2), {"opt_state_dtype_rules": [("/m/", "8bit"), ("/v/", "bfloat16")]}, 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ((1, 4, 2), {}, 1),
                ((1, 1, 1), {}, 1),
                ((2, 2, 2), {}, 3),
                ((1, 8, 1), {"vectorize_on_repeat_prefix": False}, 1),
                ((1, 4, 2), {"skip_step_gradient_norm_value": 1e-9}, 1),
            ]
        ),
    ],
)
def test_states_on_the_host_give_the_bits_of_states_on_the_device(sizes, learner, minibatches):
    kept = trained(sizes, learner, num_minibatches=minibatches)
    moved = trained(sizes, on_host(**learner), num_minibatches=minibatches)
    assert_same_bits(moved, kept)
    places = {v.path: v.memory_kind for v in moved.partitioner.layout.records()}
    states = [path for path, kind in places.items() if kind]
    assert len(states) >= 8 and all(path.startswith("opt_states/") for path in states)
    for variable, x in zip(moved.partitioner.layout.records(), jax.tree.leaves(moved.state), strict=True):
        assert x.sharding.memory_kind == (variable.memory_kind or "device")
    host_states.check_program(moved.partitioner.layout, moved.lowered, moved.compiled)
    wanted = moved.partitioner.layout
    with raises_naming(UserError, "opt_state_memory_kind", states[0], "device"):
        host_states.check_program(wanted, kept.lowered, kept.compiled)

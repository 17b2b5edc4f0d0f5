"""Set-up, trace and lowering time of a model with many small variables: trainer against a hand-written step."""

from __future__ import annotations

import time
from typing import Any

ROWS, WIDTH = 8, 8


def measure(num_variables: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of `setup` (trainer only), and of tracing and lowering a step of both programs.

    Args:
      num_variables: number of the model's variables; Adam's moments add twice as many.
      rounds: measured rounds, after one that imports and warms up.
    """
    setup, trainer, baseline = [], [], []
    for index in range(rounds + 1):
        started = time.perf_counter()
        partitioner, specs = _set_up(num_variables)
        ready = time.perf_counter()
        _lower_trainer(partitioner, specs)
        lowered = time.perf_counter()
        _lower_baseline(num_variables, partitioner.mesh)
        ended = time.perf_counter()
        if index:
            setup.append(ready - started)
            trainer.append(lowered - ready)
            baseline.append(ended - lowered)
    return {"setup": {"trainer": setup}, "trace": {"trainer": trainer, "baseline": baseline}}


def _set_up(num_variables: int) -> tuple[Any, Any]:
    """Returns a partitioner after `setup`, and the shapes of a batch."""
    import jax
    from praxis import optimizers, pax_fiddle, py_utils, schedules

    from benchmarks import many_variables
    from spmd_trainer import sharding, tasks_lib
    from spmd_trainer.step import pjit

    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="many")
    task_p.model = pax_fiddle.Config(
        many_variables.ManyVariables, name="model", num_variables=num_variables, width=WIDTH
    )
    task_p.model.ici_mesh_shape, task_p.model.mesh_axis_names = [4, 2], ["data", "mdl"]
    task_p.train.variable_norm_summary = False
    task_p.train.inputs_split_mapping = py_utils.NestedMap(map_2d=("data", None))
    task_p.train.learner.loss_name = "loss"
    task_p.train.learner.optimizer = pax_fiddle.Config(
        optimizers.Adam, learning_rate=1e-3, lr_schedule=pax_fiddle.Config(schedules.Constant, value=1.0)
    )
    specs = py_utils.NestedMap(x=jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))
    partitioner = pjit.PjitPartitioner(sharding.create_device_mesh([("data", 4), ("mdl", 2)]))
    partitioner.setup(tasks_lib.build_task(task_p), specs)
    return partitioner, specs


def _lower_trainer(partitioner: Any, specs: Any) -> None:
    import jax

    from spmd_trainer.step import step_fns

    def step(*args: Any) -> tuple[Any, jax.Array]:
        state, output = step_fns.train_step(*args)
        return state, output.loss

    partitioner.partition(step, specs, is_eval=False).lower(jax.random.key(0))


def _lower_baseline(num_variables: int, mesh: Any) -> None:
    """Lowers the hand-written step: the same model and optimizer on a dict of arrays."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    split, whole = NamedSharding(mesh, PartitionSpec("mdl")), NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss_fn(params: dict, x: jax.Array) -> jax.Array:
        for value in params.values():
            x = x * value
        return jnp.mean(jnp.square(x))

    def step(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        count = state["step"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-6)

        return {"step": count, "params": jax.tree.map(update, state["params"], m, v), "m": m, "v": v}, loss

    def abstract(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {f"w_{i}": abstract((WIDTH,), split) for i in range(num_variables)}
    state = {"step": abstract((), whole), "params": params, "m": params, "v": params}
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(step, in_shardings=(shardings, rows), out_shardings=(shardings, whole), donate_argnums=0)
    jitted.lower(state, abstract((ROWS, WIDTH), rows))

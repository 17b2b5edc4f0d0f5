"""Compares the trainer's step of a Flax NNX model with a hand-written NNX and optax step with explicit shardings.

    python -m benchmarks.nnx_step [--processes 7] [--rounds 9] [--steps 4] [--json FILE]

The model is `experiments/lm/nnx.py`'s transformer on 8 host devices, mesh (data, mdl) = (4, 2), with sizes that the mesh divides.
Both programs have the same layout, optimizer (optax.adam) and batches, donate their state, and take turns of --steps steps.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from praxis import pax_fiddle
from praxis.py_utils import NestedMap

from benchmarks import turns
from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.experiments.lm import nnx as nnx_lm
from spmd_trainer.step import step_fns
from spmd_trainer.step.pjit import PjitPartitioner

SIZES = {"vocab_size": 256, "dims": 128, "hidden_dims": 512, "num_heads": 4, "num_layers": 4}
ROWS, LENGTH = 16, 128
RULES = nnx_lm.StdlibNnx.LOGICAL_AXIS_RULES
OPTIMIZER = optax.adam(1e-3)
KEY = jax.random.key(0)


def batch() -> NestedMap:
    """Returns random tokens in the form of a text input."""
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH), dtype=np.int32)
    ones = np.ones_like(ids)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape).copy()
    return NestedMap(ids=ids, labels=ids, weights=ones.astype(np.float32), segment_ids=ones, segment_pos=positions)


def trainer_step(mesh: jax.sharding.Mesh) -> turns.Program:
    """Returns the trainer's step."""
    model_p = pax_fiddle.Config(
        models.NnxModel,
        module=pax_fiddle.Config(nnx_lm.Transformer, **SIZES),
        inputs=nnx_lm.text_inputs,
        loss=nnx_lm.token_loss,
        logical_axis_rules=RULES,
        mesh_axis_names=list(mesh.axis_names),
        ici_mesh_shape=list(mesh.devices.shape),
        fprop_dtype=jnp.bfloat16,
    )
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="nnx_step", model=model_p)
    task_p.train.learner.loss_name = "loss"
    task_p.train.learner.optimizer = OPTIMIZER
    task_p.train.variable_norm_summary = False
    task_p.train.inputs_split_mapping = {"map_2d": ("data", None)}
    task = tasks_lib.build_task(task_p)
    rows = batch()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    partitioner = PjitPartitioner(mesh)
    partitioner.setup(task, shapes)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    inputs = partitioner.layout.put(rows)
    held = {"state": partitioner.initialize_train_state(KEY)}

    def take() -> None:
        held["state"], held["output"] = step(held["state"], KEY, inputs)

    return turns.Program(take, lambda: held["output"].loss)


def hand_written_step(mesh: jax.sharding.Mesh) -> turns.Program:
    """Returns a step as Flax' documentation writes it, jitted with explicit shardings."""
    with nnx.use_eager_sharding(False):
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: nnx_lm.Transformer(**SIZES, rngs=nnx.Rngs(0))))
        specs = nnx.get_partition_spec(abstract)
        init = lambda: nnx.state(nnx_lm.Transformer(**SIZES, rngs=nnx.Rngs(0)))  # noqa: E731

        def layout(spec: Any) -> NamedSharding:
            axes = dict(RULES)
            return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in spec)))

        leaves, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        shardings = jax.tree.unflatten(treedef, [layout(spec) for spec in leaves])
        state_def = jax.tree.structure(jax.eval_shape(init))
        params = jax.jit(lambda: jax.tree.leaves(init()), out_shardings=jax.tree.leaves(shardings))()
    rows = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", *[None] * (x.ndim - 1))))
        for name, x in batch().items()
    }

    def loss(params: list[jax.Array], rows: Any) -> jax.Array:
        cast = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in params]
        model = nnx.merge(graphdef, jax.tree.unflatten(state_def, cast))
        rows = NestedMap(rows)
        return nnx_lm.token_loss(model(*nnx_lm.text_inputs(rows)), rows)["loss"][0]

    def step(params: Any, opt_state: Any, rows: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    own = [x.sharding for x in params]
    opt_state = OPTIMIZER.init(params)
    whole = NamedSharding(mesh, PartitionSpec())
    of_state = jax.tree.map(lambda x: whole if not x.ndim else None, opt_state)
    of_state = (of_state[0]._replace(mu=own, nu=own), *of_state[1:])
    held = {"params": params, "opt_state": jax.device_put(opt_state, of_state)}
    jitted = jax.jit(
        step,
        in_shardings=(own, of_state, jax.tree.map(lambda x: x.sharding, rows)),
        out_shardings=(own, of_state, whole),
        donate_argnums=(0, 1),
    )

    def take() -> None:
        held["params"], held["opt_state"], held["loss"] = jitted(held["params"], held["opt_state"], rows)

    return turns.Program(take, lambda: held["loss"])


def make_programs() -> dict[str, turns.Program]:
    """Returns both programs on one mesh."""
    mesh = sharding.create_device_mesh([("data", 4), ("mdl", 2)])
    return {turns.TRAINER: trainer_step(mesh), turns.HAND_WRITTEN: hand_written_step(mesh)}


if __name__ == "__main__":
    sys.exit(turns.main("nnx_step", __doc__, make_programs, bar=1.03))

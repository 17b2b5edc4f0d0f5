"""Compares the trainer's step of a Llama with a hand-written JAX and optax step with explicit shardings.

    python -m benchmarks.llama_step [--processes 7] [--rounds 9] [--steps 4] [--json FILE]

The model has the structure of `experiments/lm/llama.py`: grouped key and value heads, rotary embeddings, rematerialised layers
in a scan. It runs on 8 host devices, mesh (replica, data, mdl) = (1, 4, 2), which divides its sizes. Both programs start from the
same values, have the same layout, optimizer (optax.adam) and batches, donate their state, and take turns of --steps steps. As in
`benchmarks/steady_step.py`, both also return the accuracy and the norm of the gradient, and skip a step whose norm is not finite.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from praxis import pax_fiddle
from praxis.py_utils import NestedMap

from benchmarks import turns
from spmd_trainer import sharding, task_defaults, tasks_lib
from spmd_trainer.decoder import lm
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.step import step_fns
from spmd_trainer.step.pjit import PjitPartitioner

SIZES = {
    "vocab_size": 512,
    "model_dims": 128,
    "hidden_dims": 384,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dims": 16,
}
EPSILON, ROTARY_BASE = 1e-5, 500_000.0
ROWS, LENGTH = 16, 128
OPTIMIZER = optax.adam(1e-3)
KEY = jax.random.key(0)
# How the hand-written program splits its parameters: as the trainer does.
SPECS = {
    "embedding": ("mdl", "data"),
    "logits": ("data", "mdl"),
    "final_norm": (None,),
    "layers": {
        "attention_norm": (None, None),
        "mlp_norm": (None, None),
        "query": (None, "data", "mdl", None),
        "key": (None, "data", "mdl", None),
        "value": (None, "data", "mdl", None),
        "output": (None, "mdl", None, "data"),
        "gate": (None, "data", "mdl"),
        "up": (None, "data", "mdl"),
        "down": (None, "mdl", "data"),
    },
}


def batch() -> NestedMap:
    """Returns random tokens in the form of a text input."""
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH), dtype=np.int32)
    ones = np.ones_like(ids)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape).copy()
    weights = ones.astype(np.float32)
    return NestedMap(
        ids=ids, labels=ids, weights=weights, paddings=1 - weights, segment_ids=ones, segment_pos=positions
    )


def trainer_step(mesh: jax.sharding.Mesh, lora: Any = None, moe: Any = None) -> tuple[turns.Program, Any]:
    """Returns the trainer's step, with adapters and experts if `lora` and `moe` are their configs, and the initial parameters."""
    spec_p = pax_fiddle.Config(DecoderSpec, norm_epsilon=EPSILON, rotary_base=ROTARY_BASE, moe=moe, **SIZES)
    model_p = pax_fiddle.Config(lm.DecoderLanguageModel, name="lm", lm_tpl=pax_fiddle.Config(lm.DecoderLm, spec=spec_p))
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="llama_step", model=model_p)
    task_defaults.set_sharding_annotations_v1(task_p, False, mesh.devices.shape)
    task_p.train.learner.loss_name = "total_loss"
    task_p.train.learner.optimizer = OPTIMIZER
    task_p.train.variable_norm_summary = False
    task_p.lora = lora
    task = tasks_lib.build_task(task_p)
    rows = batch()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    partitioner = PjitPartitioner(mesh)
    partitioner.setup(task, shapes)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    inputs = partitioner.layout.put(rows)
    held = {"state": partitioner.initialize_train_state(KEY)}
    initial = jax.tree.map(np.asarray, held["state"].mdl_vars["params"])

    def take() -> None:
        held["state"], held["output"] = step(held["state"], KEY, inputs)

    return turns.Program(take, lambda: held["output"].loss), initial


def hand_written_parameters(initial: Any) -> Any:
    """Returns the trainer's initial parameters in the hand-written program's structure."""
    initial = initial["lm"]
    layer = initial["layers"]["sub"]["layer_0"]
    attention, mlp = layer["attention"], layer.get("mlp") or layer["moe"]
    return {
        "embedding": initial["token_emb"]["w"],
        "logits": initial["logits"]["w"],
        "final_norm": initial["final_norm"]["scale"],
        "layers": {
            "attention_norm": layer["attention_norm"]["scale"],
            "mlp_norm": layer["mlp_norm"]["scale"],
            **{name: attention[name]["w"] for name in ("query", "key", "value", "output")},
            **{name: part["w"] for name, part in mlp.items()},
        },
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x over its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale


def rotate(x: jax.Array, sine: jax.Array, cosine: jax.Array) -> jax.Array:
    """Returns x [batch, time, heads, width] with its rotary embedding."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def hand_written_loss(
    mesh: jax.sharding.Mesh,
    params: Any,
    rows: Any,
    multiply: Callable[..., jax.Array] = jnp.einsum,
    experts: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the mean cross entropy of a Llama in plain JAX, and (the share of tokens that it predicts, results of `experts`).

    `multiply(equation, x, w)` is the product with a layer's weights. `experts(x, w)` takes the place of the feed-forward layer.
    It returns the layer's output, and a second result, which is stacked over the layers.
    """

    def split(x: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    frequencies = ROTARY_BASE ** -(jnp.arange(0, SIZES["head_dims"], 2, dtype=jnp.float32) / SIZES["head_dims"])
    angles = rows["segment_pos"][..., None, None] * frequencies
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    index, segments = jnp.arange(LENGTH), rows["segment_ids"]
    seen = (index[:, None] >= index[None]) & (segments[:, :, None] == segments[:, None])
    groups = SIZES["num_heads"] // SIZES["num_kv_heads"]

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array | None]:
        y = rms_norm(x, w["attention_norm"])
        q, k, v = (
            split(multiply("btd,dnh->btnh", y, w[name]), "data", None, "mdl", None)
            for name in ("query", "key", "value")
        )
        q, k = rotate(q, sine, cosine), rotate(k, sine, cosine)
        q = q.reshape(*k.shape[:3], groups, -1)
        logits = jnp.einsum("btkgh,bskh->bkgts", q, k) * SIZES["head_dims"] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30))
        heads = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(ROWS, LENGTH, SIZES["num_heads"], -1)
        heads = split(heads, "data", None, "mdl", None)
        x = x + split(multiply("btnh,nhd->btd", heads, w["output"]), "data", None, None)
        y = rms_norm(x, w["mlp_norm"])
        if experts is not None:
            y, load = experts(y, w)
            return x + split(y, "data", None, None), load
        gate, up = (multiply("btd,df->btf", y, w[name]) for name in ("gate", "up"))
        hidden = split(jax.nn.silu(gate) * up, "data", None, "mdl")
        return x + split(multiply("btf,fd->btd", hidden, w["down"]), "data", None, None), None

    x = split(split(params["embedding"], "mdl", None)[rows["ids"]], "data", None, None)
    layer = jax.checkpoint(layer, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
    x, loads = jax.lax.scan(layer, x, params["layers"])
    logits = split(rms_norm(x, params["final_norm"]) @ params["logits"], "data", None, "mdl")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["labels"])
    correct = jnp.argmax(logits, axis=-1) == rows["labels"]
    tokens = jnp.sum(rows["weights"])
    return jnp.sum(losses * rows["weights"]) / tokens, (jnp.sum(correct * rows["weights"]) / tokens, loads)


def hand_written_step(mesh: jax.sharding.Mesh, initial: Any, specs: Any = SPECS, experts: Any = None) -> turns.Program:
    """Returns a step in plain JAX, jitted with explicit shardings. `specs`: of the parameters; `experts`: see the loss."""
    params = hand_written_parameters(initial)
    layouts = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*axes)), specs, is_leaf=lambda x: isinstance(x, tuple)
    )
    whole = NamedSharding(mesh, PartitionSpec())
    opt_state = jax.eval_shape(OPTIMIZER.init, params)
    of_state = (opt_state[0]._replace(count=whole, mu=layouts, nu=layouts), *opt_state[1:])
    rows = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", *[None] * (x.ndim - 1))))
        for name, x in batch().items()
    }

    def step(params: Any, opt_state: Any, rows: Any) -> Any:
        loss = jax.value_and_grad(hand_written_loss, argnums=1, has_aux=True)
        (value, (accuracy, loads)), grads = loss(mesh, params, rows, experts=experts)
        norm = optax.global_norm(grads)
        updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), new, (params, opt_state))
        return *kept, value, {"accuracy": accuracy, "gradient_norm": norm, "loads": loads}

    params = jax.device_put(params, layouts)
    held = {"params": params, "opt_state": jax.jit(OPTIMIZER.init, out_shardings=of_state)(params)}
    jitted = jax.jit(step, out_shardings=(layouts, of_state, whole, whole), donate_argnums=(0, 1))

    def take() -> None:
        held["params"], held["opt_state"], held["loss"], _ = jitted(held["params"], held["opt_state"], rows)

    return turns.Program(take, lambda: held["loss"])


def make_programs() -> dict[str, turns.Program]:
    """Returns both programs on one mesh, with the same initial values."""
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    trainer, initial = trainer_step(mesh)
    return {turns.TRAINER: trainer, turns.HAND_WRITTEN: hand_written_step(mesh, initial)}


if __name__ == "__main__":
    sys.exit(turns.main("llama_step", __doc__, make_programs, bar=1.03))

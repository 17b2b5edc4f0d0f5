"""Compares the trainer's step of a Llama with LoRA adapters with a hand-written JAX and optax step.

    python -m benchmarks.lora_step [--processes 7] [--rounds 9] [--steps 4] [--json FILE]

The model, mesh and batch are those of `benchmarks/llama_step.py`, and so is what both programs return. Adapters of rank 8 sit on
all linear layers but the last. Only they learn, and only they have an optimizer state.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from praxis import pax_fiddle

from benchmarks import llama_step, turns  # sets the number of host devices, before JAX asks for them
from spmd_trainer import sharding
from spmd_trainer.decoder.lora import Lora

RANK, ALPHA = 8, 16.0
PARTS = {
    **dict.fromkeys(("query", "key", "value", "output"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}


def multiply(equation: str, x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Returns the product with a weight, plus the scaled products with its two factors."""
    w, a, b = weights
    left, rest = equation.split(",")
    right, out = rest.split("->")
    summed = "".join(letter for letter in right if letter not in out)
    inner = "".join(letter for letter in left if letter not in summed) + "r"
    small = jnp.einsum(f"{left},{summed}r->{inner}", x, a)
    outer = "".join(letter for letter in right if letter not in summed)
    return jnp.einsum(equation, x, w) + ALPHA / RANK * jnp.einsum(f"{inner},r{outer}->{out}", small, b)


def adapters_of(initial: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the trainer's initial factors of each weight."""
    layer = initial["lora"]["lm"]["layers"]["sub"]["layer_0"]
    return {name: (layer[part][name]["w"]["a"], layer[part][name]["w"]["b"]) for name, part in PARTS.items()}


def layouts_of(name: str) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the layouts of a weight's two factors: each follows its part of the weight."""
    spec = llama_step.SPECS["layers"][name]
    split = 3 if name == "output" else 2
    return PartitionSpec(*spec[:split], None), PartitionSpec(None, None, *spec[split:])


def hand_written_step(mesh: jax.sharding.Mesh, initial: Any) -> turns.Program:
    """Returns a step in plain JAX, jitted with explicit shardings."""
    whole = NamedSharding(mesh, PartitionSpec())
    base_layouts = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*axes)), llama_step.SPECS, is_leaf=lambda x: isinstance(x, tuple)
    )
    layouts = {name: tuple(NamedSharding(mesh, spec) for spec in layouts_of(name)) for name in PARTS}
    base = jax.device_put(llama_step.hand_written_parameters(initial), base_layouts)
    adapters = jax.device_put(adapters_of(initial), layouts)
    opt_state = jax.eval_shape(llama_step.OPTIMIZER.init, adapters)
    of_state = (opt_state[0]._replace(count=whole, mu=layouts, nu=layouts), *opt_state[1:])
    rows = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", *[None] * (x.ndim - 1))))
        for name, x in llama_step.batch().items()
    }

    def loss(adapters: Any, base: Any, rows: Any) -> tuple[jax.Array, Any]:
        layers = {name: (w, *adapters[name]) if name in adapters else w for name, w in base["layers"].items()}
        return llama_step.hand_written_loss(mesh, {**base, "layers": layers}, rows, multiply)

    def step(adapters: Any, opt_state: Any, base: Any, rows: Any) -> Any:
        (value, (accuracy, _)), grads = jax.value_and_grad(loss, has_aux=True)(adapters, base, rows)
        norm = optax.global_norm(grads)
        updates, new_opt_state = llama_step.OPTIMIZER.update(grads, opt_state, adapters)
        new = optax.apply_updates(adapters, updates), new_opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), new, (adapters, opt_state))
        return *kept, value, {"accuracy": accuracy, "gradient_norm": norm}

    held = {"adapters": adapters, "opt_state": jax.jit(llama_step.OPTIMIZER.init, out_shardings=of_state)(adapters)}
    jitted = jax.jit(step, out_shardings=(layouts, of_state, whole, whole), donate_argnums=(0, 1))

    def take() -> None:
        held["adapters"], held["opt_state"], held["loss"], _ = jitted(held["adapters"], held["opt_state"], base, rows)

    return turns.Program(take, lambda: held["loss"])


def make_programs() -> dict[str, turns.Program]:
    """Returns both programs on one mesh, with the same initial values."""
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    lora = pax_fiddle.Config(Lora, targets="all-linear", rank=RANK, alpha=ALPHA)
    trainer, initial = llama_step.trainer_step(mesh, lora)
    return {turns.TRAINER: trainer, turns.HAND_WRITTEN: hand_written_step(mesh, initial)}


if __name__ == "__main__":
    sys.exit(turns.main("lora_step", __doc__, make_programs, bar=1.03))

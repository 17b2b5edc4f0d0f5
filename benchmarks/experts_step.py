"""Compares the trainer's step of a mixture of experts with a hand-written JAX and optax step of the same algorithm.

    python -m benchmarks.experts_step [--processes 7] [--rounds 9] [--steps 4] [--json FILE]

The model is `benchmarks/llama_step.py`'s with 4 of 16 experts per token for its feed-forward layers, and so are mesh, batch and
what both programs return, besides the load of each expert. Both split the experts over `mdl`: in a `jax.shard_map`, each device
sorts its own tokens by expert, multiplies them in blocks of rows with the matrices of its experts, skips the blocks that no
token needs, puts the results back, and adds them up over `mdl`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from praxis import pax_fiddle

from benchmarks import llama_step, turns  # sets the number of host devices, before JAX asks for them
from spmd_trainer import sharding
from spmd_trainer.models.decoder_spec import MoeSpec

EXPERTS, TOP, HIDDEN = 16, 4, 128
# Rows of a block.
BLOCK = 16
SPECS = {
    **llama_step.SPECS,
    "layers": {
        **llama_step.SPECS["layers"],
        "router": (None, "data", None),
        "gate": (None, "mdl", "data", None),
        "up": (None, "mdl", "data", None),
        "down": (None, "mdl", None, "data"),
    },
}


def in_blocks(step: Any, carry: jax.Array, sizes: jax.Array, room: int) -> jax.Array:
    """Returns the carry after `step(carry, group, first row, rows)` of each block of rows; `room`: the most rows."""
    counts = -(-sizes // BLOCK)
    last, ends = jnp.cumsum(counts), jnp.cumsum(sizes)
    number = jnp.arange(room // BLOCK + len(sizes), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
    first = (ends - sizes)[group] + (number - (last - counts)[group]) * BLOCK
    filled = jnp.where(number < last[-1], jnp.minimum(ends[group] - first, BLOCK), 0)

    def body(carry: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return lax.cond(block[2] > 0, step, lambda carry, *_: carry, carry, *block), None

    return lax.scan(body, carry, (group, first, filled))[0]


def rows_of(x: jax.Array, first: jax.Array, filled: jax.Array) -> jax.Array:
    """Returns a block's rows, with zeros for those of other groups."""
    own = jnp.arange(BLOCK)[:, None] < filled
    return jnp.where(own, lax.dynamic_slice_in_dim(x, first, BLOCK), 0)


def multiplied(x: jax.Array, w: jax.Array, sizes: jax.Array, contracted: int) -> jax.Array:
    """Multiplies each group's rows with its matrix."""
    padded = jnp.pad(x, ((0, BLOCK), (0, 0)))

    def step(out: jax.Array, group: jax.Array, first: jax.Array, filled: jax.Array) -> jax.Array:
        y = lax.dot_general(rows_of(padded, first, filled), w[group], (((1,), (contracted,)), ((), ())))
        return lax.dynamic_update_slice_in_dim(out, y, first, 0)

    out = jnp.zeros((len(x) + BLOCK, w.shape[2 - contracted]))
    return in_blocks(step, out, sizes, len(x))[: len(x)]


@jax.custom_vjp
def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns [rows, N] for [rows, K], sorted by group, and [groups, K, N]."""
    return multiplied(x, w, sizes, 0)


def grouped_backward(saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Returns the gradients of rows and matrices."""
    x, w, sizes = saved
    padded, padded_grads = (jnp.pad(y, ((0, BLOCK), (0, 0))) for y in (x, grads))

    def step(total: jax.Array, group: jax.Array, first: jax.Array, filled: jax.Array) -> jax.Array:
        outer = rows_of(padded, first, filled).T @ rows_of(padded_grads, first, filled)
        return total.at[group].add(outer)

    return multiplied(grads, w, sizes, 1), in_blocks(step, jnp.zeros_like(w), sizes, len(x)), None


grouped.defvjp(lambda *given: (grouped(*given), given), grouped_backward)


@jax.custom_vjp
def reordered(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns x[order], zeros for places that x does not have. Its gradient is the inverse order's, without a scatter."""
    return x.at[order].get(mode="fill", fill_value=0)


reordered.defvjp(
    lambda x, order, inverse: (reordered(x, order, inverse), (order, inverse)),
    lambda saved, grads: (grads.at[saved[1]].get(mode="fill", fill_value=0), None, None),
)


def local_experts(x: jax.Array, router: jax.Array, *weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the layer's output for a device's tokens [rows, time, width], and the number of tokens of each expert."""
    tokens = x.reshape(-1, x.shape[-1])
    router = lax.all_gather(router, "data", axis=0, tiled=True)
    scores = jax.nn.softmax(jnp.matmul(tokens, router, precision=lax.Precision.HIGHEST))
    best, chosen = lax.top_k(scores, TOP)
    best /= jnp.sum(best, axis=-1, keepdims=True)
    own = len(weights[0])
    expert = chosen.reshape(-1) - own * lax.axis_index("mdl")
    expert = jnp.where((expert >= 0) & (expert < own), expert, own)
    order = jnp.argsort(expert)
    sizes = jnp.sum(expert[:, None] == jnp.arange(own), axis=0)
    used = jnp.sum(sizes)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    # Pairs of other devices' experts come last. Their places are outside of the array, where there is nothing to read.
    nowhere = len(order)
    order, place = (
        jnp.where(at < used, index, nowhere) for at, index in ((jnp.arange(nowhere), order), (place, place))
    )
    gate, up, down = (
        lax.all_gather(w, "data", axis=dim, tiled=True) for w, dim in zip(weights, (1, 1, 2), strict=True)
    )
    rows = reordered(jnp.repeat(tokens, TOP, axis=0), order, place)
    hidden = jax.nn.silu(grouped(rows, gate, sizes)) * grouped(rows, up, sizes)
    results = reordered(grouped(hidden, down, sizes), place, order).reshape(-1, TOP, x.shape[-1])
    total = lax.psum(jnp.sum(results * best[..., None], axis=1), "mdl")
    load = lax.psum(jnp.sum(chosen.reshape(-1, 1) == jnp.arange(EXPERTS), axis=0), "data")
    return total.reshape(x.shape), load


def make_programs() -> dict[str, turns.Program]:
    """Returns both programs on one mesh, with the same initial values."""
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    moe = pax_fiddle.Config(MoeSpec, num_experts=EXPERTS, num_experts_per_token=TOP, hidden_dims=HIDDEN)
    trainer, initial = llama_step.trainer_step(mesh, moe=moe)
    names = ("router", "gate", "up", "down")
    layer = jax.shard_map(
        local_experts,
        mesh=mesh,
        in_specs=(P("data"), *(P(*SPECS["layers"][name][1:]) for name in names)),
        out_specs=(P("data"), P()),
        check_vma=False,
    )

    def experts(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        output, load = layer(x, *(w[name] for name in names))
        return output, load

    return {turns.TRAINER: trainer, turns.HAND_WRITTEN: llama_step.hand_written_step(mesh, initial, SPECS, experts)}


if __name__ == "__main__":
    sys.exit(turns.main("experts_step", __doc__, make_programs, bar=1.05))

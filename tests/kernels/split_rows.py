"""Runs `attend` on rows that are split over a sequence axis, and compares it with the reference on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer import sharding
from spmd_trainer.kernels import reference, sequence_order
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.kernels import Rows
from spmd_trainer.planner import hlo_collectives

SPLIT = Split(batch=("data",), length=("seq",), heads=("mdl",))
BATCH, WIDTH = 2, 8


def mesh_of(seq, mdl=1):
    """Returns a mesh (data, seq, mdl) on up to 8 devices."""
    sizes = {"data": min(2, 8 // seq // mdl), "seq": seq, "mdl": mdl}
    return sharding.create_device_mesh(list(sizes.items()), devices=jax.devices()[: math.prod(sizes.values())])


def random_rows(length, heads, kv_heads, dtype=jnp.float32, packed=False, seed=0):
    """Returns queries, keys, values and output gradients [B, T, heads, H], and segment ids [B, T] or None."""
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(rng.normal(size=(BATCH, length, n, WIDTH)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    ]
    segment_ids = jnp.asarray(np.sort(rng.integers(1, 4, (BATCH, length)), axis=1), jnp.int32) if packed else None
    return arrays, segment_ids


def split_attention(query, key, value, pattern, segment_ids, form):
    """Computes attention as a model does: brings rows into the order of the form, attends, brings the output back."""
    order = sequence_order.of_rows(query.shape[1], SPLIT.length, form)
    rows = [order.apply(x) for x in (query, key, value)]
    if segment_ids is not None:
        segment_ids = order.apply(segment_ids, fill=-1)
    return order.undo(attend(*rows, pattern, segment_ids=segment_ids, split=SPLIT, context_parallel=form, name="layer"))


def value_and_gradients(fn, arrays):
    """Returns the output for queries, keys and values, and their gradients for the given gradient of the output."""

    def run(query, key, value, out_grad):
        out, pull = jax.vjp(fn, query, key, value)
        return out, *pull(out_grad.astype(out.dtype))

    return jax.jit(run)(*arrays)


def differences(form, length, seq, pattern, *, heads=4, kv_heads=2, mdl=1, packed=False, dtype=jnp.float32):
    """Returns the largest difference from the reference in float32, of the output and the three gradients.

    Differences of numbers over 1 are relative: the last bit of 4 in bfloat16 is 1.6e-2.
    """
    arrays, segment_ids = random_rows(length, heads, kv_heads, dtype, packed)
    with jax.set_mesh(mesh_of(seq, mdl)):
        split = functools.partial(split_attention, pattern=pattern, segment_ids=segment_ids, form=form)
        found = value_and_gradients(split, arrays)
    whole = value_and_gradients(
        lambda query, key, value: reference.attend(Rows(query, key, value, segment_ids), pattern),
        [x.astype(jnp.float32) for x in arrays],
    )
    assert [x.dtype for x in found] == [dtype] * 4
    return [float(jnp.max(jnp.abs(x - y) / jnp.maximum(jnp.abs(y), 1))) for x, y in zip(found, whole, strict=True)]


def compiled_programs(form, pattern, mesh, *, heads, kv_heads, length, packed=False):
    """Returns the texts of the compiled forward and backward pass, for rows that lie on the mesh in the order of the form."""
    arrays, segment_ids = random_rows(length, heads, kv_heads, packed=packed)
    arrays, segment_ids = jax.device_put(
        (arrays, segment_ids), NamedSharding(mesh, PartitionSpec(SPLIT.batch, SPLIT.length))
    )

    def forward(query, key, value, segment_ids):
        return attend(
            query, key, value, pattern, segment_ids=segment_ids, split=SPLIT, context_parallel=form, name="layer"
        )

    with jax.set_mesh(mesh):
        compiled = jax.jit(forward).lower(*arrays[:3], segment_ids).compile()
        # What the forward pass keeps goes in as an argument; otherwise XLA would reuse the collectives of the forward pass.
        pull = jax.jit(lambda *x: jax.vjp(lambda *y: forward(*y, segment_ids), *x)[1])(*arrays[:3])
        pulled = jax.jit(lambda pull, out_grad: pull(out_grad)).lower(pull, arrays[3]).compile()
    return compiled.as_text(), pulled.as_text()


def crossing_bytes(program, mesh):
    """Returns {kind: bytes on one device} of a program's collectives between devices."""
    moved = {}
    for found in hlo_collectives.find_collectives(program):
        if found.axes(mesh.shape):
            moved[found.kind] = moved.get(found.kind, 0) + found.times * found.num_bytes
    return moved

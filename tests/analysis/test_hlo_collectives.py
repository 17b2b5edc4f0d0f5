"""Collectives counted in real compiled programs whose numbers are known beforehand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_trainer import sharding
from spmd_trainer.analysis import hlo_collectives

KB = 1024


@pytest.fixture(scope="module")
def mesh():
    return sharding.create_device_mesh([("data", 8)])


def compiled_text(mesh, f, in_specs, out_specs, *shapes):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile().as_text()


def test_kinds_and_bytes_of_whole_arrays(mesh):
    def exchange(x):  # [32, 32] on each device: 4 KiB
        return lax.psum(x, "data"), lax.all_gather(x, "data", tiled=True), lax.psum_scatter(x, "data", tiled=True)

    text = compiled_text(mesh, exchange, P("data"), (P(), P(), P("data")), (256, 32))
    found = hlo_collectives.count_collectives(text)
    assert {kind: (t.count, t.num_bytes) for kind, t in found.items()} == {
        "all-reduce": (1, 4 * KB),
        "all-gather": (1, 32 * KB),
        "reduce-scatter": (1, 4 * KB),
    }


def test_a_loop_counts_as_often_as_it_runs(mesh):
    def repeat(x):
        return lax.scan(lambda carry, _: (lax.psum(carry, "data") * 0.1, None), x, length=5)[0]

    found = hlo_collectives.count_collectives(compiled_text(mesh, repeat, P("data"), P("data"), (256, 32)))
    assert (found["all-reduce"].count, found["all-reduce"].num_bytes, found["all-reduce"].largest) == (
        5,
        20 * KB,
        4 * KB,
    )


def test_the_mesh_axes_that_a_collective_crosses():
    sizes = {"replica": 2, "data": 2, "mdl": 2}
    mesh = sharding.create_device_mesh(list(sizes.items()))

    def exchange(x):
        return lax.psum(x, "data"), lax.all_gather(x, ("replica", "mdl"), tiled=True), lax.ppermute(x, "mdl", [(0, 1)])

    text = compiled_text(mesh, exchange, P(tuple(sizes)), (P(), P(), P(tuple(sizes))), (64, 8))
    crossed = {c.kind: c.axes(sizes) for c in hlo_collectives.find_collectives(text)}
    assert crossed == {"all-reduce": ("data",), "all-gather": ("replica", "mdl"), "collective-permute": ("mdl",)}


def test_no_collectives_are_said_to_be_none(mesh):
    text = compiled_text(mesh, lambda x: x + 1, P("data"), P("data"), (8, 4))
    assert hlo_collectives.count_collectives(text) == {}
    assert hlo_collectives.collectives_text(text) == "no collectives"

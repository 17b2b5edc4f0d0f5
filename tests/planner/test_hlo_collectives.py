"""Collectives counted in real compiled programs whose numbers are known beforehand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_trainer import sharding
from spmd_trainer.planner import hlo_collectives

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
    assert {found.kind: (found.times, found.num_bytes) for found in hlo_collectives.find_collectives(text)} == {
        "all-reduce": (1, 4 * KB),
        "all-gather": (1, 32 * KB),
        "reduce-scatter": (1, 4 * KB),
    }


def test_a_loop_counts_as_often_as_it_runs(mesh):
    def repeat(x):
        return lax.scan(lambda carry, _: (lax.psum(carry, "data") * 0.1, None), x, length=5)[0]

    (found,) = hlo_collectives.find_collectives(compiled_text(mesh, repeat, P("data"), P("data"), (256, 32)))
    assert (found.kind, found.times, found.num_bytes) == ("all-reduce", 5, 4 * KB)


def test_the_mesh_axes_that_a_collective_crosses():
    sizes = {"replica": 2, "data": 2, "mdl": 2}
    mesh = sharding.create_device_mesh(list(sizes.items()))

    def exchange(x):
        return lax.psum(x, "data"), lax.all_gather(x, ("replica", "mdl"), tiled=True), lax.ppermute(x, "mdl", [(0, 1)])

    text = compiled_text(mesh, exchange, P(tuple(sizes)), (P(), P(), P(tuple(sizes))), (64, 8))
    crossed = {c.kind: c.axes(sizes) for c in hlo_collectives.find_collectives(text)}
    assert crossed == {"all-reduce": ("data",), "all-gather": ("replica", "mdl"), "collective-permute": ("mdl",)}


def test_a_program_without_collectives_has_none(mesh):
    text = compiled_text(mesh, lambda x: x + 1, P("data"), P("data"), (8, 4))
    assert list(hlo_collectives.find_collectives(text)) == []


def program(*instructions):
    lines = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{lines}\n}}\n"


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ],
)
def test_groups_in_each_of_xlas_notations(groups, members):
    text = program(f"ROOT %g = f32[4]{{0}} all-gather(%p), replica_groups={groups}, dimensions={{0}}")
    (found,) = hlo_collectives.find_collectives(text)
    assert sorted(map(sorted, found.groups.tolist())) == members


def test_the_operands_of_an_asynchronous_start_do_not_count():
    groups = "replica_groups=[1,4]<=[4]"
    text = program(
        f"%g = (f32[1]{{0}}, f32[4]{{0}}) all-gather-start(%p), {groups}, dimensions={{0}}",
        f"%h = ((f32[1], s8[2]), (f32[4], s8[8])) all-gather-start(%p, %q), {groups}, dimensions={{0}}",
        f"%r = ((f32[8]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {groups}, to_apply=%add",
        f"%s = (f32[8]{{0}}, f32[2]{{0}}) all-reduce-start(%p, %q), {groups}, to_apply=%add",
        "ROOT %c = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
    )
    found = [collective.num_bytes for collective in hlo_collectives.find_collectives(text)]
    # A reduce-scatter's bytes are those of its operand, the results of the four devices.
    assert found == [16, 16 + 8, 4 * 8, 32 + 8, 32]


def test_a_sum_of_which_a_device_keeps_its_part_is_a_reduce_scatter():
    text = """HloModule m, is_scheduled=true

%all-reduce-scatter.1.clone (a: f32[8,64]) -> f32[8,16] {
  %a = f32[8,64]{1,0} parameter(0)
  %sum = f32[8,64]{1,0} all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[8,16]{1,0} dynamic-slice(%sum, %zero, %offset), dynamic_slice_sizes={8,16}
}

ENTRY %main (p: f32[8,64]) -> f32[8,16] {
  %p = f32[8,64]{1,0} parameter(0)
  %q = f32[8,64]{1,0} all-reduce(%p), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %f = f32[8,16]{1,0} fusion(%q), kind=kCustom, calls=%all-reduce-scatter.1.clone
}
"""
    found = {c.kind: c.num_bytes for c in hlo_collectives.find_collectives(text)}
    # As for other reduce-scatters, the bytes are those of the operand.
    assert found == {"all-reduce": 4 * 8 * 64, "reduce-scatter": 4 * 8 * 64}

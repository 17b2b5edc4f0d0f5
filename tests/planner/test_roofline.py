"""The range of a step's time, from a program whose parts are computed by hand."""

import itertools
import re
import types

import pytest
from facts import assert_names

from spmd_trainer.planner import hlo_costs, hlo_kernels, links, roofline

V5E_FLOPS, V5E_MEMORY, V5E_LINK = 197e12, 819e9, 50e9
V5E = links.TPU_V5E
# A product, a sum, an asynchronous copy, an all-gather over 'data' and an all-reduce over 'mdl', all in a loop of 3.
PROGRAM = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %p = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[1024,1024]{1,0} get-tuple-element(%p), index=1
  %one = s32[]{:S(6)} constant(1)
  %next = s32[]{:S(6)} add(%i, %one)
  %w = bf16[1024,1024]{1,0} all-gather(%x), replica_groups=[16,16]<=[256], dimensions={0}
  %dot = bf16[1024,1024]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy-start = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%dot)
  %copy-done = bf16[1024,1024]{1,0:S(1)} copy-done(%copy-start)
  %sum = bf16[1024,1024]{1,0} add(%dot, %dot)
  %all = bf16[1024,1024]{1,0} all-reduce(%sum), replica_groups=[16,16]<=[16,16]T(1,0), to_apply=%add
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %all)
}

%condition (q: (s32[], bf16[1024,1024])) -> pred[] {
  %q = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %n = s32[]{:S(6)} constant(3)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[]{:S(6)} compare(%j, %n), direction=LT
}

ENTRY %main (a: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %a = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[1024,1024]{1,0}) while(%a), condition=%condition, body=%body
}
"""
SIDE = 1024
ARRAY = 2 * SIDE**2


def devices(kind):
    return [
        types.SimpleNamespace(device_kind=kind, coords=coords, slice_index=0, process_index=0)
        for coords in itertools.product(range(16), range(16))
    ]


@pytest.fixture(scope="module")
def estimate():
    return roofline.estimate(PROGRAM, devices("TPU v5 lite"), {"mdl": 16, "data": 16})


def test_products_and_bytes(estimate):
    assert estimate.matrix_flops == 3 * 2 * SIDE**3
    assert estimate.matrix_seconds == pytest.approx(3 * 2 * SIDE**3 / V5E_FLOPS)
    # Three arrays of the product, one of the copy, three of the sum, and the counter.
    assert estimate.memory_bytes == pytest.approx(3 * 7 * ARRAY, rel=1e-4)
    assert estimate.memory_seconds == pytest.approx(estimate.memory_bytes / V5E_MEMORY)


def test_each_collective_takes_the_links_of_its_axes(estimate):
    gather = 3 * ARRAY * 15 / 16 / (2 * V5E_LINK)
    rows = {(row.kind, row.axes): (row.seconds, row.links) for row in estimate.collectives}
    assert rows == {
        ("all-reduce", ("mdl",)): (pytest.approx(2 * gather), "ICI"),
        ("all-gather", ("data",)): (pytest.approx(gather), "ICI"),
    }
    assert [row.kind for row in estimate.collectives] == ["all-reduce", "all-gather"]  # longest first
    assert (estimate.inside_seconds, estimate.outside_seconds) == (pytest.approx(3 * gather), 0)


def test_the_range_is_from_all_hidden_to_nothing_hidden(estimate):
    product = max(2 * SIDE**3 / V5E_FLOPS, 3 * ARRAY / V5E_MEMORY)
    assert estimate.computing_seconds == pytest.approx(3 * (product + 3 * ARRAY / V5E_MEMORY), rel=1e-4)
    # Here the links take longest.
    assert estimate.shortest == estimate.inside_seconds
    assert estimate.longest == pytest.approx(
        estimate.matrix_flops / V5E.products
        + estimate.vector_seconds
        + estimate.memory_seconds / V5E.memory
        + estimate.inside_seconds / V5E.links
        + estimate.latency_seconds
    )
    assert estimate.shortest < estimate.middle < estimate.longest
    assert estimate.record()["middle"] == estimate.middle


def test_sums_take_the_vector_units(estimate):
    # The sum, and the counter of the loop.
    assert estimate.vector_seconds == pytest.approx(3 * (SIDE**2 + 1) / links.machine("TPU v5 lite").vector_ops)


def test_each_collective_has_the_latency_of_its_hops(estimate):
    # Half of a ring of 16 for the all-gather, twice that for the all-reduce.
    assert estimate.latency_seconds == pytest.approx(3 * (8 + 2 * 8) * 1e-6)


def test_permutations_in_both_directions_overlap():
    shifts = [
        ",".join(f"{{{16 * r + n},{16 * r + (n + by) % 16}}}" for r in range(16) for n in range(16)) for by in (1, 15)
    ]
    text = PROGRAM.replace(
        "  %all = bf16[1024,1024]{1,0} all-reduce(%sum), replica_groups=[16,16]<=[16,16]T(1,0), to_apply=%add",
        f"  %back = bf16[1024,1024]{{1,0}} collective-permute(%sum), source_target_pairs={{{shifts[0]}}}\n"
        f"  %all = bf16[1024,1024]{{1,0}} collective-permute(%back), source_target_pairs={{{shifts[1]}}}",
    )
    found = roofline.estimate(text, devices("TPU v5 lite"), {"mdl": 16, "data": 16})
    one = 3 * ARRAY / V5E_LINK
    gather = 3 * ARRAY * 15 / 16 / (2 * V5E_LINK)
    assert found.permute_seconds == pytest.approx(2 * one)
    assert found.inside_seconds == pytest.approx(gather + 2 * one)
    assert found.shortest == pytest.approx(gather + one)


def cost(flops, *, float32=0.0, attention=None):
    return hlo_costs.InstructionCost(None, 1, flops, 0, False, float32, 0.0, attention)


@pytest.mark.parametrize(
    ("kind", "work", "at_peak", "achieved_rate"),
    [
        ("TPU v6 lite", cost(1e12), 1e12 / 918e12, 827.5e12),
        ("NVIDIA H100 80GB HBM3", cost(1e12), 1e12 / 989e12, 794.5e12),
        # TF32 has half the rate of bfloat16; TPUs take float32 operands as bfloat16.
        ("NVIDIA H100 80GB HBM3", cost(1e12, float32=1e12), 2e12 / 989e12, 794.5e12 / 2),
        ("TPU v6 lite", cost(1e12, float32=1e12), 1e12 / 918e12, 827.5e12),
        # Heads of width 128 fill half of a matrix unit of 256 x 256.
        ("TPU v6 lite", cost(1e12, attention=hlo_kernels.Attention(1e12, False, 128)), 2e12 / 918e12, 827.5e12 / 2),
        ("TPU v6 lite", cost(1e12, attention=hlo_kernels.Attention(1e12, False, 256)), 1e12 / 918e12, 827.5e12),
        ("TPU v5", cost(1e12, attention=hlo_kernels.Attention(1e12, False, 128)), 1e12 / 459e12, 0.92296 * 459e12),
        (
            "TPU v5",
            cost(1e12, attention=hlo_kernels.Attention(1e12, False, 192)),
            4e12 / 3 / 459e12,
            0.92296 * 459e12 * 0.75,
        ),
        # cuDNN's attention has its own measured rates.
        ("NVIDIA H200", cost(1e12, attention=hlo_kernels.Attention(1e12, False, 128)), 1e12 / 989e12, 609e12),
        ("NVIDIA H200", cost(1e12, attention=hlo_kernels.Attention(1e12, True, 128)), 1e12 / 989e12, 499e12),
        ("NVIDIA B200", cost(1e12, attention=hlo_kernels.Attention(1e12, True, 128)), 1e12 / 2250e12, 1745e12),
    ],
)
def test_products_at_the_peak_and_at_measured_rates(kind, work, at_peak, achieved_rate):
    found = roofline._matrix_seconds(work, links.machine(kind))
    assert found == (pytest.approx(at_peak), pytest.approx(1e12 / achieved_rate, rel=1e-4))


def test_the_text_names_the_range_and_the_longest_collectives(estimate):
    text = roofline.estimate_text(estimate)
    assert text.startswith(
        f"estimated step {estimate.shortest:.4g} s (all overlaps) to {estimate.longest:.4g} s (nothing does)"
    )
    assert_names(text, "all-reduce", "mdl (ICI)")


def test_the_parts_of_the_text_add_up_to_the_slow_end(estimate):
    parts = roofline.estimate_text(estimate).splitlines()[1]
    # The last number of each part; those at the fast end come before.
    slow = [float(seconds) for seconds in re.findall(r"([\d.e+-]+) s\b", parts)]
    assert sum(slow) == pytest.approx(estimate.longest, rel=1e-3)
    assert [name for name in ("products", "element-wise", "memory", "links") if name in parts] == [
        "products",
        "element-wise",
        "memory",
        "links",
    ]


def test_unknown_chips_have_no_estimate():
    assert roofline.estimate(PROGRAM, devices("cpu"), {"mdl": 16, "data": 16}) is None

"""Memory over a program's schedule: in programs written by hand, and against what is live at the peak."""

import jax
import jax.numpy as jnp
import pytest

from spmd_trainer.planner import hlo_liveness

MIB = 2**20
# Positions: p, before, zeros, t, loop, then the body's p, i, stack, inner, written, t, and out.
LOOP = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[8,262144])) -> (s32[], f32[8,262144]) {
  %p = (s32[], f32[8,262144]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[8,262144]{1,0} get-tuple-element(%p), index=1
  %inner = f32[1048576]{0} dot(%i, %i), metadata={op_name="inner"}
  %written = f32[8,262144]{1,0} fusion(%stack, %inner), kind=kLoop, calls=%f, metadata={op_name="write"}
  ROOT %t = (s32[], f32[8,262144]{1,0}) tuple(%i, %written)
}

%condition (p: (s32[], f32[8,262144])) -> pred[] {
  %p = (s32[], f32[8,262144]{1,0}) parameter(0)
  ROOT %r = pred[] constant(false)
}

ENTRY %main (p: s32[]) -> f32[8,262144] {
  %p = s32[] parameter(0)
  %before = f32[2097152]{0} custom-call(%p), metadata={op_name="before"}
  %zeros = f32[8,262144]{1,0} fusion(%before), kind=kOutput, calls=%f, metadata={op_name="broadcast.7"}
  %t = (s32[], f32[8,262144]{1,0}) tuple(%p, %zeros)
  %loop = (s32[], f32[8,262144]{1,0}) while(%t), condition=%condition, body=%body, METADATA
  ROOT %out = f32[8,262144]{1,0} get-tuple-element(%loop), index=1
}
""".replace("METADATA", 'metadata={op_name="jit(step)/jvp(lm)/while"}, backend_config={"known_trip_count":{"n":"8"}}')
BRANCHES = """HloModule m, is_scheduled=true

%small (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %s = f32[262144]{0} custom-call(%p), metadata={op_name="small"}
  ROOT %r = f32[8]{0} dot(%s, %p)
}

%large (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %l = f32[1048576]{0} custom-call(%p), metadata={op_name="large"}
  ROOT %r = f32[8]{0} dot(%l, %p)
}

ENTRY %main (i: s32[], p: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %p = f32[8]{0} parameter(1)
  ROOT %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%small, %large}
}
"""


def megabytes(found):
    return [int(total) // MIB for total in found.totals()]


def test_a_loop_is_in_the_schedule_once_where_it_runs():
    found = hlo_liveness.schedule(LOOP)
    assert megabytes(found) == [0, 8, 16, 8, 8, 8, 8, 8, 12, 12, 8, 8]
    (loop,) = found.loops
    assert (loop.begin, loop.end, loop.times, loop.depth) == (5, 10, 8, 0)
    assert [name for name in found.made_by if name] == [
        "before",
        "broadcast.7",
        "jit(step)/jvp(lm)/while",
        "inner",
        "write",
    ]


def test_zeros_with_an_entry_for_each_iteration_are_filled_by_the_loop():
    filled = {r.array.made_by: r.filled_by for r in hlo_liveness.schedule(LOOP).ranges}
    assert filled["broadcast.7"] == "jit(step)/jvp(lm)/while"
    assert filled["before"] == filled["inner"] == ""
    # Another number of iterations, or an array that isn't made of zeros.
    for old, new in (('"n":"8"', '"n":"4"'), ("broadcast.7", "lm/add")):
        changed = hlo_liveness.schedule(LOOP.replace(old, new))
        assert {r.filled_by for r in changed.ranges} == {""}


def test_a_loop_in_a_loop_is_deeper():
    inner = LOOP.replace("%body", "%inner_body").replace("ENTRY %main", "%outer")
    text = f"""{inner}
ENTRY %main (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  ROOT %w = s32[] while(%p), condition=%condition, body=%outer, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    found = hlo_liveness.schedule(text)
    assert [(loop.depth, loop.times) for loop in found.loops] == [(0, 3), (1, 8)]
    outer_loop, inner_loop = found.loops
    assert outer_loop.begin < inner_loop.begin <= inner_loop.end < outer_loop.end == len(found.made_by) - 1


def test_of_a_conditional_the_branch_with_the_most_bytes_counts():
    found = hlo_liveness.schedule(BRANCHES)
    assert max(megabytes(found)) == 4
    assert "large" in found.made_by
    assert "small" not in found.made_by


@pytest.mark.parametrize("most", [1, 2, 5, 12, 400])
def test_thinning_keeps_the_peak(most):
    found = hlo_liveness.schedule(LOOP)
    positions = found.thinned(most)
    assert len(positions) == min(most, 12)
    assert sorted(set(positions)) == list(positions)
    assert 2 in positions, "the peak"


def test_a_program_that_is_not_scheduled_has_no_schedule():
    assert hlo_liveness.schedule(LOOP.replace(", is_scheduled=true", "")) is None
    assert hlo_liveness.schedule("HloModule empty") is None


def test_the_peak_of_a_compiled_program_has_the_arrays_that_are_live_there():
    def loss(weights, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(body, x, weights)[0].sum()

    weights, x = jnp.zeros((6, 64, 64)), jnp.zeros((2048, 64))
    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    found = hlo_liveness.schedule(text)
    peak = found.totals().argmax()
    assert found.totals().max() == sum(r.array.num_bytes for r in found.ranges if r.begin <= peak <= r.end)
    assert found.totals().min() >= weights.nbytes + x.nbytes, "the arguments are live throughout"
    assert {loop.times for loop in found.loops} == {6}

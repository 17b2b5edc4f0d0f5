"""What is live at a program's peak: in programs written by hand, and in compiled ones whose peak is known."""

import jax
import jax.numpy as jnp
import pytest

from spmd_trainer.planner import hlo_liveness

MIB = 2**20
# a (4 MiB) and b (8 MiB) are live together, then a and c (2 MiB); the argument is 1 MiB, and the result takes its place.
STRAIGHT = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (p: f32[262144]) -> (f32[262144]) {
  %p = f32[262144]{0} parameter(0), metadata={op_name="state"}
  %a = f32[1048576]{0} custom-call(%p), metadata={op_name="make_a"}
  %b = f32[2097152]{0} dot(%a, %p), metadata={op_name="make_b"}
  %v = f32[2097152]{0:S(1)} copy(%b)
  %c = f32[524288]{0} dot(%v, %a), metadata={op_name="make_c"}
  %d = f32[262144]{0} dot(%c, %a), metadata={op_name="make_d"}
  ROOT %t = (f32[262144]{0}) tuple(%d)
}
"""
# The loop's stack (8 MiB) is made outside and written in place inside, where 4 MiB more are live.
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
  %zeros = f32[8,262144]{1,0} custom-call(%before), metadata={op_name="stack"}
  %t = (s32[], f32[8,262144]{1,0}) tuple(%p, %zeros)
  %loop = (s32[], f32[8,262144]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %out = f32[8,262144]{1,0} get-tuple-element(%loop), index=1
}
"""
# A parameter is updated as soon as its gradient (4 MiB each) is known; the new one lies where the old one did.
INTERLEAVED = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }

ENTRY %main (p: f32[1048576], q: f32[1048576]) -> (f32[1048576], f32[1048576]) {
  %p = f32[1048576]{0} parameter(0)
  %q = f32[1048576]{0} parameter(1)
  %grad_p = f32[1048576]{0} dot(%p, %q), metadata={op_name="grad_p"}
  %new_p = f32[1048576]{0} fusion(%p, %grad_p), kind=kLoop, calls=%f
  %grad_q = f32[1048576]{0} dot(%q, %q), metadata={op_name="grad_q"}
  %new_q = f32[1048576]{0} fusion(%q, %grad_q), kind=kLoop, calls=%f
  ROOT %t = (f32[1048576]{0}, f32[1048576]{0}) tuple(%new_p, %new_q)
}
"""
# Asynchronous: a start names its operand again, a fusion says which operand its result is.
ASYNCHRONOUS = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[1048576] {
  %p = f32[8]{0} parameter(0)
  %a = f32[262144]{0} custom-call(%p), metadata={op_name="make_a"}
  %start = (f32[262144]{0}, f32[1048576]{0}) all-gather-start(%a), dimensions={0}
  %g = (f32[8]{0}, f32[262144]{0}) fusion(%p, %a), kind=kOutput, output_to_operand_aliasing={{1}: (1, {})}, calls=%f
  %done = f32[1048576]{0} all-gather-done(%start), metadata={op_name="gathered"}
  ROOT %sum = f32[1048576]{0} fusion(%done), kind=kLoop, calls=%f
}
"""


def live_at_peak(text):
    """The arrays that are live at the first position with the most bytes, largest first."""
    schedule = hlo_liveness.schedule(text)
    peak = schedule.totals().argmax() if schedule.made_by else 0
    found = [r.array for r in schedule.ranges if r.begin <= peak <= r.end]
    return sorted(found, key=lambda array: -array.num_bytes)


def rows(text):
    return [(x.num_bytes / MIB, x.made_by) for x in live_at_peak(text) if not x.is_argument and x.num_bytes > 64]


def test_arrays_live_together_are_found_and_others_are_not():
    assert rows(STRAIGHT) == [(8, "make_b"), (4, "make_a")]
    arguments = [x for x in live_at_peak(STRAIGHT) if x.is_argument]
    assert [(x.num_bytes, x.made_by, x.array) for x in arguments] == [(MIB, "state", "f32[262144]")]


def test_a_loop_works_in_place():
    assert rows(LOOP.replace("custom-call(%before)", "custom-call(%p)")) == [(8, "stack"), (4, "inner")]
    # Something larger before the loop is no part of its peak; were it the peak, the loop would be none of it.
    assert rows(LOOP) == [(8, "before"), (8, "stack")]


def test_one_element_of_a_tuple_is_read_without_the_others():
    late = LOOP.replace("custom-call(%before)", "custom-call(%p)").replace(
        "  ROOT %t = (s32[], f32[8,262144]{1,0}) tuple(%i, %written)",
        "  %late = s32[] get-tuple-element(%p), index=0\n  ROOT %t = (s32[], f32[8,262144]{1,0}) tuple(%late, %written)",
    )
    assert rows(late) == [(8, "stack"), (4, "inner")]


def test_what_is_called_leaves_its_result_with_the_caller():
    copied = LOOP.replace("custom-call(%before)", "custom-call(%p)").replace("fusion(%stack", "copy(%stack")
    assert rows(copied) == [(8, "stack"), (4, "inner")]


def test_a_gradient_is_gone_once_its_parameter_is_updated():
    assert rows(INTERLEAVED) == [(4, "grad_p")]


def test_asynchronous_operations_hold_each_array_once():
    assert rows(ASYNCHRONOUS) == [(4, "gathered"), (1, "make_a")]


@pytest.mark.parametrize("layers", [2, 16])
def test_a_compiled_scan_keeps_an_input_for_each_layer(layers):
    width = 64

    def loss(weights, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(body, x, weights)[0].sum()

    weights, x = jnp.zeros((layers, width, width)), jnp.zeros((2048, width))
    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    kept = [x for x in live_at_peak(text) if x.array == f"f32[{layers},2048,{width}]"]
    assert len(kept) == 1
    assert kept[0].num_bytes == layers * 2048 * width * 4


def test_the_estimate_is_near_what_the_compiler_sets_aside():
    def narrowed(x, w):
        return jnp.sin(x @ w) @ w.T

    compiled = jax.jit(narrowed).lower(jnp.zeros((512, 128)), jnp.zeros((128, 4096))).compile()
    found = sum(x.num_bytes for x in live_at_peak(compiled.as_text()) if not x.is_argument)
    assert found == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.3)

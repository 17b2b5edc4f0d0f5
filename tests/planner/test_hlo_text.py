"""Texts as XLA writes them for TPUs and GPUs, cut to what is parsed."""

import pytest

from spmd_trainer.planner import hlo_text

# Counts from 0 to 8 by 2, as TPU programs do that multiply two parts of an array in each iteration.
LOOP = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %x)
}

%condition (q: (s32[], f32[4])) -> pred[] {
  %q = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] constant(8)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  ROOT %loop = (s32[], f32[4]{0}) while(%a), condition=%condition, body=%body
}
"""


def times(hlo):
    bodies, entry = hlo_text.computations(hlo)
    return {execution.name: execution.times for execution in hlo_text.executions(bodies, entry)}


def test_a_loop_runs_as_often_as_its_counter_needs():
    assert times(LOOP)["body"] == 4
    assert times(LOOP.replace("constant(2)", "constant(3)"))["body"] == 3  # 0, 3, 6
    assert times(LOOP.replace("constant(2)", "constant(1)"))["body"] == 8


def test_the_compilers_own_trip_count_comes_first():
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert times(noted)["body"] == 5


def test_a_condition_that_is_no_bound_runs_once():
    assert times(LOOP.replace("direction=LT", "direction=NE"))["body"] == 1


@pytest.mark.parametrize(
    "branches", ["branch_computations={%unusual, %usual}", "true_computation=%usual, false_computation=%unusual"]
)
def test_of_a_conditional_the_branch_of_a_true_predicate_runs(branches):
    empty = "%{} (p: f32[]) -> f32[] {{\n  ROOT %p = f32[] parameter(0)\n}}\n\n"
    entry = f"ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %c = f32[] conditional(%i, %a, %a), {branches}\n}}\n"
    assert times(empty.format("unusual") + empty.format("usual") + entry) == {"main": 1, "usual": 1}


def test_attributes_of_kernels_contain_line_breaks():
    kernel = (
        '  %k = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        '"xprof_metadata":"{}"\n'
        '}}, metadata={op_name="jit(step)/splash"}\n'
        "  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %k)\n"
    )
    text = LOOP.replace("  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %x)\n", kernel)
    found = list(hlo_text.instructions(hlo_text.computations(text)[0]["body"]))
    assert [i.opcode for i in found[-2:]] == ["custom-call", "tuple"]
    assert found[-2].made_by == "jit(step)/splash"
    assert found[-1].is_root


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,128]{1,0}", 4096),
        ("(bf16[4]{0}, s8[3]{0}, pred[])", 12),
        ("f8e4m3fn[16]", 16),
        ("s4[2]{0:E(4)}", 1),
        ("u4[3]", 2),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo_text.array_bytes(shape) == size


def test_elements_of_a_tuple():
    shape = "((f32[2]{0}, s8[3]), bf16[4]{0:T(8,128)})"
    assert hlo_text.tuple_elements(shape) == ["(f32[2]{0}, s8[3])", " bf16[4]{0:T(8,128)}"]
    assert hlo_text.arrays(shape) == ["f32[2]{0}", "s8[3]", "bf16[4]{0:T(8,128)}"]
    assert hlo_text.dimensions("bf16[4,5]{1,0}") == (4, 5)
    assert hlo_text.dimensions("f32[]") == ()

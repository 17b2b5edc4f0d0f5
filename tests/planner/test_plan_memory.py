"""The memory chart of a plan: which arrays share an area, and what the chart says of the schedule."""

import pytest
from facts import assert_names

from spmd_trainer.planner.hlo_liveness import schedule
from spmd_trainer.planner.plan_memory import layer_path, memory_over_time, operation_text

MIB = 2**20
BODY = "jit(step)/transpose(jvp(net.apply))/net/net.call/stack/while/body/closed_call/checkpoint"


def program(*operations: tuple[str, str, str]) -> str:
    """A program that keeps every array to its end.

    Args:
      operations: name in the program, MiB, and the model's operation of each.
    """
    lines = [
        f'  %{name} = f32[{int(float(size) * MIB) // 4}]{{0}} custom-call(%p0), metadata={{op_name="{made_by}"}}'
        for name, size, made_by in operations
    ]
    arguments = [
        (0, 8, "state.mdl_vars['params']['w']"),
        (1, 16, "state.opt_states[0]['m']['w']"),
        (2, 1, "inputs['ids']"),
        (3, 0.5, "key"),
    ]
    parameters = [
        f'  %p{n} = f32[{int(size * MIB) // 4}]{{0}} parameter({n}), metadata={{op_name="{name}"}}'
        for n, size, name in arguments
    ]
    operands = ", ".join(f"%{name}" for name, _, _ in operations)
    return "\n".join(
        [
            "HloModule m, is_scheduled=true",
            "",
            "ENTRY %main (p0: f32[1]) -> f32[2] {",
            *parameters,
            *lines,
            f"  ROOT %r = f32[2]{{0}} custom-call({operands})",
            "}",
            "",
        ]
    )


def at_peak(text: str) -> dict[str, float]:
    chart = memory_over_time(schedule(text))
    return {group.name: group.num_bytes[chart.peak] / MIB for group in chart.groups}


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        (f"{BODY}/rematted_computation/sub.body_fn/sub/layer_0/attn/attn._logits/dot_general", "net/stack/sub/layer_*/attn"),
        ("jit(step)/jvp(lm.apply)/lm/lm.loss/softmax/softmax.get_logits/einsum/...y,yz->...z/dot_general", "lm/softmax"),
        ("jit(step)/jvp(Model)/Dense_3/dot_general", "Dense_*"),
        ("jit(step)/jvp(net)/layers/11/attn/add", "layers/*/attn"),
        ("jit(step)/jvp(net)/net/ffn_layer1/mul", "net/ffn_layer1"),
        ("jit(step)/jvp(net)/net/(attn/mul:mlp/add)", "net/attn"),
        ("jit(step)/transpose(jvp())/convert_element_type", ""),
        ("jit(step)/mul", ""),
        ("broadcast.65", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_layers_of_an_operation(operation, path):
    assert "/".join(layer_path(operation)) == path


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ("jit(step)/jvp(net)/net/attn/dot_general", "net/attn, forward"),
        (f"{BODY}/sub/attn/dot_general", "net/stack/sub/attn, backward"),
        (f"{BODY}/rematted_computation/sub/attn/dot_general", "net/stack/sub/attn, rematerialised"),
        ("jit(step)/mul", "outside the layers"),
        ("", ""),
    ],
)
def test_an_operation_for_people(operation, text):
    assert operation_text(operation) == text


def test_arguments_are_divided_by_what_they_are():
    found = at_peak(program(("a", "4", "jit(step)/jvp(net)/net/attn/dot_general")))
    assert found == {
        "variables": 8,
        "optimizer state": 16,
        "batch and other arguments": 1.5,
        "attn": 4,
        "other temporaries": pytest.approx(0, abs=1e-4),
    }


def test_temporaries_are_divided_by_layer_and_equal_layers_are_one_group():
    step = "jit(step)/jvp(net)/net"
    found = at_peak(
        program(
            ("a", "4", f"{step}/layer_0/attn/query/dot_general"),
            ("b", "4", f"{step}/layer_1/attn/key/dot_general"),
            ("c", "2", f"{step}/layer_0/mlp/dot_general"),
            ("d", "1", f"{step}/logits/dot_general"),
            ("e", "0.1", f"{step}/norm/mul"),
            ("f", "3", "jit(step)/mul"),
            ("g", "2", ""),
        )
    )
    layers = {name: size for name, size in found.items() if "/" in name or name == "logits"}
    assert layers == {"layer_*/attn/query": 4, "layer_*/attn/key": 4, "layer_*/mlp": 2, "logits": 1}
    assert found["other temporaries"] == pytest.approx(5.1, abs=1e-4), "what is too small, and outside of all layers"


def test_a_group_is_not_divided_into_more_layers_than_the_chart_has_colours():
    step = "jit(step)/jvp(net)/net"
    many = [(f"a{n}", "1", f"{step}/mlp/part{n}/dot_general") for n in range(8)]
    found = at_peak(program(*many, ("b", "4", f"{step}/attn/dot_general")))
    assert found["mlp"] == 8
    assert found["attn"] == 4


def test_of_many_outermost_layers_the_largest_are_groups():
    found = at_peak(program(*((f"a{n}", str(n + 1), f"jit(step)/jvp(Net)/part{n}x/dot_general") for n in range(8))))
    assert {name: size for name, size in found.items() if name.startswith("part")} == {
        f"part{n}x": n + 1 for n in range(3, 8)
    }
    assert found["other temporaries"] == pytest.approx(6, abs=1e-3)


def test_what_is_small_stays_with_the_layer_around_it():
    step = "jit(step)/jvp(net)/net/mlp"
    parts = [(f"a{n}", "3", f"{step}/part{n}/dot_general") for n in range(2)]
    small = [(f"s{n}", "0.4", f"{step}/small{n}/dot_general") for n in range(5)]
    found = at_peak(program(*parts, *small))
    assert found["mlp/part0"] == found["mlp/part1"] == 3
    assert found["mlp (other parts)"] == pytest.approx(2.0, abs=1e-3)


def test_a_shortened_path_belongs_to_the_whole_one():
    found = at_peak(
        program(
            ("a", "4", "jit(step)/jvp(net)/net/stack/attn/dot_general"),
            ("b", "2", "jit(step)/jvp(net)/net/logits/dot_general"),
            ("c", "1", "attn/attn.probs/reduce_sum"),
        )
    )
    assert found["stack/attn"] == 5


def test_the_areas_add_up_to_the_live_bytes_at_every_point():
    text = program(*((f"a{n}", "1", f"jit(step)/jvp(net)/net/part{n % 3}/dot_general") for n in range(1000)))
    chart = memory_over_time(schedule(text))
    assert len(chart.positions) == 400
    assert chart.length == 1005
    totals = [sum(group.num_bytes[point] for group in chart.groups) / MIB for point in range(400)]
    assert totals == sorted(totals), "nothing ends before the program does"
    assert totals[chart.peak] == totals[-1] == pytest.approx(1025.5, abs=1e-4)
    names = [chart.operation_names[n] for n in chart.operations]
    assert_names(names[0], "the compiler")
    assert "net/part" not in names[0]
    assert_names(names[-1], "the compiler", "after net/part0, forward")
    assert set(names[10:-1]) == {f"net/part{n}, forward" for n in range(3)}


def test_a_program_without_a_schedule_has_no_chart():
    text = program(("a", "4", "jit(step)/jvp(net)/net/attn/dot_general"))
    assert memory_over_time(schedule(text.replace(", is_scheduled=true", ""))) is None

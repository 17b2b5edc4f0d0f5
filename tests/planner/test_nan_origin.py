"""Where a NaN came from, in small programs: the operation, the iteration of its loop, and only what reached the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.planner.nan_origin import Flags, Value, layer_of
from spmd_trainer.planner.value_flags import INFINITE, ITERATION, NAN, run_with_flags


def causes(fn, *args, result=0):
    """(beginnings, all that the result's NaN went through, results) of a function."""
    closed, frames = jax.make_jaxpr(fn)(*args), []

    def run(*flat):
        results, flags, frame = run_with_flags(closed, flat)
        frames.append(frame)
        return results, flags

    results, flags = jax.jit(run)(*jax.tree.leaves(args))
    expected = jax.tree.leaves(fn(*args))
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    found = Flags(frames[-1], jax.tree.map(np.asarray, flags))
    return found.causes([Value((), frames[-1].results[result])])


def begun(fn, *args, result=0):
    return causes(fn, *args, result=result)[0]


def test_a_finite_result_has_no_causes():
    assert causes(lambda x: jnp.sin(x), 1.0) == ([], [])


def test_the_first_operation_is_named_with_its_line_and_layer():
    def fn(x):
        with jax.named_scope("lm"), jax.named_scope("ff_layer"):
            y = jnp.log(x)
        return jnp.sin(y) * 2

    (found,) = begun(fn, -1.0)
    assert (found.operation.primitive, found.flag, found.layer) == ("log", NAN, "lm/ff_layer")
    assert "test_nan_origin.py" in found.operation.where


def test_a_nan_of_an_infinity_has_two_beginnings():
    infinity, nan = begun(lambda x: (y := jnp.exp(x)) - y, 1e4)
    assert (infinity.operation.primitive, infinity.flag) == ("exp", INFINITE)
    assert (nan.operation.primitive, nan.flag, nan.from_infinity) == ("sub", NAN, True)


def test_what_a_mask_drops_is_no_cause():
    def fn(x):
        dropped = jnp.where(x > 0, 1.0, jnp.log(x))  # NaN in the row that is dropped
        return jnp.sum(jnp.sqrt(jnp.where(x > 0, -dropped, 1.0)))

    (found,) = begun(fn, jnp.array([-1.0, 1.0]))
    assert found.operation.primitive == "sqrt"


def test_arguments_are_named():
    (found,) = begun(lambda x, y: x + jnp.sum(y), 1.0, jnp.array([np.nan, 1.0]))
    assert (found.operation, found.argument) == (None, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_names_the_iteration(reverse):
    def fn(x, rows):
        def body(carry, row):
            with jax.named_scope("sub"):
                carry = jnp.log(carry) + row
            return carry, carry

        with jax.named_scope("repeat"):
            return jax.lax.scan(body, x, rows, reverse=reverse)

    # log(-3 + ...) is NaN in the iteration after the row of -30.
    rows = jnp.array([30.0, 30.0, -30.0, 30.0, 30.0])
    expected = 1 if reverse else 3
    for result in (0, 1):
        (found,) = begun(fn, 30.0, rows, result=result)
        assert (found.operation.primitive, found.layer) == ("log", f"repeat[{expected}]/sub")


def test_gradients_are_followed_through_rematerialised_loops():
    def loss(w, x):
        def body(carry, w):
            with jax.named_scope("sub"):
                return carry + jnp.sqrt(w) * 0.1, None

        with jax.named_scope("repeat"):
            return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, w)[0])

    # The square root's gradient at 0 is an infinity.
    found = begun(jax.value_and_grad(loss), jnp.array([1.0, 2.0, 0.0, 3.0]), 1.0, result=1)
    assert found[0].layer == "repeat[2]/sub"
    assert found[0].flag == INFINITE
    assert found[0].backward or found[0].recomputed
    assert not begun(jax.value_and_grad(loss), jnp.array([1.0, 2.0, 0.0, 3.0]), 1.0)


def test_on_a_mesh_the_flags_are_of_all_devices():
    mesh = jax.make_mesh((8,), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))

    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    def inside(x):
        with jax.named_scope("inside"):
            return jnp.log(x) + jax.lax.psum(jnp.sum(x), "data") * 0

    x = jax.device_put(jnp.ones(16).at[13].set(-1.0), sharded)  # one of the eight devices has it
    with jax.set_mesh(mesh):
        (found,) = begun(lambda x: jnp.sum(inside(x)), x)
        (plain,) = begun(lambda x: jnp.sum(jnp.log(x)), x)
    assert (found.operation.primitive, found.layer) == ("log", "inside")
    assert plain.operation.primitive == "log"


def test_layers_of_name_stacks():
    stack = "transpose(jvp(lm.apply))/lm/lm.compute_predictions/lm/transformer/repeat/repeat.call_with_custom_method"
    inner = "rematted_computation/sub.body_fn/sub/x_layers_0/ff_layer/ff_layer._compute/linear/einsum/...y,yz->...z"
    scope = [*stack.split("/"), ITERATION, "", *inner.split("/")]
    assert layer_of(scope, [2]) == "lm/transformer/repeat[2]/sub/x_layers_0/ff_layer/linear/einsum"


def test_a_constant_of_the_program_is_named():
    table = jnp.array([1.0, np.nan])
    (found,) = begun(lambda x: jnp.sum(x * table), jnp.ones(2))
    assert (found.operation, found.argument, found.flag) == (None, None, NAN)


def test_a_constant_in_a_loop_is_named():
    table = jnp.array([1.0, np.nan])
    (found,) = begun(lambda x: jax.lax.scan(lambda c, _: (c + jnp.sum(table), None), x, length=2)[0], 1.0)
    assert (found.operation, found.argument) == (None, None)


def test_complex_values_have_flags():
    (found,) = begun(lambda x: jnp.real(jnp.fft.fft(jnp.log(x)))[0], jnp.array([-1.0, 1.0]))
    assert found.operation.primitive == "log"


def test_a_loop_without_iterations_hands_on_what_it_gets():
    def fn(x):
        return jax.lax.scan(lambda c, y: (c + y, c), jnp.log(x), jnp.zeros(0))[0]

    (found,) = begun(fn, -1.0)
    assert found.operation.primitive == "log"


def test_a_barrier_keeps_its_operands_apart():
    def fn(x):
        bad, good = jax.lax.optimization_barrier((jnp.log(x), jnp.exp(x)))
        return jnp.sqrt(-good) + jnp.isnan(bad)

    (found,) = begun(fn, -1.0)
    assert found.operation.primitive == "sqrt"

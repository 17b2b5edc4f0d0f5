"""Optimizer states in bfloat16 and 8 bits: rounding, meshes, rules, and runs that change the choice at a restart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from praxis import base_layer, pax_fiddle

from spmd_trainer import tasks_lib
from spmd_trainer.checkpointing import LOAD_ALL, Checkpointer, CheckpointLoadingRules, loading_rules
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.sharding import jaxprs
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.step import opt_state_dtypes, state_layout
from spmd_trainer.step.opt_state_dtypes import Bytes
from tests.facts import raises_naming
from tests.step.test_partitioning import KEY, make_batch, make_partitioner, run_steps
from tests.step.test_shard_map_partitioning import fsdp, train

pytestmark = pytest.mark.xdist_group("partitioning")

MOMENTS = "/(m|v)/"
# A level of eight bits is 2 ** (1 / 8) times the one below.
ONE_LEVEL, ONE_BFLOAT16 = 2 ** (1 / 8) - 1, 2.0**-7


def stored(path, x, dtype, step=0):
    return opt_state_dtypes.encode(path, jnp.asarray(x, jnp.float32), dtype, step)


def rows(seed, decades=6.0):
    """Rows whose largest element is 1, of elements over so many powers of ten."""
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1.0, 1.0], (8, 300)) * 10.0 ** -rng.uniform(0, decades, (8, 300))).astype(np.float32)
    x[:, 0] = 1.0
    return x


def make_task(**learner_fields):
    task_p = StdlibBytesTiny().task()
    task_p.train.learner.set(**learner_fields)
    return tasks_lib.build_task(task_p)


def in_dtype(dtype, sizes=(1, 4, 2)):
    return make_partitioner(sizes, make_task(opt_state_dtype_rules=[(MOMENTS, dtype)]))


def kept_dtypes(partitioner):
    grad_tx, _ = state_layout.grad_transformation(partitioner.layout)
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype), partitioner.layout.var_weight_hparams
    )
    return opt_state_dtypes.kept_dtypes(partitioner.task.learner, grad_tx.init, shapes)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(["bfloat16", "8bit"]),
    path=st.sampled_from(["m/params/w", "v/params/w"]),
)
def test_an_element_is_rounded_to_a_neighbour_and_storing_it_again_changes_nothing(seed, dtype, path):
    x = rows(seed, decades=4.0)
    x = np.abs(x) if path == "v/params/w" else x
    x[0, 1], x[1] = 0.0, 0.0
    once = stored(path, x, dtype, step=seed)
    values = np.asarray(opt_state_dtypes.decode(once))
    assert (np.abs(values - x) <= np.abs(x) * (ONE_BFLOAT16 if dtype == "bfloat16" else ONE_LEVEL) * 1.0001).all()
    assert not values[x == 0].any()
    again = stored(path, values, dtype, step=seed + 1)
    jax.tree.map(np.testing.assert_array_equal, again, once)


@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_the_mean_over_steps_is_the_element(dtype):
    x, count = rows(0, decades=3.0), 400
    found = jax.jit(lambda step: opt_state_dtypes.decode(stored("m/params/w", x, dtype, step)))
    mean = np.mean([np.asarray(found(step), np.float64) for step in range(count)], axis=0)
    # Five standard deviations of a mean of draws that are at most a level apart, of 2,400 elements.
    level = ONE_BFLOAT16 if dtype == "bfloat16" else ONE_LEVEL
    assert np.abs(mean / x - 1).max() <= 5 * level / 2 / np.sqrt(count)


@pytest.mark.parametrize("path", ["m/params/w", "v/params/w"])
def test_eight_bits_need_no_array_of_zeros(path):
    """The compiler would share one with the initial sums of the minibatches' gradients, and keep it in memory all the while."""

    def again(x, step):
        return opt_state_dtypes.encode(path, opt_state_dtypes.decode(stored(path, x, "8bit")) * 0.9, "8bit", step)

    traced = jax.make_jaxpr(again)(rows(0), 1)
    zeros = [
        eqn
        for eqn in jaxprs.equations(traced.jaxpr)
        for x in eqn.invars
        if not isinstance(x, core.Var) and x.aval.dtype == jnp.float32 and x.val == 0
        if any(out.aval.size == rows(0).size for out in eqn.outvars)
    ]
    assert not zeros


def test_a_second_moment_is_not_rounded_to_zero_and_an_element_that_is_not_finite_stays_visible():
    x = np.abs(rows(1))
    x[:, 1] = 1e-30
    assert (np.asarray(opt_state_dtypes.decode(stored("v/params/w", x, "8bit"))) > 0).all()
    x[2, 5] = np.nan
    for dtype in ("bfloat16", "8bit"):
        assert np.isnan(np.asarray(opt_state_dtypes.decode(stored("v/params/w", x, dtype)))[2, 5])


@pytest.mark.full
def test_a_step_on_a_mesh_that_divides_nothing_gives_the_losses_of_one_device():
    batch = make_batch()
    state, _, losses = run_steps(in_dtype("8bit"), batch)
    _, _, reference = run_steps(in_dtype("8bit", (1, 1, 1)), batch)
    _, _, whole = run_steps(make_partitioner((1, 1, 1)), batch)
    np.testing.assert_allclose(losses, reference, rtol=1e-5)
    np.testing.assert_allclose(losses, whole, rtol=1e-2)
    assert losses != whole
    assert {str(x.dtype) for x in jax.tree.leaves(state.opt_states)} == {"uint8", "float32", "int32"}


@pytest.mark.full
def test_bfloat16_on_a_mesh_gives_the_losses_of_one_device():
    batch = make_batch()
    _, _, losses = run_steps(in_dtype("bfloat16"), batch)
    _, _, reference = run_steps(in_dtype("bfloat16", (1, 1, 1)), batch)
    np.testing.assert_allclose(losses, reference, rtol=1e-5)


@pytest.mark.full
def test_fsdp_by_shard_map_gives_the_losses_of_one_device():
    _, _, losses = train(fsdp(task=make_task(opt_state_dtype_rules=[(MOMENTS, "8bit")])), steps=3)
    _, _, reference = train(in_dtype("8bit", (1, 1, 1)), steps=3)
    np.testing.assert_allclose(losses, reference, rtol=1e-5)


def test_states_of_eight_bits_are_laid_out_like_their_variable_and_need_a_quarter_of_the_bytes():
    whole, small = (p.layout for p in (make_partitioner((1, 4, 2)), in_dtype("8bit")))
    mesh = dict(whole.mesh.shape)
    by_path = {variable.path: variable for variable in small.records()}
    compared = 0
    for variable in whole.records():
        if not variable.path.startswith("opt_states/") or variable.dtype != np.float32:
            continue
        codes, scale = (by_path[f"{variable.path}/{part}"] for part in ("codes_8bit", "scale_8bit"))
        assert (codes.logical_shape, codes.spec) == (variable.logical_shape, variable.spec)
        assert codes.bytes_per_device(mesh) * 4 == variable.bytes_per_device(mesh)
        assert scale.logical_shape == (*variable.logical_shape[:-1], 1)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("float32", "8bit"),
        pytest.param("8bit", "bfloat16", marks=pytest.mark.full),
        pytest.param("bfloat16", "float32", marks=pytest.mark.full),
    ],
)
def test_a_run_may_change_the_dtype_when_it_is_started_again(tmp_path, before, now):
    """The moments that are restored are those that were saved, to a rounding step, on another mesh too."""
    old, new = in_dtype(before), in_dtype(now, (2, 2, 1))

    @jax.jit
    def filled(state):
        def moments(keys, x):
            index = jnp.arange(x.size).reshape(x.shape)
            signs = jnp.where(index % 3, 1, -1) if opt_state_dtypes.is_signed(path_str(keys)) else 1
            return (jnp.where(index % 7, 0.01, 0.3) * signs).astype(x.dtype)

        dtypes = kept_dtypes(old)
        loaded = opt_state_dtypes.loaded(dtypes, old.layout.slice(state).opt_states[0])
        opt = jax.tree_util.tree_map_with_path(lambda keys, x: moments(keys, x) if x.ndim else x, loaded)
        with opt_state_dtypes.rounding_for(0):
            opt = opt_state_dtypes.stored(dtypes, opt)
        return old.layout.pad(old.layout.slice(state).replace(opt_states=[opt])), opt_state_dtypes.loaded(dtypes, opt)

    state, logical = filled(old.initialize_train_state(KEY))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(0, state, old.layout.variables, input_state=None, metadata={})
    restored = Checkpointer(tmp_path / "checkpoints", read_only=True).restore(new.layout.variables, new.layout.mesh)
    for variable, array in zip(new.layout.records(), jax.tree.leaves(restored.state), strict=True):
        assert (array.shape, array.dtype) == (variable.padded_shape, variable.dtype)
    dtypes = kept_dtypes(new)
    opt = jax.jit(lambda s: opt_state_dtypes.loaded(dtypes, new.layout.slice(s).opt_states[0]))(restored.state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.0 if now == "float32" else ONE_LEVEL * 1.01), opt, logical
    )
    assert any((np.asarray(x) < 0).any() for x in jax.tree.leaves(opt))
    # A warm start that loads the states, all or by rules, converts them in the same way.
    for fields in ({"load_opt_states": True}, {"partial_load_opt_states": True}):
        rules = {tmp_path / "checkpoints": CheckpointLoadingRules(load_rules=[LOAD_ALL], **fields)}
        resolved = loading_rules.resolve_rules(new.layout.variables, rules, check_contents=False)
        found = resolved.read(new.layout.variables, new.layout.mesh)
        for variable, array in zip(new.layout.records(), jax.tree.leaves(restored.state), strict=True):
            if variable.path != "step":
                np.testing.assert_array_equal(found[variable.path], array, err_msg=variable.path)


def test_rules_choose_parts_of_any_optax_chain_and_small_states_and_averages_stay_float32():
    optimizer = optax.chain(optax.scale_by_adam(), optax.scale(-1e-3))
    by_rule = make_task(optimizer=optimizer, opt_state_dtype_rules=[("/mu/.*softmax", "bfloat16")])
    records = make_partitioner((1, 1, 1), by_rule).layout.records()
    found = {v.path for v in records if v.path.startswith("opt_states/") and v.dtype == jnp.bfloat16}
    assert found
    assert all("/mu/" in path and "softmax" in path for path in found)

    task_p = StdlibBytesTiny().task()
    task_p.train.learner.opt_state_dtype = "8bit"
    task_p.train.learner.optimizer.ema_decay = 0.9
    records = make_partitioner((1, 1, 1), pax_fiddle.build(task_p)).layout.records()
    small = [variable for variable in records if variable.path.endswith("/codes_8bit")]
    assert small
    for variable in small:
        assert np.prod(variable.logical_shape) >= opt_state_dtypes.LEAST_ELEMENTS
        assert "/ema/" not in variable.path


@pytest.mark.parametrize("dtype", opt_state_dtypes.DTYPES)
def test_what_the_optimizer_itself_keeps_in_bfloat16_stays_so(dtype):
    """It reads its own bfloat16, and float32 where the learner keeps fewer bits; both are stored again as they were."""
    seen = []

    def init(variables):
        shape = variables["params"]["w"].shape
        return {"mu": {"params": jnp.ones(shape, jnp.bfloat16)}, "nu": {"params": jnp.ones(shape)}}

    def update(grads, state, variables=None):
        seen.append(jax.tree.map(lambda x: x.dtype.name, state))
        return grads, state

    learner = make_task(opt_state_dtype=dtype, optimizer=optax.GradientTransformation(init, update)).learner
    variables = {"params": {"w": jnp.ones((64, 64))}}
    hparams = {"params": {"w": base_layer.WeightHParams((64, 64), dtype=jnp.float32)}}
    before = opt_state_dtypes.initial(learner, learner.get_grad_tx(hparams).init, variables)
    assert dtype == "float32" or jax.tree.leaves(before)[1].dtype == {"bfloat16": "bfloat16", "8bit": "uint8"}[dtype]

    @jax.jit
    def step(state):
        with opt_state_dtypes.rounding_for(0):
            return learner.update_states(variables, state, variables, hparams)

    _, after = step(before)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)
    (state,) = jax.tree.leaves(seen, is_leaf=lambda x: isinstance(x, dict) and "mu" in x)
    assert state == {"mu": {"params": "bfloat16"}, "nu": {"params": "float32"}}


def test_parts_that_begin_as_variables_stay_float32_whatever_a_rule_says():
    """z of schedule_free is a copy of the variables; those of Adam begin at zero, also where a compiled function makes them."""

    def init(variables):
        return {
            "zeros": jax.jit(jnp.zeros_like)(variables),
            "twice": jax.jit(lambda x: x.T @ x)(variables),
            "z": variables,
        }

    learner = make_task(opt_state_dtype_rules=[("", "8bit")]).learner
    kept = opt_state_dtypes.initial(learner, init, jnp.ones((64, 64)))
    assert {name: isinstance(part, Bytes) for name, part in kept.items()} == {"zeros": True, "twice": False, "z": False}


@pytest.mark.parametrize("steps", [0, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "rules", [[("", "8bit")], [("/z/", "bfloat16"), ("/nu/", "bfloat16"), ("/mu/", "8bit")]], ids=len
)
def test_z_of_schedule_free_stays_float32(rules, steps):
    free = optax.contrib.schedule_free(optax.adam(1e-2), learning_rate=1e-2)
    partitioner = make_partitioner((1, 1, 1), make_task(optimizer=free, opt_state_dtype_rules=rules))
    dtypes = {variable.path: str(variable.dtype) for variable in partitioner.layout.records()}
    z = {dtype for path, dtype in dtypes.items() if path.startswith("opt_states/") and "/z/" in path}
    mu = {dtype for path, dtype in dtypes.items() if "/mu/" in path}
    assert (z, mu) == ({"float32"}, {"uint8", "float32"})
    if steps:
        _, _, losses = run_steps(partitioner, make_batch())
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"opt_state_dtype": "8bits"}, ["opt_state_dtype", "'8bits'", "mean 8bit"]),
        ({"opt_state_dtype_rules": [("/m/", "bfloat")]}, ["rule 1", "'bfloat'", "mean bfloat16"]),
        ({"opt_state_dtype_rules": ["/m/"]}, ["rule 1", "(regex, dtype)"]),
        ({"opt_state_dtype_rules": [("(", "8bit")]}, ["rule 1", "'('"]),
    ],
)
def test_wrong_settings_are_refused(fields, facts):
    with raises_naming(ValueError, *facts):
        make_task(**fields)


def test_a_rule_without_a_part_of_the_state_is_a_warning(caplog):
    make_partitioner((1, 1, 1), make_task(opt_state_dtype_rules=[("/momentum/", "8bit")]))
    assert "'/momentum/'" in caplog.text


@pytest.mark.parametrize("path", ["m/params/w", "0/mu/params/attention/v/kernel", "m/params/nu/w", "momentum/w"])
def test_the_sign_of_zero_and_of_levels_is_kept(path):
    x = np.array([[1.0, -1.0, 0.0, -0.25, 0.5]], np.float32)
    found = stored(path, x, "8bit")
    assert isinstance(found, Bytes)
    np.testing.assert_array_equal(opt_state_dtypes.decode(found), x)
    assert np.asarray(found.codes_8bit).tolist() == [[127, 255, 0, 239, 119]]


def test_states_are_not_rounded_without_the_number_of_the_step():
    """The same random bits in each step would bias the moments."""
    with pytest.raises(RuntimeError, match="rounding_for"):
        opt_state_dtypes.stored({"m/w": "8bit"}, {"m": {"w": jnp.ones((64, 64))}})

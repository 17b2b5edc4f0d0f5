"""Optimizer states and named activations in pinned host memory: the same numbers, and what the program holds where."""

import dataclasses
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import NEEDS_TPU
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from praxis import base_layer, pax_fiddle, schedules

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.checkpointing import Checkpointer, opt_state_conversion
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import batches
from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.sharding.variables import make_variable_spec, named_shardings, path_str
from spmd_trainer.step import activation_memory, host_states, opt_state_dtypes, step_fns
from spmd_trainer.step.layout import HostPart
from spmd_trainer.step.muon import Muon
from spmd_trainer.step.pjit import PjitPartitioner
from tests.facts import assert_names, raises_naming
from tests.models import model_helpers
from tests.models.model_helpers import Config
from tests.step.test_partitioning import KEY, LENGTH, ROWS, make_batch, make_partitioner

pytestmark = pytest.mark.xdist_group("partitioning")

# Without instructions that multiply and add at once, which the compiler chooses for each loop anew: they change the last bit.
# `test_all_bits_are_the_same_without_joined_products_and_sums` runs the others with it.
NO_JOINED_PRODUCTS = "--xla_cpu_max_isa=AVX"
EXACT = NO_JOINED_PRODUCTS in os.environ.get("XLA_FLAGS", "")
# Dimension 0 of "layers" is that of repeated layers; the mesh (x=2, y=4) divides none of the others.
SHAPES = {"layers": (3, 65, 67), "head": (101, 63), "scale": (3, 5)}
SPECS = {"layers": P(None, "x", "y"), "head": P("y", "x"), "scale": P()}


def assert_same(x, y, name=""):
    x, y = np.asarray(x), np.asarray(y)
    if EXACT or x.dtype != np.float32:
        np.testing.assert_array_equal(x, y, err_msg=name)
    else:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)


def stacked(*shape, layers=3):
    return base_layer.WeightHParams(list(shape), repeat_prefix=[layers], repeat_prefix_split_dims_mapping=[-1])


def state_records(state, mesh, in_host_memory):
    """Returns the VariableSpecs of an optimizer state: like their variables, large parts in host memory if asked."""

    def record(keys, x):
        path = path_str(keys)
        spec = next((spec for name, spec in SPECS.items() if f"/params/{name}" in f"/{path}"), P())
        spec = P(*spec[:-1], None) if path.endswith("scale_8bit") and spec else spec
        spec = spec if x.ndim == len(spec) else P()
        variable = make_variable_spec(f"opt_states/0/{path}", x.shape, x.dtype, spec, dict(mesh.shape), "")
        on_host = in_host_memory and x.size >= 4096
        return dataclasses.replace(variable, memory_kind="pinned_host" if on_host else None)

    return jax.tree_util.tree_map_with_path(record, state)


def updated(in_host_memory, dtype, valid):
    """Returns the last updates, and the optimizer state after two updates of variables on a mesh of 8 devices."""
    mesh = sharding.create_device_mesh([("x", 2), ("y", 4)])
    learner_p = StdlibBytesTiny().task().train.learner
    learner_p.set(name="learner", opt_state_dtype=dtype, skip_step_gradient_norm_value=0.0 if valid else 1e-9)
    learner = pax_fiddle.build(learner_p)
    hparams = {"params": {"layers": stacked(65, 67), "head": base_layer.WeightHParams([101, 63]), "scale": stacked(5)}}
    rng = np.random.default_rng(0)
    # Whole numbers, so that the gradients' norm is the same in any order of summation.
    make = lambda: {"params": {n: rng.integers(-2, 3, s).astype(np.float32) for n, s in SHAPES.items()}}  # noqa: E731
    mdl_vars, grads = make(), [make(), make()]
    state = opt_state_dtypes.initial(learner, learner.get_grad_tx(hparams).init, mdl_vars)
    records = state_records(state, mesh, in_host_memory)
    places = named_shardings(records, mesh)

    def step(state, mdl_vars, grads, number):
        on_device = jax.tree.map(lambda v, x: None if v.memory_kind else x, records, state)
        sliced = sharding.slice_uneven(on_device, records, records)
        part = lambda v, x, whole: HostPart(whole, v, mesh) if v.memory_kind else x  # noqa: E731
        inside = jax.tree.map(part, records, sliced, state)
        with opt_state_dtypes.rounding_for(number):
            updates, new = learner.update_states(grads, inside, mdl_vars, hparams)
        back = lambda v, x: x.array if isinstance(x, HostPart) else sharding.pad_uneven(x, v, v, mesh)  # noqa: E731
        return updates, jax.tree.map(back, records, new)

    compiled = jax.jit(evenly(step, mesh), out_shardings=(None, places))
    state = jax.jit(lambda x: sharding.pad_uneven(x, records, records, mesh), out_shardings=places)(state)
    for number in range(2):
        updates, state = compiled(state, mdl_vars, grads[number], jnp.uint32(number))
    return updates, state


@pytest.mark.parametrize(
    ("dtype", "valid"),
    [("8bit", True), *(pytest.param(*c, marks=pytest.mark.full) for c in [("float32", True), ("bfloat16", False)])],
)
def test_an_update_from_host_memory_leaves_the_state_of_one_from_the_device(dtype, valid):
    found, expected = (updated(on_host, dtype, valid) for on_host in (True, False))
    jax.tree.map(assert_same, found, expected)
    assert np.any(np.asarray(found[0]["params"]["head"])) == valid
    assert {x.sharding.memory_kind for x in jax.tree.leaves(found[1]) if x.size >= 4096} == {"pinned_host"}


def in_8_bits(hparams):
    """Returns the learner's update, one of all layers together, and their arguments: state, variables and gradients."""
    learner = make_task(learner={"opt_state_dtype_rules": [("/(m|v)/", "8bit")]}).learner
    tx, rng = learner.get_grad_tx(hparams), np.random.default_rng(0)
    # Whole numbers, so that the gradients' norm is the same in any order of summation.
    make = lambda p: rng.integers(-9, 10, p.full_shape).astype(np.float32)  # noqa: E731
    mdl_vars, grads = jax.tree.map(make, hparams), jax.tree.map(make, hparams)
    dtypes = opt_state_dtypes.kept_dtypes(learner, tx.init, mdl_vars)

    def by_layer(state, mdl_vars, grads):
        with opt_state_dtypes.rounding_for(1):
            return learner.update_states(grads, state, mdl_vars, hparams)

    def together(state, mdl_vars, grads):
        with opt_state_dtypes.rounding_for(1):
            scaled, _ = learner.scale_gradients(grads)
            updates, new = tx.update(scaled, opt_state_dtypes.loaded(dtypes, state), mdl_vars)
            return updates, opt_state_dtypes.stored(dtypes, new)

    return by_layer, together, (opt_state_dtypes.initial(learner, tx.init, mdl_vars), mdl_vars, grads)


MATRIX = base_layer.WeightHParams([64, 512], repeat_prefix=[32])
VECTOR = base_layer.WeightHParams([], repeat_prefix=[32])


@pytest.mark.parametrize(
    "hparams",
    [
        {"w": MATRIX},
        pytest.param({"w": MATRIX, "number_of_each_layer": VECTOR}, marks=pytest.mark.full),
        pytest.param({"w": MATRIX, "same_group": stacked(5, layers=32)}, marks=pytest.mark.full),
    ],
)
def test_a_large_update_in_8_bits_is_that_of_all_layers_together(monkeypatch, hparams):
    monkeypatch.setattr(host_states, "_LARGE_LAYER", 1)
    by_layer, together, given = in_8_bits({"params": hparams})
    found, expected = (jax.tree.map(np.asarray, jax.jit(step)(*given)) for step in (by_layer, together))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if EXACT or x.dtype != np.uint8:
            assert_same(x, y)
        else:  # a moment whose last bit is different may be rounded to another level
            assert np.mean(x != y) < 1e-4


def test_a_large_update_in_8_bits_holds_the_float32_values_of_one_layer(monkeypatch):
    monkeypatch.setattr(host_states, "_LARGE_LAYER", 1)
    *steps, given = in_8_bits({"params": {"w": MATRIX, "scale_behind_the_layers": base_layer.WeightHParams([4096])}})
    compiled = (jax.jit(step, donate_argnums=(0, 2)).lower(*given).compile() for step in steps)
    needed, together = (step.memory_analysis().temp_size_in_bytes for step in compiled)
    assert needed < 0.7 * together


def make_task(experiment=StdlibBytesTiny, learner=None, **train):
    task_p = experiment().task()
    task_p.train.set(**train)
    task_p.train.learner.set(**(learner or {}))
    return tasks_lib.build_task(task_p)


def trained(sizes, learner=None, num_minibatches=1):
    """Returns the partitioner, the state and the losses after two steps, and the lowered and the compiled step."""
    partitioner = make_partitioner(sizes, make_task(learner=learner))
    partitioner.num_minibatches = num_minibatches
    step = partitioner.partition(step_fns.train_step, batches.lm_input_specs(ROWS, LENGTH), is_eval=False)
    lowered = step.lower(KEY)
    compiled = lowered.compile()
    state, losses = partitioner.initialize_train_state(KEY), []
    for _ in range(2):
        state, output = compiled(state, KEY, partitioner.layout.put(make_batch()))
        losses.append(float(output.loss))
    return types.SimpleNamespace(layout=partitioner.layout, state=state, losses=losses, step=(lowered, compiled))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "learner", "minibatches"),
    [
        ((1, 4, 2), {"opt_state_dtype_rules": [("/m/", "8bit"), ("/v/", "bfloat16")]}, 1),
        ((1, 1, 1), {}, 1),
        ((1, 4, 2), {}, 3),
        ((1, 8, 1), {"vectorize_on_repeat_prefix": False}, 1),
    ],
)
def test_training_with_states_on_the_host_gives_the_bits_of_states_on_the_device(sizes, learner, minibatches):
    kept = trained(sizes, learner, minibatches)
    moved = trained(sizes, {**learner, "opt_state_memory_kind": "pinned_host"}, minibatches)
    assert_same(moved.losses, kept.losses)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(moved.state), jax.tree.leaves(kept.state), strict=True):
        assert_same(x, y, jax.tree_util.keystr(path))
    records = moved.layout.records()
    states = [variable.path for variable in records if variable.memory_kind]
    assert len(states) >= 8
    assert all(path.startswith("opt_states/") for path in states)
    for variable, x in zip(records, jax.tree.leaves(moved.state), strict=True):
        assert x.sharding.memory_kind == (variable.memory_kind or "device")
    host_states.check_program(moved.layout, *moved.step)
    with raises_naming(UserError, "opt_state_memory_kind", states[0], "device"):
        host_states.check_program(moved.layout, *kept.step)


@pytest.mark.full
@pytest.mark.parametrize("kinds", [("device", "pinned_host"), ("pinned_host", "device")])
def test_a_run_may_change_where_its_states_are_when_it_is_started_again(tmp_path, kinds):
    old, new = (
        make_partitioner(sizes, make_task(learner={"opt_state_memory_kind": kind}))
        for sizes, kind in zip([(1, 4, 2), (2, 2, 1)], kinds, strict=True)
    )
    fill = lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape).astype(x.dtype)  # noqa: E731
    state = jax.tree.map(fill, old.initialize_train_state(KEY).opt_states)
    state = old.initialize_train_state(KEY).replace(opt_states=jax.device_put(state, old.layout.shardings.opt_states))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(0, state, old.layout.variables, input_state=None, metadata={})
    restored = Checkpointer(tmp_path / "checkpoints", read_only=True).restore(new.layout.variables, new.layout.mesh)
    rows = zip(
        new.layout.records(), jax.tree.leaves(restored.state), old.layout.records(), jax.tree.leaves(state), strict=True
    )
    for variable, array, before, saved in rows:
        assert array.sharding.memory_kind == (variable.memory_kind or "device")
        logical = tuple(map(slice, variable.logical_shape))
        np.testing.assert_array_equal(np.asarray(array)[logical], np.asarray(saved)[logical], err_msg=before.path)


@pytest.mark.full
@pytest.mark.skipif(EXACT, reason="runs this file")
def test_all_bits_are_the_same_without_joined_products_and_sums():
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_JOINED_PRODUCTS}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "from_host or training_with or 8_bits",
    ]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:]


def layers_loss(w, x):
    """Two rematerialised layers with an activation named 'hidden' and one named 'out'."""

    def layer(x, w):
        hidden = checkpoint_name(x @ w, "hidden")
        return jnp.sin(checkpoint_name(jnp.tanh(hidden) @ w, "out")), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0])


def with_activations(saved=(), offloaded=()):
    train = types.SimpleNamespace(saved_activations=saved, offloaded_activations=offloaded)
    return jax.grad(activation_memory.with_policy(types.SimpleNamespace(train=train), layers_loss))


def test_named_activations_are_kept_moved_or_computed_again():
    w, x = np.full((3, 4, 4), 0.1, np.float32), np.ones((2, 4), np.float32)
    plain, *others = (
        str(jax.make_jaxpr(with_activations(**lists))(w, x))
        for lists in ({}, {"saved": ["hidden"]}, {"saved": ["out"], "offloaded": ["hidden"]})
    )
    products, hosts = ([text.count(word) for text in (plain, *others)] for word in ("dot_general[", "<host>"))
    # Two forward and four backward, and those that are computed again.
    assert products == [8, 7, 6]
    assert hosts[:2] == [0, 0]
    assert hosts[2] > 0
    expected = with_activations()(w, x)
    found = jax.jit(with_activations(["out"], ["hidden"]))(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_name_that_no_activation_has_is_refused_and_so_are_lists_that_contradict_each_other():
    w, x = np.ones((3, 4, 4), np.float32), np.ones((2, 4), np.float32)
    with raises_naming(UserError, "offloaded_activations", "'hiden'", "hidden", "out"):
        with_activations(offloaded=["hiden"])(w, x)
    # The block in a custom derivative keeps its own policy, so its names can't be set.
    block = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.tanh(x), "inner")))
    own_derivative = jax.custom_jvp(lambda x: block(x))
    own_derivative.defjvp(lambda primals, tangents: jax.jvp(block, primals, tangents))
    train = types.SimpleNamespace(saved_activations=["inner"], offloaded_activations=[])
    with raises_naming(UserError, "saved_activations", "'inner'"):
        activation_memory.with_policy(types.SimpleNamespace(train=train), own_derivative)(x)
    with raises_naming(ValueError, "saved_activations", "offloaded_activations", "'context'"):
        make_task(saved_activations=["context"], offloaded_activations=["context"])
    with raises_naming(ValueError, "offloaded_activations", "'context'", "list"):
        make_task(offloaded_activations="context")
    with raises_naming(ValueError, "opt_state_memory_kind", "'pinned'", "pinned_host"):
        make_task(learner={"opt_state_memory_kind": "pinned"})


def test_devices_without_memory_kinds_are_refused():
    class Gpu:
        device_kind = "NVIDIA H100"

        def addressable_memories(self):
            raise NotImplementedError

    task = make_task(learner={"opt_state_memory_kind": "pinned_host"})
    mesh = make_partitioner((1, 1, 1)).mesh
    host_states.check_devices(task, mesh)
    gpus = types.SimpleNamespace(devices=np.array([Gpu()]))
    with raises_naming(UserError, "opt_state_memory_kind", "pinned_host", "NVIDIA H100", "no memory kinds"):
        host_states.check_devices(task, gpus)


@pytest.mark.slow
@NEEDS_TPU
def test_the_peak_of_a_tpu_program_falls_by_most_of_the_states():
    from benchmarks import host_memory
    from spmd_trainer.planner import topologies

    case = types.SimpleNamespace(layers=8, width=512, vocab=1024, rows=4, seq=256, dtype="float32")
    devices = topologies.topology_devices("v5e:2x2")
    peaks, states = [], []
    for kind in host_states.MEMORY_KINDS:
        memory = host_memory.compiled_step(case, devices, opt_state_memory_kind=kind)[0].memory_analysis()
        states.append(memory.host_argument_size_in_bytes)
        peaks.append(memory.peak_memory_in_bytes - states[-1])
    assert states[0] == 0
    assert peaks[0] - peaks[1] > 0.6 * states[1] > 0


@pytest.mark.parametrize(
    ("learner", "facts"),
    [
        ({}, None),
        ({"vectorize_on_repeat_prefix": False}, ["less", "vectorize_on_repeat_prefix=False"]),
        (
            {"optimizer": Config(Muon, learning_rate=0.1, lr_schedule=Config(schedules.Constant, value=1.0))},
            ["nothing", "Muon"],
        ),
    ],
    ids=["by layer", "whole", "muon"],
)
def test_states_that_come_to_the_devices_all_at_once_are_a_warning(caplog, learner, facts):
    make_partitioner((1, 1, 1), make_task(learner={**learner, "opt_state_memory_kind": "pinned_host"}))
    found = [text for record in caplog.records if "at the peak" in (text := record.getMessage())]
    assert len(found) == (facts is not None)
    for text in found:
        assert_names(text, "opt_state_memory_kind", *facts)


def test_states_of_a_model_without_repeated_layers_are_a_warning(caplog):
    built = model_helpers.task(Config(models.NnxModel, module=Config(Written)), opt_state_memory_kind="pinned_host")
    PjitPartitioner().setup(built, model_helpers.shapes_of(model_helpers.batch()))
    assert "no repeated layers" in caplog.text


class Written(nnx.Module):
    """A module with a variable that it writes and never reads, and one that is large enough for the host."""

    def __init__(self, *, rngs):
        self.linear, self.large = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones((64, 64)))
        self.last = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x):
        y = self.linear(x) * self.large[...].mean()
        self.last[...] = jax.lax.stop_gradient(y).reshape(-1, 8).mean(0)
        return y


@pytest.mark.parametrize("kind", host_states.MEMORY_KINDS)
def test_a_variable_that_a_step_writes_and_never_reads(kind):
    built = model_helpers.task(Config(models.NnxModel, module=Config(Written)), opt_state_memory_kind=kind)
    partitioner = PjitPartitioner()
    partitioner.setup(built, model_helpers.shapes_of(model_helpers.batch()))
    step = partitioner.partition(step_fns.train_step, model_helpers.shapes_of(model_helpers.batch()), is_eval=False)
    lowered = step.lower(model_helpers.KEY)
    compiled = lowered.compile()
    assert (kind == host_states.PINNED_HOST) == any(v.memory_kind for v in partitioner.layout.records())
    assert None in jax.tree.leaves(compiled.input_shardings[0][0], is_leaf=lambda x: x is None)
    host_states.check_program(partitioner.layout, lowered, compiled)


@pytest.mark.parametrize("memory_kind", [None, host_states.PINNED_HOST])
@pytest.mark.parametrize("before", opt_state_dtypes.DTYPES)
@pytest.mark.parametrize("now", opt_state_dtypes.DTYPES)
def test_states_are_converted_wherever_they_are_kept(before, now, memory_kind):
    """The values that `encode` gives of what `decode` reads, in the memory that the run asks for."""
    if before == now:
        return
    mesh, part = sharding.create_device_mesh([("x", 8)]), "opt_states/0/0/2/m/params/w"
    value = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)

    def variables(dtype, kind):
        encoded = opt_state_dtypes.encode(part, jnp.asarray(value), dtype, 0)
        arrays = {part: encoded}
        if isinstance(encoded, opt_state_dtypes.Bytes):
            arrays = {
                part + opt_state_dtypes.CODES: encoded.codes_8bit,
                part + opt_state_dtypes.SCALE: encoded.scale_8bit,
            }
        specs = {
            p: make_variable_spec(p, x.shape, x.dtype, P("x", None), dict(mesh.shape), "") for p, x in arrays.items()
        }
        return arrays, {p: dataclasses.replace(spec, memory_kind=kind) for p, spec in specs.items()}, encoded

    arrays, saved, encoded = variables(before, None)
    _, wanted, _ = variables(now, memory_kind)
    changed = opt_state_conversion.conversion(saved, wanted)
    made = changed.made(jax.device_put(arrays, named_shardings(dict(changed.read), mesh)), mesh, 7)
    expected = opt_state_dtypes.encode(part, opt_state_dtypes.decode(encoded), now, 7)
    for found, leaf in zip(made.values(), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, leaf)
    kinds = {x.sharding.memory_kind for x in made.values()}
    assert kinds == {memory_kind or jax.devices()[0].default_memory().kind}

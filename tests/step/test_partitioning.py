"""The partitioned step against the pure one: same numbers on any mesh, zeros in the padding, buffers donated."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from praxis import base_layer, pax_fiddle

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import batches, synthetic
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.layout import Layout

# One pytest worker, so that the shared fixtures are compiled once.
pytestmark = pytest.mark.xdist_group("partitioning")

# Nothing divides: vocabulary 257, feed-forward width 67, and a batch of 6 rows on 8 devices.
ROWS, LENGTH = 6, 16
KEY = jax.random.key(3)


def make_task(**train_fields):
    task_p = StdlibBytesTiny().task()
    for name, value in train_fields.items():
        setattr(task_p.train, name, value)
    return tasks_lib.build_task(task_p)


def make_partitioner(sizes, task=None, rows=ROWS) -> pjit.PjitPartitioner:
    names = StdlibBytesTiny.MESH_AXIS_NAMES
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = sharding.create_device_mesh(list(zip(names, sizes, strict=True)), devices=devices)
    partitioner = pjit.PjitPartitioner(mesh)
    partitioner.setup(task or make_task(), batches.lm_input_specs(rows, LENGTH))
    return partitioner


def make_batch(rows=ROWS):
    lm = pax_fiddle.Config(
        synthetic.SyntheticLmInput, name="synthetic", batch_size=rows, seq_len=LENGTH, vocab_size=257, is_training=True
    )
    return pax_fiddle.build(lm).get_next()


def run_steps(partitioner, batch, count=3):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    state = partitioner.initialize_train_state(KEY)
    losses = []
    for _ in range(count):
        inputs = partitioner.layout.put(batch)
        state, output = step(state, KEY, inputs)
        losses.append(float(output.loss))
    return state, output, losses


@pytest.fixture(scope="module")
def on_one_device():
    partitioner = make_partitioner((1, 1, 1))
    return run_steps(partitioner, make_batch())


@pytest.mark.parametrize(
    "sizes", [(1, 4, 2), *(pytest.param(sizes, marks=pytest.mark.full) for sizes in [(2, 2, 2), (1, 1, 8), (1, 8, 1)])]
)
@pytest.mark.full
def test_any_mesh_gives_the_numbers_of_one_device(sizes, on_one_device):
    partitioner = make_partitioner(sizes)
    state, output, losses = run_steps(partitioner, make_batch())
    reference, reference_output, reference_losses = on_one_device
    np.testing.assert_allclose(losses, reference_losses, rtol=1e-5)
    logical = jax.jit(partitioner.metadata.slice)(state)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(logical.mdl_vars), jax.tree.leaves(reference.mdl_vars), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=jax.tree_util.keystr(path))
    for name, (value, weight) in output.weighted_scalars.items():
        np.testing.assert_allclose(value, reference_output.weighted_scalars[name][0], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(weight, reference_output.weighted_scalars[name][1], rtol=1e-6, err_msg=name)


def test_padding_holds_zeros_after_every_step_in_optimizer_state_too():
    partitioner = make_partitioner((1, 4, 2))
    state, _, _ = run_steps(partitioner, make_batch(), count=2)
    padded = 0
    for variable, array in zip(partitioner.metadata.records(), jax.tree.leaves(state), strict=True):
        assert array.shape == variable.padded_shape
        if variable.is_padded:
            padded += 1
            whole = np.array(array)
            assert np.any(whole)
            whole[tuple(slice(size) for size in variable.logical_shape)] = 0
            assert not np.any(whole), variable.path
    # 257 and 67 over two devices: softmax weight and bias, stacked feed-forward weights and bias; each has two moments.
    assert padded == 3 * (2 + 3)


@pytest.mark.full
def test_the_state_has_the_layout_of_its_metadata_and_no_device_holds_a_whole_split_variable():
    partitioner = make_partitioner((1, 4, 2))
    state = partitioner.initialize_train_state(KEY)
    for variable, array in zip(partitioner.metadata.records(), jax.tree.leaves(state), strict=True):
        assert array.sharding.is_equivalent_to(jax.NamedSharding(partitioner.mesh, variable.spec), array.ndim)
        for shard in array.addressable_shards:
            assert shard.data.nbytes == variable.bytes_per_device(partitioner.mesh_shape())


@pytest.mark.full
def test_initial_values_do_not_depend_on_the_mesh():
    states = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        partitioner = make_partitioner(sizes)
        states.append(jax.jit(partitioner.metadata.slice)(partitioner.initialize_train_state(KEY)))
    jax.tree.map(np.testing.assert_array_equal, *[jax.tree.map(np.asarray, state) for state in states])


def test_the_state_is_donated_in_the_compiled_program():
    partitioner = make_partitioner((1, 4, 2))
    step = partitioner.partition(step_fns.train_step, batches.lm_input_specs(ROWS, LENGTH), is_eval=False)
    compiled = step.lower(KEY).compile()
    state_bytes = sum(v.bytes_per_device(partitioner.mesh_shape()) for v in partitioner.metadata.records())
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_v1_sharding_settings_split_the_weights_as_pax_documents_them():
    partitioner = make_partitioner((1, 4, 2))
    params = partitioner.metadata.partition_specs.mdl_vars[base_layer.PARAMS]["lm"]
    # The dimension of the stacked layers comes first, and is not split.
    layer = params["transformer"]["repeat"]["sub"]["x_layers_0"]
    assert layer["ff_layer"]["ffn_layer1"]["linear"]["w"] == P(None, "data", "mdl")  # w_df
    assert layer["ff_layer"]["ffn_layer2"]["linear"]["w"] == P(None, "mdl", "data")  # w_df, transposed
    assert layer["self_attention"]["post"]["w"] == P(None, "data", "mdl", None)  # w_dnh
    assert params["softmax"]["logits_ffn"]["linear"]["w"] == P("data", "mdl")


@pytest.mark.full
def test_optimizer_state_follows_its_variable():
    partitioner = make_partitioner((1, 4, 2))
    by_path = {variable.path: variable for variable in partitioner.metadata.records()}
    moments = [path for path in by_path if "/m/params/" in path or "/v/params/" in path]
    assert len(moments) == 2 * sum(path.startswith("mdl_vars/params/") for path in by_path)
    for path in moments:
        variable = by_path["mdl_vars/params/" + path.split("/params/")[1]]
        assert (by_path[path].spec, by_path[path].paddings) == (variable.spec, variable.paddings)


@pytest.mark.full
def test_evaluation_counts_the_rows_of_the_batch_without_padding():
    partitioner = make_partitioner((1, 4, 2))
    batch = make_batch()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    step = partitioner.partition(step_fns.eval_step, shapes, is_eval=True)
    state = partitioner.initialize_train_state(KEY).to_eval_state()
    _, output = step(state, KEY, partitioner.layout.put(batch))
    assert float(output.weighted_scalars["total_loss"][1]) == batch.weights.sum()
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(output.per_example_out) if leaf.ndim)


def test_a_missing_rank_names_input_shape_and_fix():
    task = make_task(inputs_split_mapping={"map_1d": (("replica", "data"),)})
    with pytest.raises(ValueError, match=r"map_2d") as error:
        make_partitioner((1, 4, 2), task)
    assert "inputs_split_mapping" in str(error.value)
    assert str((ROWS, LENGTH)) in str(error.value)


@pytest.mark.parametrize("order", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 0, 1, 0]])
def test_the_rows_that_each_process_added_are_removed_for_any_order_of_devices(monkeypatch, order):
    """2 processes have 5 rows and 4 devices each: 2 rows per device, of which each process added its last 3."""
    devices = np.array([types.SimpleNamespace(process_index=process) for process in order], dtype=object)
    layout = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices.reshape(2, 4), size=8))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    own = {process: iter([process * 10 + i for i in range(5)] + [-1] * 3) for process in (0, 1)}
    arrived = np.array([next(own[process]) for process in order for _ in range(2)])
    kept = Layout.without_added(layout, jax.numpy.asarray(arrived), jax.ShapeDtypeStruct((10,), int))
    assert sorted(kept.tolist()) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(("platform", "options"), [("cpu", {"xla_backend_optimization_level": 1}), ("gpu", None)])
def test_the_program_that_makes_the_state_is_compiled_with_little_effort_on_cpu_only(platform, options, monkeypatch):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
    partitioner = pjit.PjitPartitioner()
    partitioner.layout = types.SimpleNamespace(mesh=mesh, shardings=None)
    monkeypatch.setattr(jax, "jit", lambda fn, **keywords: keywords["compiler_options"])
    assert partitioner.init_fn() == options


@pytest.mark.full
def test_the_model_is_traced_once_for_the_layout_and_the_values_of_its_variables(monkeypatch):
    task, calls = make_task(), []
    compute_predictions = type(task.model).compute_predictions

    def counted(self, batch):
        calls.append(1)
        return compute_predictions(self, batch)

    monkeypatch.setattr(type(task.model), "compute_predictions", counted)
    partitioner = make_partitioner((1, 4, 2), task)
    partitioner.init_fn().trace(KEY)
    assert len(calls) == 1

"""ShardMapPartitioner: the same results as PjitPartitioner on one device, and exactly the documented collectives."""

import functools
import re

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from praxis import base_layer, layers

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.experiments.synthetic.shard_map import ShardMapFsdpUnrolledTiny
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.gathered_on_use import without_keeping_gathered
from spmd_trainer.step.shard_map import ShardMapPartitioner
from tests.models import model_helpers
from tests.models.model_helpers import Config
from tests.step.test_partitioning import KEY, LENGTH, make_batch, make_task

# One pytest worker, so that the shared fixtures are compiled once.
pytestmark = pytest.mark.xdist_group("shard_map")

ROWS = 16
NAMES = StdlibBytesTiny.MESH_AXIS_NAMES


def make_mesh(sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return sharding.create_device_mesh(list(zip(NAMES, sizes, strict=True)), devices=devices)


def set_up(partitioner, rows=ROWS, task=None):
    partitioner.setup(task or make_task(), batches.lm_input_specs(rows, LENGTH))
    return partitioner


def shard_map(*args, sizes=(1, 4, 2), rows=ROWS, task=None, **kwargs):
    return set_up(ShardMapPartitioner(*args, mesh=make_mesh(sizes), **kwargs), rows, task)


def fsdp(**kwargs):
    return shard_map("fsdp", min_weight_size=512, **kwargs)


def train(partitioner, rows=ROWS, steps=5, batch=None):
    batch = batch or make_batch(rows)
    step = partitioner.partition(step_fns.train_step, batches.lm_input_specs(rows, LENGTH), is_eval=False)
    state = partitioner.initialize_train_state(KEY)
    losses = []
    for _ in range(steps):
        inputs = partitioner.layout.put(batch)
        state, output = step(state, KEY, inputs)
        losses.append(float(output.loss))
    return jax.jit(partitioner.metadata.slice)(state), output, losses


@pytest.fixture(scope="module")
def on_one_device():
    return train(set_up(pjit.PjitPartitioner(make_mesh((1, 1, 1)))))


def assert_same_training(ours, reference):
    np.testing.assert_allclose(ours[2], reference[2], rtol=1e-5)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours[0].mdl_vars), jax.tree.leaves(reference[0].mdl_vars), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=jax.tree_util.keystr(path))
    for name, (value, weight) in reference[1].weighted_scalars.items():
        if name not in ("num_predictions", "aux_loss"):
            np.testing.assert_allclose(ours[1].weighted_scalars[name][0], value, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(ours[1].weighted_scalars[name][1], weight, rtol=1e-6, err_msg=name)
    jax.tree.map(np.testing.assert_allclose, ours[1].per_example_out.labels, reference[1].per_example_out.labels)


VARIANTS = {
    "dp": lambda: shard_map("dp"),
    "dp, 2 minibatches": lambda: shard_map("dp", num_minibatches=2),
    "fsdp": lambda: fsdp(),
    "fsdp over one axis of two": lambda: fsdp(sizes=(2, 4, 1), axis_name="data"),
    "fsdp, 2 minibatches": lambda: fsdp(num_minibatches=2),
    "fsdp, gathered in both minibatches": lambda: fsdp(num_minibatches=2, gather="layer"),
    "one device": lambda: fsdp(sizes=(1, 1, 1)),
}


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_five_steps_are_those_of_the_pjit_partitioner_on_one_device(variant, on_one_device):
    assert_same_training(train(VARIANTS[variant]()), on_one_device)


@pytest.mark.parametrize(
    "kwargs", [pytest.param({"sharding": "dp"}, marks=pytest.mark.full), {"sharding": "fsdp", "min_weight_size": 512}]
)
@pytest.mark.parametrize("rows", [6, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.full
def test_the_rows_of_an_uneven_batch_weigh_equally(kwargs, rows):
    ours = train(shard_map(**kwargs, rows=rows), rows, steps=2)
    assert_same_training(ours, train(set_up(pjit.PjitPartitioner(make_mesh((1, 1, 1))), rows), rows, steps=2))


@pytest.mark.full
def test_rows_of_unequal_weight_weigh_the_same_as_on_one_device(on_one_device):
    batch = make_batch(ROWS)
    batch.weights = batch.weights.copy()
    batch.weights[:3] = 0
    batch.weights[7, 2:] = 0
    reference = set_up(pjit.PjitPartitioner(make_mesh((1, 1, 1))))
    assert_same_training(train(fsdp(), batch=batch, steps=2), train(reference, batch=batch, steps=2))


@pytest.mark.full
@pytest.mark.parametrize("rows", [16, 6])
def test_evaluation_gives_the_numbers_of_one_device(rows):
    outputs = []
    for partitioner in (set_up(pjit.PjitPartitioner(make_mesh((1, 1, 1))), rows), fsdp(rows=rows)):
        step = partitioner.partition(step_fns.eval_step, batches.lm_input_specs(rows, LENGTH), is_eval=True)
        state = partitioner.initialize_train_state(KEY, with_opt_states=False)
        batch = partitioner.layout.put(make_batch(rows))
        outputs.append(step(state, KEY, batch)[1])
    reference, ours = outputs
    np.testing.assert_allclose(ours.loss, reference.loss, rtol=1e-5)
    np.testing.assert_allclose(
        ours.weighted_scalars["bits_per_byte"], reference.weighted_scalars["bits_per_byte"], rtol=1e-5
    )
    np.testing.assert_allclose(ours.per_example_out.scores, reference.per_example_out.scores, rtol=1e-4)


def task_with_dropout():
    task_p = StdlibBytesTiny().task()
    task_p.model.lm_tpl.stacked_transformer_tpl.block.dropout_prob = 0.5
    return tasks_lib.build_task(task_p)


@pytest.mark.full
@pytest.mark.parametrize("kwargs", [{"sharding": "dp"}, {"sharding": "dp", "num_minibatches": 2}, {"sharding": "fsdp"}])
def test_every_row_on_every_device_has_its_own_dropout_mask(kwargs):
    batch = jax.tree.map(lambda x: np.repeat(x[:1], ROWS, axis=0), make_batch(ROWS))
    _, output, _ = train(shard_map(**kwargs, task=task_with_dropout()), batch=batch, steps=1)
    assert len(set(np.asarray(output.per_example_out.scores).tolist())) == ROWS
    _, output, _ = train(shard_map(**kwargs), batch=batch, steps=1)
    np.testing.assert_allclose(output.per_example_out.scores, output.per_example_out.scores[0], rtol=1e-5)


class CountingLm(layers.LanguageModel):
    """Counts steps, rows, weighted tokens and positive activations, and keeps the largest id and whether there was any."""

    def setup(self):
        super().setup()
        for name in ("steps", "rows", "tokens", "positive", "largest", "seen"):
            dtype = jnp.bool_ if name == "seen" else jnp.int32
            hparams = base_layer.WeightHParams((), dtype=dtype, init=base_layer.WeightInit.Constant(0))
            self.create_variable(name, hparams, trainable=False)

    def compute_predictions(self, input_batch):
        predictions = super().compute_predictions(input_batch)
        counted = {
            "steps": 1,
            "rows": input_batch.ids.shape[0],
            "tokens": jnp.sum(input_batch.weights > 0),
            "positive": jnp.sum((predictions.logits[..., 0] > 0) & (input_batch.weights > 0)),
        }
        for name, value in counted.items():
            self.update_var(name, self.get_var(name) + value)
        self.update_var("largest", jnp.maximum(self.get_var("largest"), jnp.max(input_batch.ids)))
        self.update_var("seen", self.get_var("seen") | jnp.any(input_batch.ids > 0))
        return predictions


def counting_task():
    task_p = StdlibBytesTiny().task()
    fdl.update_callable(task_p.model, CountingLm)
    return tasks_lib.build_task(task_p)


def counters(partitioner, rows):
    batch = make_batch(rows)
    batch.weights = batch.weights.copy()
    batch.weights[0, 3:] = 0
    state, _, _ = train(partitioner, rows, steps=2, batch=batch)
    return {name: int(value) for name, value in state.mdl_vars[base_layer.NON_TRAINABLE].items() if np.ndim(value) == 0}


@pytest.fixture(scope="module")
def counters_on_one_device():
    def count(rows):
        return counters(set_up(pjit.PjitPartitioner(make_mesh((1, 1, 1))), rows, counting_task()), rows)

    return functools.cache(count)


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda **kwargs: shard_map("dp", **kwargs), 16),
        (lambda **kwargs: shard_map("dp", num_minibatches=2, **kwargs), 16),
        (lambda **kwargs: fsdp(**kwargs), 6),
        (
            lambda rows, task: set_up(pjit.PjitPartitioner(make_mesh((1, 4, 2)), num_minibatches=2), rows, task),
            16,
        ),
    ],
    ids=["dp", "dp, 2 minibatches", "fsdp, uneven rows", "pjit, 2 minibatches"],
)
def test_integers_that_the_model_writes_are_those_of_one_device(make, rows, counters_on_one_device):
    expected = counters_on_one_device(rows)
    assert expected["steps"] == 2
    assert expected["rows"] == 2 * rows
    assert expected["tokens"] == 2 * (rows * LENGTH - LENGTH + 3)
    assert 0 < expected["positive"] < expected["tokens"]
    assert counters(make(rows=rows, task=counting_task()), rows) == expected


# --- the compiled program ---------------------------------------------------------------------------------------------

COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
# Per layer: attention in (query, key and value in one) and out, feed-forward in and out.
SPLIT_PER_LAYER = 4


def collectives_of(partitioner, *, keep_barriers=False):
    """{kind: shapes of its results} of the compiled train step."""

    def step(*args):
        state, output = step_fns.train_step(*args)
        return state, output.loss

    partitioned = partitioner.partition(step, batches.lm_input_specs(ROWS, LENGTH), is_eval=False)
    lowered = partitioned.lower(KEY)
    # The CPU's compiler removes barriers before it merges equal values, and so would undo the second gather.
    compiled = lowered.compile({"xla_disable_hlo_passes": "cse_barrier_expander"} if keep_barriers else None)
    found: dict[str, list[str]] = {}
    for result, kind in COLLECTIVE.findall(compiled.as_text()):
        found.setdefault(kind, []).append(result)
    return found


def elements(result):
    sizes = re.findall(r"\w+\[([\d,]*)\]", result)
    return sum(int(np.prod([int(n) for n in size.split(",") if n] or [1])) for size in sizes)


@pytest.mark.full
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_data_parallel_has_one_all_reduce_however_many_minibatches(num_minibatches):
    partitioner = shard_map("dp", num_minibatches=num_minibatches)
    found = collectives_of(partitioner)
    assert found.keys() == {"all-reduce"}
    (only,) = found["all-reduce"]
    assert elements(only) >= partitioner.metadata.num_params()


def small_params(partitioner):
    params = jax.tree.leaves(partitioner.metadata.variables.mdl_vars[base_layer.PARAMS])
    return sum(int(np.prod(v.logical_shape)) for v in params if v.is_replicated)


def assert_only_small_ones_are_all_reduced(partitioner, found):
    # Their gradients and the metrics, and the scalars of the learner's norms.
    assert sum(elements(result) for result in found["all-reduce"]) < small_params(partitioner) + 100


@pytest.mark.full
def test_fsdp_gathers_each_parameter_of_a_repeated_layer_inside_its_loop_and_scatters_each_gradient_once():
    partitioner = fsdp()
    found = collectives_of(partitioner)
    # One loop body forward and one backward, and the embedding, which is also the softmax: one gather, two uses.
    assert len(found["all-gather"]) == 2 * SPLIT_PER_LAYER + 1
    assert len(found["reduce-scatter"]) == SPLIT_PER_LAYER + 2
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert_only_small_ones_are_all_reduced(partitioner, found)
    # No gathered array is larger than one layer's.
    layer = max(int(np.prod(v.logical_shape)) for v in stacked(partitioner)) // StdlibBytesTiny.NUM_LAYERS
    assert sorted(map(elements, found["all-gather"]))[-2] <= layer


def stacked(partitioner):
    return jax.tree.leaves(partitioner.metadata.variables.mdl_vars[base_layer.PARAMS]["lm"]["transformer"])


@pytest.mark.full
def test_fsdp_gathers_twice_in_a_model_that_rematerialises_nothing_itself():
    task = tasks_lib.build_task(ShardMapFsdpUnrolledTiny().task())
    partitioner = fsdp(task=task)
    found = collectives_of(partitioner, keep_barriers=True)
    layers = StdlibBytesTiny.NUM_LAYERS
    assert len(found["reduce-scatter"]) == SPLIT_PER_LAYER * layers + 2
    # Each is gathered again in the backward pass; the embedding's first use needs it in the forward pass only.
    assert len(found["all-gather"]) == 2 * (SPLIT_PER_LAYER * layers + 1)
    assert_only_small_ones_are_all_reduced(partitioner, found)


@pytest.mark.full
@pytest.mark.parametrize("num_minibatches", [2])
def test_fsdp_with_minibatches_gathers_and_scatters_once_per_step(num_minibatches):
    partitioner = fsdp(num_minibatches=num_minibatches)
    found = collectives_of(partitioner)
    assert len(found["all-gather"]) == len(found["reduce-scatter"]) == SPLIT_PER_LAYER + 1
    assert_only_small_ones_are_all_reduced(partitioner, found)


def test_a_model_that_rematerialises_keeps_its_own_policy():
    def in_blocks(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x))

    def plain(x):
        return jnp.sum(jnp.sin(jnp.sin(x)))

    def primitives(fn):
        return [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(jnp.ones(3)).eqns]

    assert primitives(without_keeping_gathered(in_blocks)) == primitives(in_blocks)
    assert primitives(without_keeping_gathered(plain)) == primitives(jax.checkpoint(plain))


# --- settings and layout ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_report_says_why_parameters_are_split_or_whole():
    partitioner = fsdp(sizes=(1, 8, 1), axis_name="data")
    by_path = {v.path.removeprefix("mdl_vars/params/"): v for v in partitioner.metadata.records()}
    linear = by_path["lm/softmax/logits_ffn/linear/w"]
    assert "fsdp: dimension" in linear.reason
    small = by_path["lm/final_ln/scale"]
    assert small.is_replicated
    assert "min_weight_size" in small.reason
    moments = [v for v in partitioner.metadata.records() if "/m/" in v.path and v.path.endswith("logits_ffn/linear/w")]
    assert [v.spec for v in moments] == [linear.spec]


@pytest.mark.full
def test_no_device_holds_a_whole_split_parameter_or_its_moments():
    partitioner = fsdp()
    state = partitioner.initialize_train_state(KEY)
    for variable, array in zip(partitioner.metadata.records(), jax.tree.leaves(state), strict=True):
        count = 1 if variable.is_replicated else 8
        assert all(shard.data.nbytes * count == array.nbytes for shard in array.addressable_shards), variable.path


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sharding": "ddp"}, "'dp' or 'fsdp'"),
        ({"gather": "never", "sharding": "fsdp"}, "'layer', 'step' or None"),
        ({"sharding": "dp", "axis_name": "data"}, "settings of sharding='fsdp'"),
        ({"num_minibatches": 0}, "at least 1"),
    ],
)
def test_settings_that_do_not_exist_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ShardMapPartitioner(**kwargs)


@pytest.mark.full
def test_an_axis_that_the_mesh_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"axis_name 'model': .*'replica', 'data', 'mdl'"):
        shard_map("fsdp", axis_name="model")


@pytest.mark.full
def test_minibatches_that_do_not_divide_the_rows_are_refused():
    partitioner = shard_map("dp", num_minibatches=3)
    with pytest.raises(ValueError, match=r"num_minibatches=3 doesn't divide the 2 rows"):
        train(partitioner, steps=1)


@pytest.mark.parametrize("added_up_in", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("mode", "gather", "dtype"),
    [
        *((*how, dtype) for how in [("dp", None), ("fsdp", "step")] for dtype in (jnp.float32, jnp.bfloat16)),
        ("fsdp", "layer", jnp.float32),
    ],
)
def test_gradients_are_added_up_over_devices_in_float32(mode, gather, dtype, added_up_in):
    """The devices' sums, 256 and 7 ones, are bfloat16 numbers. Added up in it they are 256, not 263."""
    inputs = {"x": np.repeat(np.float32([128.0, *[0.5] * 7]), 16).reshape(16, 8)}
    model_p = Config(
        models.FunctionModel,
        init=lambda key: {"w": jnp.zeros(8, dtype)},
        apply=lambda params, x: x * params["w"],
        loss=lambda outputs, batch: {"loss": (jnp.mean(jnp.sum(outputs, -1)), jnp.asarray(len(outputs), jnp.float32))},
    )
    built = model_helpers.task(model_p, optimizer=optax.sgd(16.0), strategy=None)
    built.train.gradient_accumulation_dtype = added_up_in
    kwargs = {} if mode == "dp" else {"min_weight_size": 1, "gather": gather}
    partitioner = ShardMapPartitioner(mode, devices=jax.devices()[:8], num_minibatches=2, **kwargs)
    partitioner.setup(built, model_helpers.shapes_of(inputs))
    step = partitioner.partition(step_fns.train_step, model_helpers.shapes_of(inputs), is_eval=False)
    state, _ = step(partitioner.initialize_train_state(KEY), KEY, partitioner.layout.put(inputs))
    # With 'layer', devices come first: 131.5 for each minibatch, which bfloat16 rounds to 132.
    total = 264.0 if (gather, added_up_in) == ("layer", "bfloat16") else jnp.asarray(263.0, dtype)
    np.testing.assert_array_equal(np.asarray(state.mdl_vars["params"]["w"], np.float32), -np.float32(total))

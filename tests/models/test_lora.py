"""LoRA and DoRA adapters on models of every kind: what they compute, what learns, and how they are laid out."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import assert_names, raises_naming
from jax.sharding import PartitionSpec
from lora_helpers import KEY, init, lora_task, model_p, outputs, variables
from model_helpers import Config, batch, failing_steps, shapes_of, snapshots
from praxis import base_layer, optimizers, schedules

from spmd_trainer import models, tasks_lib
from spmd_trainer.decoder import lora
from spmd_trainer.errors import UserError
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step import state_layout, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.step.product_results import MatrixDims

KINDS = ["function", "linen", "nnx"]


def merged(task, mdl_vars):
    return jax.jit(task.lora_model.merged)(mdl_vars)


def close(ours, theirs):
    scale = np.abs(np.asarray(theirs)).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * max(1, scale))


def same_as_merged(task, mdl_vars, inputs=None):
    """Returns the outputs, after comparing them with those of the base with merged weights."""
    model = task.model_for_steps
    ours = outputs(task, model, mdl_vars, inputs)[0]["outputs"]
    close(ours, outputs(task, model.base, merged(task, mdl_vars), inputs)[0]["outputs"])
    return ours


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", [pytest.param("function", marks=pytest.mark.full), "linen", "nnx"])
@pytest.mark.full
def test_adapters_and_merged_weights_give_the_same_outputs(kind, dora):
    task = lora_task(model_p(kind), targets=["(w|kernel)$"], dora=dora, rslora=True)
    mdl_vars = variables(task)
    ours = same_as_merged(task, mdl_vars)
    alone = outputs(task, task.model_for_steps.base, lora.base_only(mdl_vars))[0]["outputs"]
    assert np.abs(ours - alone).max() > 0.1
    assert not task.model_for_steps._warned


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[:2]), "nnx"])
def test_before_training_the_outputs_are_those_of_the_base(kind, dora):
    task = lora_task(model_p(kind), dora=dora)
    partitioner = snapshots(task, (1, 1), steps=1)[1]
    mdl_vars = partitioner.initialize_train_state(KEY).mdl_vars
    alone = outputs(task, task.model_for_steps.base, lora.base_only(mdl_vars))
    close(outputs(task, task.model_for_steps, mdl_vars)[0]["outputs"], alone[0]["outputs"])


def trace(task):
    """Initialises the variables without computing them: the dimensions of the targets follow."""
    jax.eval_shape(state_layout.variables_initialiser(task, shapes_of(batch())), KEY)


def test_the_dimensions_of_the_targets_follow_from_their_products():
    dims = {}
    for kind in KINDS:
        task = lora_task(model_p(kind), targets=["(w|kernel)$"])
        trace(task)
        dims |= task.lora_model.matrix_dims()
    assert dims == {
        "params/up/w": MatrixDims((), (0,), (1,)),
        "params/stack/w": MatrixDims((0,), (1,), (2,)),
        "params/down/w": MatrixDims((), (0,), (1,)),
        "params/heads/kernel": MatrixDims((), (0,), (1, 2)),
        "params/join/kernel": MatrixDims((), (0, 1), (2,)),
        "params/layers/dense/kernel": MatrixDims((0,), (1,), (2,)),
        "params/down/kernel": MatrixDims((), (0,), (1,)),
        "params/first/kernel": MatrixDims((), (0,), (1,)),
        "params/layers/kernel": MatrixDims((0,), (1,), (2,)),
    }


def test_all_linear_leaves_the_output_layer_out():
    found = {}
    for kind in KINDS:
        task = lora_task(model_p(kind), targets="all-linear")
        trace(task)
        found[kind] = sorted(task.lora_model.matrix_dims())
    assert found == {
        "function": ["params/stack/w", "params/up/w"],
        "linen": ["params/heads/kernel", "params/join/kernel", "params/layers/dense/kernel"],
        "nnx": ["params/first/kernel", "params/layers/kernel"],  # the first kernel is the output layer too
    }


def dense_task(apply, params, **settings):
    model = Config(models.FunctionModel, init=lambda key: params, apply=apply)
    return lora_task(model, targets=["w$"], **settings)


def gradients(task, mdl_vars, inputs):
    hparams = base_layer.unbox_meta(task.model_for_steps.init_variables(KEY, inputs))
    run = functools.partial(step_fns.gradients, LogicalLayout(task, hparams))
    return jax.jit(lambda v, x: run(mdl_vars=v, prng_key=KEY, inputs=x)[::2])(mdl_vars, inputs)


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full
def test_gradients_equal_a_hand_written_formula(dora):
    params = {"one": {"w": jax.random.normal(KEY, (8, 5))}, "two": {"w": jax.random.normal(KEY, (5, 8))}}
    task = dense_task(lambda p, x: jnp.tanh(x @ p["one"]["w"]) @ p["two"]["w"], params, dora=dora, alpha=5.0, rank=2)
    mdl_vars = variables(task)

    def weight(own, w):
        full = w + 5.0 / 2 * own["a"] @ own["b"]
        if not dora:
            return full
        return own["magnitude"] * full / jax.lax.stop_gradient(jnp.sqrt(jnp.sum(full**2, axis=0)))

    def by_hand(adapters, x, y):
        one, two = (weight(adapters[name]["w"], params[name]["w"]) for name in ("one", "two"))
        return jnp.mean((jnp.tanh(x @ one) @ two - y) ** 2)

    inputs = batch()
    output, grads = gradients(task, mdl_vars, inputs)
    loss, expected = jax.value_and_grad(by_hand)(mdl_vars["params"]["lora"], inputs["x"], inputs["y"])
    np.testing.assert_allclose(output.loss, loss, rtol=1e-6)
    assert jax.tree.structure(grads["params"]["lora"]) == jax.tree.structure(expected)
    jax.tree.map(close, grads["params"]["lora"], expected)
    assert len(jax.tree.leaves(grads)) == (6 if dora else 4)


def test_the_compiled_step_is_that_of_hand_written_adapters():
    """As many operations and as much memory, for a scanned stack of rematerialised layers."""

    def by_hand(adapters, params, inputs):
        @jax.checkpoint
        def layer(h, own):
            w, a, b = own
            return jnp.tanh(h @ w + 2.0 * (h @ a) @ b), None

        h, _ = jax.lax.scan(layer, jnp.tile(inputs["x"], (1, 8)), (params["w"], adapters["a"], adapters["b"]))
        return jnp.mean(jnp.mean((h @ params["out"] - inputs["y"]) ** 2, axis=-1))

    def apply(params, x):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jax.lax.scan(layer, jnp.tile(x, (1, 8)), params["w"])[0] @ params["out"]

    params = {"w": jax.random.normal(KEY, (4, 64, 64)) / 8, "out": jax.random.normal(KEY, (64, 8))}
    model = Config(models.FunctionModel, init=lambda key: params, apply=apply)
    task = lora_task(model, targets=["/w$"], rank=4, alpha=8.0)
    inputs = jax.tree.map(jnp.asarray, batch())
    mdl_vars = variables(task, inputs)

    def ours(adapters, params, inputs):
        own = {"params": {**params, "lora": {"w": adapters}}}
        return task.model_for_steps.forward(own, inputs, KEY, do_eval=False, mutable=())[0][0]["loss"][0]

    adapters = mdl_vars["params"]["lora"]["w"]
    steps = [jax.jit(jax.value_and_grad(loss)).lower(adapters, params, inputs).compile() for loss in (ours, by_hand)]
    assert steps[0].cost_analysis()["flops"] == steps[1].cost_analysis()["flops"]
    assert steps[0].memory_analysis().temp_size_in_bytes == steps[1].memory_analysis().temp_size_in_bytes
    jax.tree.map(close, *[step(adapters, params, inputs) for step in steps])


@pytest.mark.parametrize(
    "learner", [{}, pytest.param({"keep_optimizer_state_for_excluded_vars": True}, marks=pytest.mark.full)], ids=str
)
@pytest.mark.full
def test_the_base_does_not_change_and_has_no_optimizer_state(learner):
    task = lora_task(model_p("nnx"), learner=learner, targets="all-linear")
    states, partitioner = snapshots(task, (4, 2))
    records = partitioner.metadata.records()
    base = [v.path for v in records if v.path.startswith("mdl_vars") and not lora.is_adapter(v.path)]
    assert any("norm/mean" in path for path in base)  # batch statistics, which the forward pass would write
    for path in base:
        assert states[-1].variables[path].tobytes() == states[0].variables[path].tobytes(), path
    of_states = {v.path for v in records if v.path.startswith("opt_states") and v.logical_shape}
    assert of_states
    assert all("params/lora/" in path for path in of_states)
    for path in (v.path for v in records if lora.is_adapter(v.path)):
        assert (states[-1].variables[path] != states[0].variables[path]).any(), path
    assert partitioner.metadata.num_params() == sum(
        np.prod(v.logical_shape) for v in records if lora.is_adapter(v.path)
    )


@pytest.mark.full
def test_there_are_no_moving_averages_of_the_base():
    optimizer = Config(optimizers.Adam, learning_rate=0.1, lr_schedule=Config(schedules.Constant), ema_decay=0.9)
    task = lora_task(model_p("nnx"), optimizer=optimizer)
    states, partitioner = snapshots(task, (1, 1), steps=2)
    averages = {v.path for v in partitioner.metadata.records() if "/ema/" in v.path}
    assert averages
    assert all("params/lora/" in path for path in averages)
    state = jax.tree.map(lambda v: states[-1].variables[v.path], partitioner.metadata.variables)
    found = tasks_lib.extract_ema(state).mdl_vars
    np.testing.assert_array_equal(found["params"]["first"]["kernel"], state.mdl_vars["params"]["first"]["kernel"])
    own = [tree["params"]["lora"]["first"]["kernel"]["b"] for tree in (found, state.mdl_vars)]
    assert (own[0] != own[1]).any()


@pytest.mark.parametrize("sizes", [pytest.param((4, 2), marks=pytest.mark.full), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"dropout": 0.3, "rank_axis": ("data", "mdl")}, pytest.param({"dora": True}, marks=pytest.mark.full)],
    ids=str,
)
@pytest.mark.full
def test_any_mesh_gives_the_numbers_of_one_device(settings, sizes):
    strategy = [("w$", 'fsdp(axis="data", min_size_to_shard_mb=0, allow_uneven=True)')]
    assert not failing_steps(lora_task(model_p("function"), strategy=strategy, **settings), sizes)


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", [pytest.param("function", marks=pytest.mark.full), "linen"])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(("dp",), marks=pytest.mark.full),
        ("fsdp", "layer"),
        pytest.param(("fsdp", "step"), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.full
def test_collectives_written_out(kind, fields, dora):
    settings = {"min_weight_size": 1, "gather": fields[1]} if len(fields) > 1 else {}
    task = lora_task(model_p(kind), strategy=None, dora=dora)
    assert not failing_steps(task, make=functools.partial(ShardMapPartitioner, fields[0], **settings))
    assert not task.model_for_steps._warned


@pytest.mark.full
def test_a_model_that_splits_its_activations():
    def split(params, x):
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["up"]["w"]), PartitionSpec("data", "mdl"))
        return x @ params["down"]["w"]

    task = lora_task(model_p("function", apply=split))
    states, _ = snapshots(task, (4, 2))
    assert states[3].loss < states[1].loss
    assert list(task.lora_model.matrix_dims()) == ["params/up/w"]


def test_stacked_weights_are_gathered_in_their_loop():
    task = lora_task(model_p("linen"), strategy=None)
    partitioner = ShardMapPartitioner("fsdp", min_weight_size=1)
    partitioner.setup(task, shapes_of(batch()))
    spec = partitioner.metadata.variables.mdl_vars["params"]["layers"]["dense"]["kernel"].spec
    assert spec[0] is None
    assert any(spec)
    step = partitioner.partition(step_fns.train_step, shapes_of(batch()), is_eval=False)
    jaxpr = step.trace(KEY).jaxpr
    gathered = [eqn.outvars[0].aval.shape for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "all_gather"]
    # A layer's kernel of 6 x 6, with padding. All three layers' kernels would have one more dimension.
    assert {(6, 8), (8, 6)} & set(gathered)
    assert not {(3, 6, 8), (3, 8, 6)} & set(gathered)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def records_of(task):
    partitioner = PjitPartitioner()
    partitioner.setup(task, shapes_of(batch()))
    return {v.path: v for v in partitioner.metadata.records()}


def test_adapters_are_split_like_their_weight():
    """8 x 6 on (4, 2): a rank of 3 is padded where mdl splits it."""
    specs = {"up/w": PartitionSpec("data", "mdl"), "stack/w": PartitionSpec(None, "data", None)}
    strategy = [(name, lambda spec, mesh, path, leaf, own=own: own) for name, own in specs.items()]
    # Declared for every variable that no rule splits; a rule that names an adapter has nothing to say about it.
    strategy.append(("params/lora", 'fsdp(axis="data", min_size_to_shard_mb=0, allow_uneven=True)'))
    task = lora_task(model_p("function"), strategy=strategy, rank_axis="mdl", dora=True, targets=["(up|stack)/w"])
    records = records_of(task)

    def layout(path):
        record = records[f"mdl_vars/params/lora/{path}"]
        return tuple(record.spec), record.padded_shape, record.reason

    up, stack = "follows params/up/w", "follows params/stack/w"
    split, whole = "; rank split over 'mdl'", "; rank whole: other dimensions use 'mdl'"
    assert layout("up/w/a") == (("data", "mdl"), (8, 4), up + split)
    assert layout("up/w/b") == ((None, "mdl"), (3, 6), up + whole)
    assert layout("up/w/magnitude") == (("mdl",), (6,), up)
    assert layout("stack/w/a") == ((None, "data", "mdl"), (2, 8, 4), stack + split)
    assert layout("stack/w/b") == ((None, "mdl", None), (2, 4, 6), stack + split)
    assert layout("stack/w/magnitude") == ((), (2, 6), stack)
    moments = {v.path: v for v in records.values() if "opt_states" in v.path and v.path.endswith("stack/w/a")}
    assert moments
    assert all(tuple(v.spec) == (None, "data", "mdl") for v in moments.values())
    settings = {"rank_axis": ("data", "mdl"), "dora": True, "targets": ["(up|stack)/w"]}
    task = lora_task(model_p("function"), strategy=strategy, **settings)
    records = records_of(task)
    assert layout("up/w/a") == (("data", "mdl"), (8, 4), up + split)
    assert layout("up/w/b") == (("data", "mdl"), (4, 6), up + "; rank split over 'data'")
    assert layout("stack/w/b")[:2] == ((None, ("data", "mdl"), None), (2, 8, 6))


def test_a_mask_of_dropout_differs_by_layer_and_step():
    def apply(params, x):
        return jax.lax.scan(lambda x, w: (x, x @ w), x, params["w"])[1].swapaxes(0, 1)

    model = Config(models.FunctionModel, init=lambda key: {"w": jnp.zeros((3, 8, 8))}, apply=apply)
    model.loss = lambda outputs, batch: (jnp.mean(outputs), jnp.ones(()))
    task = lora_task(model, targets=["w$"], rank=8, alpha=8.0, dropout=0.25)
    mdl_vars = variables(task)
    eye = jnp.broadcast_to(jnp.eye(8), (3, 8, 8))
    mdl_vars["params"]["lora"]["w"] = {"a": eye, "b": eye}
    ones = {"x": np.ones((64, 8), np.float32), "y": np.ones((64, 8), np.float32)}
    first, second = (
        outputs(task, task.model_for_steps, mdl_vars, ones, do_eval=False, key=jax.random.key(i))[0]["outputs"]
        for i in range(2)
    )
    values = [first[:, 0], first[:, 1], first[:, 2], second[:, 0]]
    for mask in values:
        assert set(np.unique(mask).tolist()) == {0.0, np.float32(1 / 0.75).item()}
        assert 0.15 < np.mean(mask == 0) < 0.35
    assert len({mask.tobytes() for mask in map(np.asarray, values)}) == 4
    evaluated = outputs(task, task.model_for_steps, mdl_vars, ones)[0]["outputs"]
    np.testing.assert_array_equal(evaluated, 1)


@pytest.mark.full
def test_rows_with_adapters_of_their_own():
    def generate(params, batch, key):
        return {"found": jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["one"]["w"]), batch["x"])}

    settings = {"dora": True, "rank": 2}
    params = {"one": {"w": jax.random.normal(KEY, (8, 8)) / 3}}
    kinds = [("poet", "lawyer"), None]
    several, single = (
        lora_task(
            Config(
                models.FunctionModel, init=lambda key: params, apply=lambda p, x: x @ p["one"]["w"], generate=generate
            ),
            targets=["w$"],
            adapters=names,
            **settings,
        )
        for names in kinds
    )
    inputs = {**batch(), "adapter": np.array([0, 1, -1, 1] * 4, np.int32)}
    mdl_vars = variables(several, inputs)
    variables(single)

    def found(task, mdl_vars, way):
        model = task.model_for_steps
        if way == "decode":
            return jax.jit(lambda v: model.decode(v, inputs, KEY, mutable=())[0][1]["found"])(mdl_vars)
        return outputs(task, model, mdl_vars, inputs)[0]["outputs"]

    for way in ("decode", "forward"):
        together = found(several, mdl_vars, way)
        for index in range(2):
            own = jax.tree.map(lambda x, i=index: x[i], mdl_vars["params"]["lora"])
            alone = found(single, {"params": {**mdl_vars["params"], "lora": own}}, way)
            rows = inputs["adapter"] == index
            close(together[rows], alone[rows])
        base = single.model_for_steps.base
        plain = (
            base.decode(lora.base_only(mdl_vars), inputs, KEY, mutable=())[0][1]["found"]
            if way == "decode"
            else inputs["x"] @ params["one"]["w"]
        )
        close(together[inputs["adapter"] == -1], plain[inputs["adapter"] == -1])
    with pytest.raises(UserError, match="no entry 'adapter'"):
        outputs(several, several.model_for_steps, mdl_vars)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        # The batch has 8 rows of 8 numbers, so the shapes alone don't tell.
        (
            lambda p, x: (x.T[:, :, None] @ p["w"][:1]).swapaxes(0, 1),
            r"with an array of shape \(8, 8, 1\), and of \(8, 16, 1\) for twice",
        ),
        (lambda p, x: (p["w"].T @ x.T).T, "params/w in an operation that needs the weight and its adapters merged"),
    ],
    ids=["behind", "transposed"],
)
def test_rows_that_are_not_in_dimension_0(apply, message):
    model = Config(models.FunctionModel, init=lambda key: {"w": jnp.eye(8)}, apply=apply)
    model.loss = lambda outputs, batch: (jnp.mean(outputs), jnp.ones(()))
    task = lora_task(model, targets=["w$"], adapters=("poet",))
    inputs = {**batch(rows=8), "adapter": np.zeros(8, np.int32)}
    mdl_vars = variables(task, inputs)
    with pytest.raises(UserError, match=message):
        outputs(task, task.model_for_steps, mdl_vars, inputs)


def joined(params, x):
    """Reads weights through casts, slices, reshapes, transpositions and stacks."""
    w = params["fused"]["w"]  # [8, 2 * 6]
    up, gate = jnp.split(w.astype(jnp.float32), 2, axis=1)
    h = jnp.tanh(x @ up) * (gate.T @ x.T).T
    heads = params["heads"]["w"].reshape(6, 2, 3)  # [6, 6]
    h = jnp.einsum("bd,dnh->bnh", h, heads)
    h = jnp.einsum("bnh,nhd->bnd", h, params["batched"]["w"])
    layers = params["layers"]["w"]  # [2, 8, 8]
    h = jnp.concatenate([h.reshape(h.shape[0], -1), x[:, :2]], axis=1)
    for i in range(2):
        h = jnp.tanh(h @ layers[i])
    return h @ jnp.squeeze(params["last"]["w"], 1)


def joined_params(key):
    sizes = {"fused": (8, 12), "heads": (6, 6), "batched": (2, 3, 3), "layers": (2, 8, 8), "last": (8, 1, 8)}
    return {name: {"w": 0.5 * jax.random.normal(key, shape)} for name, shape in sizes.items()}


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.full
def test_weights_are_followed_through_reshapes_and_slices(dora):
    model = Config(models.FunctionModel, init=joined_params, apply=joined)
    task = lora_task(model, targets=["w$"], dora=dora)
    same_as_merged(task, variables(task))
    dims = task.lora_model.matrix_dims()
    assert dims["params/batched/w"] == MatrixDims((0,), (1,), (2,))
    assert dims["params/layers/w"] == MatrixDims((0,), (1,), (2,))
    assert dims["params/last/w"] == MatrixDims((1,), (0,), (2,))
    assert not task.model_for_steps._warned


def test_an_operation_that_can_not_be_followed_gets_the_merged_weight(caplog):
    def apply(params, x):
        return x @ params["w"] + jnp.sum(params["w"] ** 2)

    task = lora_task(Config(models.FunctionModel, init=lambda key: {"w": jnp.eye(8)}, apply=apply), targets=["w$"])
    with caplog.at_level(logging.WARNING):
        same_as_merged(task, variables(task))
        same_as_merged(task, variables(task))
    (told,) = [r.getMessage() for r in caplog.records if "params/w" in r.getMessage()]
    assert_names(told, "params/w", "integer_pow")


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "read",
    [lambda w: jnp.sum(jnp.ravel(w) ** 2), lambda w: jnp.sum(w[None] * 2), lambda w: w.reshape(4, 16)[0, :8]],
    ids=["flattened", "with another dimension", "joined"],
)
def test_a_target_that_the_model_also_reads_in_another_form(read, dora):
    def apply(params, x):
        return x @ params["w"] + read(params["w"])

    model = Config(models.FunctionModel, init=lambda key: {"w": jax.random.normal(key, (8, 8))}, apply=apply)
    task = lora_task(model, targets=["w$"], dora=dora)
    same_as_merged(task, variables(task))


@pytest.mark.full
def test_bfloat16_base_with_float32_adapters():
    def low(key):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(key))

    task = lora_task(model_p("function", init=low, fprop_dtype=jnp.bfloat16), optimizer=optax.adam(0.01))
    states, partitioner = snapshots(task, (4, 2))
    dtypes = {
        (lora.is_adapter(v.path), v.dtype.name) for v in partitioner.metadata.records() if v.path.startswith("mdl_vars")
    }
    assert dtypes == {(False, "bfloat16"), (True, "float32")}
    assert states[3].loss < states[1].loss


def apply_gather(params, x):
    ids = (x[:, 0] > 0).astype(jnp.int32)
    return params["embedding"][ids] @ params["proj"]["w"] * params["norm"]["scale"]


def gather_params(key):
    return {"embedding": jnp.ones((2, 8)), "proj": {"w": jnp.eye(8)}, "norm": {"scale": jnp.ones(8)}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["proj/v$"]}, "'proj/v\\$' matches no variable; nearest .*: params/proj/w"),
        (
            {"targets": ["embedding"]},
            "uses params/embedding in gather.*nearest variables that can have adapters: params/proj/w",
        ),
        ({"targets": ["scale"]}, "uses params/norm/scale in .*mul|broadcast_in_dim"),
        ({"targets": "proj/w"}, r"give a list of regexes, e.g. \['proj/w'\], or 'all-linear'"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["("]}, "'\\(' is not a valid regex"),
        ({"rank": 0}, "rank is 0; it must be an integer of at least 1"),
        ({"alpha": -1}, "alpha is -1; it must be a positive number"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and less than 1"),
        ({"dropout": "0.1"}, "dropout is '0.1'; it must be at least 0 and less than 1"),
        ({"dtype": jnp.int32}, "must be a dtype of floats"),
        ({"adapters": ["x", "x"]}, "give a list of different names"),
        ({"adapters": "poet"}, "adapters is 'poet'; give a list of different names"),
        ({"adapters": ["../poet"]}, "give a list of different names of letters"),
    ],
    ids=str,
)
def test_wrong_settings(settings, message):
    with pytest.raises(UserError, match=message):
        variables(lora_task(Config(models.FunctionModel, init=gather_params, apply=apply_gather), **settings))


def test_a_base_with_variables_of_that_name():
    model = Config(models.FunctionModel, init=lambda key: {"lora": jnp.eye(8)}, apply=lambda p, x: x @ p["lora"])
    with pytest.raises(UserError, match="has variables below 'params/lora'"):
        variables(lora_task(model))


def test_a_wrong_rank_axis():
    with raises_naming(ValueError, "rank_axis", "'model'", "mean mdl"):
        snapshots(lora_task(model_p("function"), rank_axis="model"), (4, 2), steps=1)
    with raises_naming(ValueError, "ShardMapPartitioner", "one dimension"):
        snapshots(lora_task(model_p("function"), rank_axis="mdl"), (4, 2), steps=1, make=ShardMapPartitioner)


def test_a_task_without_adapters_has_no_dimensions():
    task_p = Config(tasks_lib.SingleTask, name="t", model=model_p("function", loss=lambda outputs, batch: None))
    task_p.train.learner.loss_name = "loss"
    task_p.train.learner.optimizer = optax.sgd(0.1)
    with raises_naming(UserError, "task.lora", "not set"):
        tasks_lib.build_task(task_p).lora_model.matrix_dims()


@pytest.mark.full
def test_prepare_takes_the_norms_of_the_loaded_base():
    task = lora_task(model_p("function"), dora=True)
    mdl_vars = variables(task)
    own = jax.jit(task.model_for_steps.prepare)(mdl_vars)["params"]["lora"]["stack"]["w"]
    np.testing.assert_allclose(own["magnitude"], jnp.linalg.norm(mdl_vars["params"]["stack"]["w"], axis=1), rtol=1e-6)
    np.testing.assert_array_equal(own["a"], mdl_vars["params"]["lora"]["stack"]["w"]["a"])


def test_paths_of_adapters():
    assert lora.is_adapter("mdl_vars/params/lora/lm/w/a")
    assert lora.is_adapter("params/lora/lm/w/a")
    assert not lora.is_adapter("mdl_vars/params/lm/lora/w")
    assert not lora.is_adapter("opt_states/0/m/params/lora/lm/w/a")

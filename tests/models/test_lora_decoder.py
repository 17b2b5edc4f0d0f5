"""Adapters on a language model: a tiny Llama of stacked, rematerialised layers, trained and decoded on meshes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import base_layer, layers, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.decoder import lora
from spmd_trainer.sharding.jaxprs import scan_sizes
from spmd_trainer.step import masks, matrix_uses, state_layout, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.training import experiment_config, verify

KEY = jax.random.key(1)
# No size of the model is 5, the rank.
RANK = 5
LAYER = "params/lm/layers/sub/layer_0"
EVERY_LINEAR = ["attention/.*/w", "mlp/.*/w", "logits/w"]


def built(*, experiment="lm.llama.TinyLlama", policy=None, generation=(), **settings):
    """The task of a tiny model with adapters, and three batches."""
    resolved = experiment_config.resolve(experiment)
    model_p = resolved.task_p.model
    if policy is not None:
        model_p.lm_tpl.checkpoint_policy = policy
    for name, value in dict(generation).items():
        setattr(model_p.generation, name, value)
    settings = {"targets": EVERY_LINEAR, "rank": RANK, "alpha": 8.0, **settings}
    resolved.task_p.lora = pax_fiddle.Config(lora.Lora, **settings)
    source = pax_fiddle.build(resolved.config.train_datasets[0])
    return tasks_lib.build_task(resolved.task_p), [source.get_next_padded() for _ in range(3)]


def shapes_of(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


@functools.lru_cache(maxsize=4)
def ready(**settings):
    """A task, a batch, and variables with random numbers in all adapters."""
    task, batches = built(**settings)
    init = state_layout.variables_initialiser(task, shapes_of(batches[0]))
    hparams = state_layout.abstract_hparams(init)
    mdl_vars = base_layer.maybe_unbox_value(init(KEY))
    keys = itertools.count()

    def drawn(path, x):
        if not lora.is_adapter(path):
            return x
        return x + 0.2 * jax.random.normal(jax.random.key(next(keys)), x.shape, x.dtype)

    leaves = [drawn(path, x) for path, x in masks.with_paths(mdl_vars)]
    return task, batches[0], jax.tree.unflatten(jax.tree.structure(mdl_vars), leaves), hparams


def logits(task, model, mdl_vars, batch):
    """Logits of a model whose forward pass returns no logits: as the scores of every token as the label."""
    batch = jax.tree.map(jnp.asarray, batch)
    context = step_fns.model_context(task, do_eval=True)

    @jax.jit
    def scores(mdl_vars, labels):
        with base_layer.JaxContext.new_context(hparams=context):
            given = NestedMap({**batch, "labels": labels})
            (_, per_example, *_), _ = model.forward(mdl_vars, given, KEY, do_eval=True, mutable=())
        return per_example["scores"]

    return np.stack([scores(mdl_vars, jnp.full_like(batch["labels"], token)) for token in range(4)])


@pytest.mark.full
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_and_merged_weights_give_the_same_scores(dora):
    task, batch, mdl_vars, _ = ready(dora=dora)
    model = task.model_for_steps
    merged = jax.jit(task.lora_model.merged)(mdl_vars)
    assert jax.tree.structure(merged) == jax.tree.structure(lora.base_only(mdl_vars))
    ours = logits(task, model, mdl_vars, batch)
    # A score is the sum over a row of 12 tokens.
    np.testing.assert_allclose(ours, logits(task, model.base, merged, batch), rtol=1e-6)
    assert np.abs(ours - logits(task, model.base, lora.base_only(mdl_vars), batch)).max() > 0.1
    dims = task.lora_model.matrix_dims()
    assert dims[f"{LAYER}/attention/query/w"] == MatrixDims((0,), (1,), (2, 3))
    assert dims[f"{LAYER}/attention/output/w"] == MatrixDims((0,), (1, 2), (3,))
    assert dims["params/lm/logits/w"] == MatrixDims((), (0,), (1,))
    assert not model._warned


@pytest.mark.full
@pytest.mark.parametrize("dora", [False, True])
def test_each_expert_has_its_own_adapter(dora):
    task, batch, mdl_vars, _ = ready(experiment="lm.mistral.TinyMixtral", targets=("moe/(gate|up|down)/w",), dora=dora)
    model = task.model_for_steps
    dims = task.lora_model.matrix_dims()
    assert dims == {f"{LAYER}/moe/{name}/w": MatrixDims((0, 1), (2,), (3,)) for name in ("down", "gate", "up")}
    ours = logits(task, model, mdl_vars, batch)
    merged = jax.jit(task.lora_model.merged)(mdl_vars)
    np.testing.assert_allclose(ours, logits(task, model.base, merged, batch), rtol=1e-6)
    assert np.abs(ours - logits(task, model.base, lora.base_only(mdl_vars), batch)).max() > 0.1
    assert not model._warned


def test_a_token_reads_the_adapters_of_its_experts_only():
    task, batches = built(experiment="lm.mistral.TinyMixtral", targets=("moe/(gate|up|down)/w",), dora=True)
    partitioner = PjitPartitioner(
        sharding.create_device_mesh([(axis, 1) for axis in task.model.mesh_axis_names], devices=jax.devices()[:1])
    )
    partitioner.setup(task, shapes_of(batches[0]))
    moe = task.model.lm_tpl.spec.moe
    layout = partitioner.metadata
    share = moe.num_experts_per_token / moe.num_experts
    assert layout.num_params(per_token=True) == share * layout.num_params() > 0


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_each_row_has_its_own_adapters_of_the_experts(dora):
    settings = {"experiment": "lm.mistral.TinyMixtral", "targets": ("moe/(gate|up|down)/w",), "dora": dora}
    task, batch, mdl_vars, _ = ready(**settings)
    params, model = mdl_vars["params"], task.model_for_steps
    own = params["lora"]
    other = jax.tree.map(lambda x: -0.7 * x, own)
    several, _ = built(adapters=("x", "y"), **settings)
    chosen = np.arange(len(batch["ids"]), dtype=np.int32) % 3 - 1
    mixed = NestedMap({**batch, "adapter": chosen})
    state_layout.abstract_hparams(state_layout.variables_initialiser(several, shapes_of(mixed)))
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), own, other)
    found = logits(several, several.model_for_steps, {"params": {**params, "lora": both}}, mixed)
    alone = {
        0: logits(task, model, mdl_vars, batch),
        1: logits(task, model, {"params": {**params, "lora": other}}, batch),
        -1: logits(task, model.base, lora.base_only(mdl_vars), batch),
    }
    assert np.abs(alone[0] - alone[1]).max() > 0.1
    for row, index in enumerate(chosen):
        np.testing.assert_allclose(found[:, row], alone[index][:, row], rtol=1e-6)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def of_weights(jaxpr, weights):
    """The operations whose result has the size and the dimensions of a weight, in any order."""
    shapes = {
        tuple(sorted(w.shape[skip:])) for w in weights for skip in range(w.ndim - 1) if skip < 2 and w.ndim - skip > 1
    }
    found = set()
    for eqn in equations(jaxpr):
        for var in eqn.outvars:
            if tuple(sorted(getattr(var.aval, "shape", ()))) in shapes:
                found.add(eqn.primitive.name)
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.full
def test_the_step_forms_no_merged_weight_and_no_gradient_of_one(dora):
    task, batch, mdl_vars, hparams = ready(dora=dora)
    run = functools.partial(step_fns.gradients, LogicalLayout(task, hparams))
    step = jax.make_jaxpr(lambda v, batch: run(v, KEY, batch)[::2])(mdl_vars, jax.tree.map(jnp.asarray, batch))
    named = dict(masks.with_paths(mdl_vars))
    weights = {path: named[path] for path in task.lora_model.matrix_dims()}
    assert len(weights) == 8
    output = weights.pop("params/lm/logits/w")
    # All that may give an array of this size: moving and cutting the weights, and, for DoRA's norms, squares that are summed.
    allowed = {"scan", "jit", "remat2", "checkpoint", "slice", "squeeze", "convert_element_type", "sharding_constraint"}
    squares = {"square", "integer_pow", "mul", "stop_gradient"} if dora else set()
    assert of_weights(step.jaxpr, weights.values()) <= allowed | squares
    # The loss reads the output matrix transposed.
    assert of_weights(step.jaxpr, [output]) <= allowed | squares | {"transpose"}


def is_small_transpose(eqn):
    return eqn.primitive.name == "transpose" and RANK in eqn.outvars[0].aval.shape


@pytest.mark.full
def test_a_layer_adds_two_small_products_to_each_of_its_own():
    task, batch, mdl_vars, _ = ready()
    model = task.model_for_steps
    context = step_fns.model_context(task, do_eval=True)

    def products(model, mdl_vars):
        def run(mdl_vars, batch):
            with base_layer.JaxContext.new_context(hparams=context):
                return model.forward(mdl_vars, batch, KEY, do_eval=True, mutable=())[0][0]

        # The loss of an adapted output matrix is computed from logits; so it is of the base alone, to compare.
        jaxpr, _ = matrix_uses.traced(run, (mdl_vars, jax.tree.map(jnp.asarray, batch)))
        # An adapter may be transposed, a weight may not.
        names = [eqn.primitive.name for eqn in equations(jaxpr.jaxpr) if not is_small_transpose(eqn)]
        return {name: names.count(name) for name in ("dot_general", "transpose", "scan")}

    with_adapters, alone = products(model, mdl_vars), products(model.base, lora.base_only(mdl_vars))
    assert with_adapters["dot_general"] == alone["dot_general"] + 2 * 8
    assert with_adapters["transpose"] == alone["transpose"]
    assert with_adapters["scan"] == alone["scan"]


@pytest.mark.full
@pytest.mark.parametrize(
    "policy", [layers.AutodiffCheckpointType.SAVE_NOTHING, layers.AutodiffCheckpointType.SAVE_DOT_ONLY], ids=str
)
def test_the_policy_of_rematerialisation_keeps_no_more_than_without_adapters(policy):
    """The loop over layers returns, besides its outputs, what the backward pass needs of each layer."""
    sizes = {}
    for name in ("adapters", "base"):
        task, batches = built(policy=policy)
        batch = jax.tree.map(jnp.asarray, batches[0])
        if name == "base":
            task.lora = None
        init = state_layout.variables_initialiser(task, shapes_of(batch))
        hparams = state_layout.abstract_hparams(init)
        mdl_vars = jax.eval_shape(lambda key, init=init: base_layer.maybe_unbox_value(init(key)), KEY)
        run = functools.partial(step_fns.gradients, LogicalLayout(task, hparams))
        jaxpr = jax.make_jaxpr(lambda v, batch, run=run: run(v, KEY, batch)[::2])(mdl_vars, batch)
        forward = next(eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan")
        kept = forward.outvars[scan_sizes(forward.params)[1] :]
        sizes[name] = sum(var.aval.size for var in kept if var.aval.ndim > 2)
    assert 0 < sizes["adapters"] <= sizes["base"]


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [{"dropout": 0.2, "rank_axis": "mdl"}, {"dora": True, "rank_axis": "replica"}], ids=str
)
def test_any_mesh_gives_the_losses_of_one_device(settings):
    task, batches = built(**settings)
    names = task.model.mesh_axis_names

    def run(sizes, initial=None):
        partitioner = PjitPartitioner()
        axes = list(zip(names, sizes, strict=True))
        partitioner.use_mesh(sharding.create_device_mesh(axes, devices=jax.devices()[: int(np.prod(sizes))]))
        partitioner.setup(task, shapes_of(batches[0]))
        return list(verify.run_steps(partitioner, batches, KEY, initial)), partitioner

    one, partitioner = run((1, 1, 1))
    initial = jax.tree.map(lambda v: one[0].variables[v.path], partitioner.metadata.variables)
    assert one[-1].loss != one[1].loss
    for sizes in ((1, 2, 2), (2, 1, 3)):
        many, _ = run(sizes, initial)
        np.testing.assert_allclose([s.loss for s in many[1:]], [s.loss for s in one[1:]], rtol=1e-5)
        for path, x in one[0].variables.items():
            if path.startswith("mdl_vars/params/lm"):
                assert many[-1].variables[path].tobytes() == x.tobytes(), path


@pytest.mark.parametrize("sizes", [(1, 2, 2), pytest.param((2, 1, 3), marks=pytest.mark.full)])
def test_dropout_of_the_experts_adapters_is_the_same_on_any_mesh(sizes):
    """Its masks are those of tokens and their experts. The order of the sorted rows depends on the mesh."""
    experts = ("moe/(gate|up|down)/w",)
    task, batch, mdl_vars, _ = ready(experiment="lm.mistral.TinyMixtral", targets=experts, dropout=0.5)
    axes = zip(task.model.mesh_axis_names, sizes, strict=True)
    mesh = sharding.create_device_mesh(list(axes), devices=jax.devices()[: int(np.prod(sizes))])

    def losses(key):
        with base_layer.JaxContext.new_context(hparams=step_fns.model_context(task, do_eval=False)):
            found, _ = task.model_for_steps.forward(mdl_vars, batch, key, do_eval=False, mutable=())
        return found[1]["scores"]

    batch = jax.tree.map(jnp.asarray, batch)
    one, other = jax.jit(losses)(KEY), jax.jit(losses)(jax.random.key(2))
    assert np.abs(one - other).max() > 0.1
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(losses)(KEY), one, rtol=1e-5)


def decoded(task, model, mdl_vars, batch):
    context = step_fns.model_context(task, do_eval=True)

    @jax.jit
    def run(mdl_vars, batch):
        with base_layer.JaxContext.new_context(hparams=context):
            return model.decode(mdl_vars, batch, KEY, mutable=[base_layer.DECODE_CACHE])[0][1]

    found = run(mdl_vars, batch)
    return np.asarray(found.output_ids), np.asarray(found.logprobs)


def prompts(**more):
    ids = np.random.default_rng(0).integers(1, 61, (4, 5)).astype(np.int32)
    return NestedMap(ids=ids, prefix_lengths=np.array([5, 3, 4, 5], np.int32), **more)


GENERATION = (("max_tokens", 4), ("eos_ids", ()), ("temperature", 1.0), ("num_samples", 2))


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    # A decode step of latent attention multiplies by parts of the matrix that whole rows multiply by.
    [
        {},
        {"dora": True},
        {"experiment": "lm.deepseek.TinyDeepSeek", "targets": ("attention/.*/w",)},
        {"experiment": "lm.qwen_next.TinyQwenNext", "targets": ("attention/(query|value|gate|output)/w",)},
    ],
    ids=["lora", "dora", "latent", "linear"],
)
def test_decoding_with_adapters_and_with_merged_weights(settings):
    task, _, mdl_vars, _ = ready(generation=GENERATION, **settings)
    model = task.model_for_steps
    merged = jax.jit(task.lora_model.merged)(mdl_vars)
    ids, log_probs = decoded(task, model, mdl_vars, prompts())
    their_ids, their_log_probs = decoded(task, model.base, merged, prompts())
    np.testing.assert_array_equal(ids, their_ids)
    np.testing.assert_allclose(log_probs, their_log_probs, atol=1e-5)
    alone, _ = decoded(task, model.base, lora.base_only(mdl_vars), prompts())
    assert (ids != alone).any()
    assert bool(model._warned) == ("DeepSeek" in settings.get("experiment", ""))


@pytest.mark.full
def test_each_row_is_decoded_with_its_own_adapter():
    task, _, mdl_vars, _ = ready(generation=GENERATION)
    several, batches = built(generation=GENERATION, adapters=("poet", "lawyer"))
    batch = {**batches[0], "adapter": np.zeros(len(batches[0]["ids"]), np.int32)}
    state_layout.abstract_hparams(state_layout.variables_initialiser(several, shapes_of(NestedMap(batch))))
    other = jax.tree.map(lambda x: -0.7 * x, mdl_vars["params"]["lora"])
    params = mdl_vars["params"]
    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), params["lora"], other)
    ids, log_probs = decoded(
        several,
        several.model_for_steps,
        {"params": {**params, "lora": both}},
        prompts(adapter=np.array([1, 0, -1, 1], np.int32)),
    )
    model = task.model_for_steps
    alone = {
        1: decoded(task, model, {"params": {**params, "lora": other}}, prompts()),
        0: decoded(task, model, mdl_vars, prompts()),
        -1: decoded(task, model.base, {"params": {"lm": params["lm"]}}, prompts()),
    }
    for row, index in enumerate((1, 0, -1, 1)):
        np.testing.assert_array_equal(ids[row], alone[index][0][row])
        np.testing.assert_allclose(log_probs[row], alone[index][1][row], atol=1e-5)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(["self_attention/.*/w", "ffn_layer"], id="layers", marks=pytest.mark.full),
        pytest.param(["softmax/logits_ffn/linear/w"], id="vocabulary"),
    ],
)
@pytest.mark.full
def test_praxis_decoder_on_a_mesh_that_pads_its_vocabulary(targets):
    """Also where the adapters have the size of the vocabulary."""
    resolved = experiment_config.resolve("synthetic.structures.TinyLm")
    resolved.task_p.lora = pax_fiddle.Config(
        lora.Lora, targets=[f"{name}$" if "/w" in name else f"{name}.*/w$" for name in targets]
    )
    task = tasks_lib.build_task(resolved.task_p)
    source = pax_fiddle.build(resolved.config.train_datasets[0])
    batches = [source.get_next_padded() for _ in range(3)]

    def run(sizes, initial=None):
        axes = list(zip(task.model.mesh_axis_names, sizes, strict=True))
        mesh = sharding.create_device_mesh(axes, devices=jax.devices()[: int(np.prod(sizes))])
        partitioner = PjitPartitioner(mesh)
        partitioner.setup(task, shapes_of(batches[0]))
        return list(verify.run_steps(partitioner, batches, KEY, initial)), partitioner

    one, partitioner = run((1, 1, 1))
    many, _ = run((1, 1, 4), jax.tree.map(lambda v: one[0].variables[v.path], partitioner.metadata.variables))
    np.testing.assert_allclose([s.loss for s in many[1:]], [s.loss for s in one[1:]], rtol=1e-5)
    assert one[3].loss != one[1].loss
    assert not task.model_for_steps._warned

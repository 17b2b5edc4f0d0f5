"""A layer of experts gives the numbers of one that computes all experts for all tokens, for all forms of routing, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import small_spec
from praxis import base_layer
from praxis.pax_fiddle import Config

from spmd_trainer import sharding
from spmd_trainer.decoder import feed_forward
from spmd_trainer.models.decoder_spec import MoeSpec

AXES = ("replica", "data", "mdl")
# None: one device. Sizes are drawn so that most of these divide none of them.
MESHES = [None, (1, 2, 3), (2, 2, 2), (1, 4, 2), (1, 1, 8), (1, 8, 1), (1, 3, 2), (2, 1, 3)]
# How tokens choose in each of the random settings: any experts, few ones, or all the same ones.
WAYS = ("any", "few", "same", "any", "few")
FORMS = {
    "softmax": {},
    "softmax, not normalised": {"normalise_top_k": False},
    "sigmoid, biases of the choice, shared experts": {"score": "sigmoid", "choice_bias": True, "shared_dims": 3},
    "groups": {"score": "sigmoid", "choice_bias": True, "scaling_factor": 2.5, "shared_dims": 5, "num_groups": 3},
    "biases and a limit": {"biases": True, "swiglu_limit": 0.5},
}
OF_INPUTS = {"score": "sigmoid", "normalise_top_k": False, "shared_dims": 2, "weigh_inputs": True}
# The random settings of `make test-all`: each form on each mesh.
PAIRS = [(mesh, form) for mesh in MESHES for form in FORMS.values()] + [(mesh, OF_INPUTS) for mesh in MESHES]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A layer, its input's shape, and a mesh; and how the numbers of `sizes` are drawn."""

    moe: MoeSpec
    shape: tuple[int, int, int]
    mesh: tuple[int, ...] | None


def drawn(seed):
    rng = np.random.default_rng(seed)
    mesh, form = PAIRS[seed]
    groups = form.get("num_groups", 1)
    experts = int(rng.integers(2, 22)) * groups if groups > 1 else int(rng.integers(3, 65))
    chosen = int(rng.integers(1, groups + 1))
    top = int(rng.integers(1, min(8, experts // groups * chosen) + 1))
    moe = MoeSpec(experts, top, int(rng.integers(1, 20)), num_chosen_groups=chosen, **form)
    assert not moe.problems()
    shape = (int(rng.integers(1, 6)), int(rng.choice([1, 2, 7, 40])), int(rng.integers(2, 20)))
    return Drawn(moe, shape, mesh)


def arrays(layer, setting, way, seed):
    """Returns variables and an input. Of the experts that tokens prefer, the router's first row is large, and so is x there."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros(setting.shape), jnp.ones(setting.shape[:2], bool))
    kept = {name: shapes[name] for name in (base_layer.PARAMS, base_layer.NON_TRAINABLE) if name in shapes}
    leaves, structure = jax.tree.flatten(kept)
    variables = jax.tree.unflatten(structure, [(0.5 * rng.normal(size=x.shape)).astype(np.float32) for x in leaves])
    x = rng.normal(size=setting.shape).astype(np.float32)
    if way != "any":
        count, router = setting.moe.num_experts_per_token + (way == "few"), variables[base_layer.PARAMS]["router"]["w"]
        x[..., 0] = 1
        router *= 0.2
        router[0, rng.permutation(setting.moe.num_experts)[:count]] += 2
    return variables, x


def dense(moe, variables, x):
    """Computes every expert for every token."""
    params, exact = variables[base_layer.PARAMS], functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    logits = exact("btd,de->bte", x, params["router"]["w"])
    if moe.biases:
        logits += params["router"]["b"]
    scores = jax.nn.softmax(logits) if moe.score == "softmax" else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores)
    if moe.choice_bias:
        choice += variables[base_layer.NON_TRAINABLE]["router"]["choice_bias"]
    if moe.num_groups > 1:
        by_group = choice.reshape(*choice.shape[:2], moe.num_groups, -1)
        best = jnp.sum(jnp.sort(by_group)[..., -2:], axis=-1)
        choice = jnp.where(is_among_best(best, moe.num_chosen_groups)[..., None], by_group, -jnp.inf).reshape(
            choice.shape
        )
    weights = jnp.where(is_among_best(choice, moe.num_experts_per_token), scores, 0)
    if moe.normalise_top_k:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)

    def every(name, equation, y):
        y = exact(equation, y, params[name]["w"])
        return y + params[name]["b"] if moe.biases else y

    inputs, into = (x, "btd,edf->btef")
    if moe.weigh_inputs:
        inputs, into = weights[..., None] * x[:, :, None], "bted,edf->btef"
        weights = weights > 0
    gate, up = every("gate", into, inputs), every("up", into, inputs)
    if moe.swiglu_limit is None:
        hidden = jax.nn.silu(gate) * up
    else:
        gate, up = jnp.minimum(gate, moe.swiglu_limit), jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
        hidden = gate * jax.nn.sigmoid(moe.swiglu_alpha * gate) * (up + 1)
    output = exact("bted,bte->btd", every("down", "btef,efd->bted", hidden), moe.scaling_factor * weights)
    if moe.shared_dims:
        shared = {name: params["shared"][name]["w"] for name in ("gate", "up", "down")}
        output += exact("btf,fd->btd", jax.nn.silu(x @ shared["gate"]) * (x @ shared["up"]), shared["down"])
    return output


def is_among_best(scores, count):
    """True for the highest `count` scores of the last dimension; of equal ones, for the first."""
    return jnp.argsort(jnp.argsort(-scores, stable=True), stable=True) < count


def output_and_gradients(layer):
    """Returns a compiled function: variables and x -> the layer's output, and the gradients of the variables and of x."""

    def loss(params, others, x):
        output = layer({**others, base_layer.PARAMS: params}, x)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)), output

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))

    def run(variables, x):
        others = {name: tree for name, tree in variables.items() if name != base_layer.PARAMS}
        (_, output), gradients = compiled(variables[base_layer.PARAMS], others, x)
        return jax.tree.map(np.asarray, {"output": output, "gradients": gradients})

    return run


def check(setting, ways, seed):
    spec_p = small_spec(model_dims=setting.shape[2], moe=Config(MoeSpec, **vars(setting.moe)))
    fields = {} if setting.mesh is None else {"mesh_axis_names": list(AXES), "ici_mesh_shape": list(setting.mesh)}
    layer = base_layer.instantiate(Config(feed_forward.MixtureOfExperts, name="moe", spec=spec_p, **fields))

    def sparse(variables, x):
        return layer.apply(
            variables, x, jnp.ones(x.shape[:2], bool), mutable=[base_layer.AUX_LOSS, base_layer.SUMMARIES]
        )[0]

    sizes = setting.mesh or (1, 1, 1)
    mesh = sharding.create_device_mesh(
        list(zip(AXES, sizes, strict=True)), devices=jax.devices()[: int(np.prod(sizes))]
    )
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
        of_all = output_and_gradients(functools.partial(dense, setting.moe))
        of_chosen = output_and_gradients(sparse)
        for number, way in enumerate(ways):
            variables, x = arrays(layer, setting, way, 40 * number + seed)
            with jax.enable_x64(True):
                expected = of_all(*jax.tree.map(np.float64, (variables, x)))
            plain = of_all(variables, x)
            with jax.set_mesh(mesh):
                found = of_chosen(variables, x)
            leaves = map(jax.tree.leaves_with_path, (expected, plain, found))
            for (path, exact), (_, theirs), (_, ours) in zip(*leaves, strict=True):
                # 1e-6 of the array's largest element, or twice the dense form's own error where that is larger: how many numbers
                # a processor adds up at once decides either.
                error = np.abs(ours - exact).max()
                allowed = max(1e-6 * max(1.0, np.abs(exact).max()), 2 * np.abs(theirs - exact).max())
                assert error <= allowed, (setting, way, seed, jax.tree_util.keystr(path), error, allowed)


def test_the_settings_have_few_and_many_experts():
    settings = [drawn(seed) for seed in range(len(PAIRS))]
    assert len(PAIRS) * len(WAYS) >= 200
    sizes = [(setting.moe.num_experts, setting.moe.num_experts_per_token) for setting in settings]
    assert min(sizes)[0] <= 5
    assert max(sizes)[0] >= 60
    assert {top for _, top in sizes} == set(range(1, 9))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, len(PAIRS), 6))
def test_random_layers_give_the_numbers_of_dense_ones(first):
    for seed in range(first, first + 6):
        check(drawn(seed), WAYS, seed)

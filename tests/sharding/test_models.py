"""Linen, NNX and plain-dict models: sharded by rules, trained a step, the same numbers as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.sharding import infer_sharding, named_shardings, pad_uneven, plan_sharding, slice_uneven

WIDTH, VOCAB = 16, 51  # 51 divides by nothing here
STRATEGY = [
    ("embed", 'shard_dim(0, "mdl", allow_uneven=True)'),
    ("kernel", ["shard_dim(-1, 'mdl')", "fsdp('data', 0)"]),
    (".*", "fsdp('data', 0)"),
]


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(ids)
        return nn.Dense(8, name="out")(nn.relu(nn.Dense(WIDTH, name="hidden")(x))).mean()


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, ids):
        return self.out(nnx.relu(self.hidden(self.embed(ids)))).mean()


def linen_model():
    model = LinenModel()
    return model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"], lambda p, ids: model.apply(
        {"params": p}, ids
    )


def nnx_model():
    graph, params = nnx.split(NnxModel(nnx.Rngs(0)))
    return params, lambda p, ids: nnx.merge(graph, p)(ids)


def plain_model():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (VOCAB, WIDTH))},
        "hidden": {"kernel": jax.random.normal(keys[1], (WIDTH, WIDTH)), "bias": jnp.zeros(WIDTH)},
        "out": {"kernel": jax.random.normal(keys[2], (WIDTH, 8)), "bias": jnp.zeros(8)},
    }

    def apply(p, ids):
        x = p["embed"]["embedding"][ids]
        x = jax.nn.relu(x @ p["hidden"]["kernel"] + p["hidden"]["bias"])
        return (x @ p["out"]["kernel"] + p["out"]["bias"]).mean()

    return params, apply


@pytest.mark.parametrize("make", [linen_model, nnx_model, plain_model])
@pytest.mark.full
def test_a_step_on_the_mesh_equals_one_on_a_device(make, data_mesh):
    params, apply = make()
    optimizer = optax.adam(0.1)
    state = {"params": params, "opt": optimizer.init(params), "ema": jax.tree.map(jnp.copy, params)}
    ids = jnp.arange(64).reshape(8, 8) % VOCAB

    def step(state):
        grads = jax.grad(apply)(state["params"], ids)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], params)
        return {"params": params, "opt": opt, "ema": ema}

    plan = plan_sharding(state, STRATEGY, data_mesh)
    shardings = named_shardings(plan, data_mesh)
    placed = jax.device_put(pad_uneven(state, plan, plan, data_mesh), shardings)

    def padded_step(padded):
        return pad_uneven(step(slice_uneven(padded, plan, plan)), plan, plan, data_mesh)

    got = jax.jit(padded_step, in_shardings=(shardings,), out_shardings=shardings)(placed)
    jax.tree.map(lambda x, sharding: x.sharding == sharding or pytest.fail(f"{x.sharding}"), got, shardings)
    host = slice_uneven(jax.device_get(got), plan, plan)
    # Adam divides a gradient by its own size, which blows rounding up where the gradient is zero.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), host, jax.jit(step)(state))


@pytest.mark.parametrize("make", [linen_model, nnx_model, plain_model])
def test_optimizer_and_ema_follow_their_variable(make, data_mesh):
    params, _ = make()
    state = {"params": params, "opt": optax.adam(0.1).init(params), "ema": params}
    plan = {v.path: v for v in jax.tree.leaves(plan_sharding(state, STRATEGY, data_mesh))}
    for tree in ("params", "opt/0/mu", "opt/0/nu", "ema"):
        assert plan[f"{tree}/embed/embedding"].spec == P("mdl", None)
        assert plan[f"{tree}/embed/embedding"].padded_shape == (52, WIDTH)
        assert plan[f"{tree}/hidden/kernel"].spec == P("data", "mdl")
        assert plan[f"{tree}/out/bias"].spec == P("data")
    assert plan["opt/0/count"].reason.startswith("replicated: a scalar")


def test_nnx_keeps_its_structure(data_mesh):
    state = nnx.state(NnxModel(nnx.Rngs(0)))
    shardings = infer_sharding(state, STRATEGY, data_mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert shardings["hidden"]["kernel"].get_value() == NamedSharding(data_mesh, P("data", "mdl"))


def test_linen_boxes_and_abstract_state(data_mesh):
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    abstract = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((1, 16)))
    shardings = infer_sharding(abstract, [("kernel$", "shard_dim(0, 'data')")], data_mesh)
    assert shardings["params"]["kernel"].value.spec == P("data", None)

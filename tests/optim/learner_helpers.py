"""What the tests of learners share: a small model, builders, and training by a learner and by plain optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_trainer import learners

# isort: split
from praxis import base_layer, optimizers, pax_fiddle, py_utils, schedules

NestedMap = py_utils.NestedMap
Config = pax_fiddle.Config


def hparams(shape: tuple[int, ...], mapping: Any = None, *, stack: int = 0, **kwargs: Any) -> base_layer.WeightHParams:
    p = base_layer.WeightHParams(shape, dtype=jnp.float32, tensor_split_dims_mapping=mapping, **kwargs)
    if stack:
        p.repeat_prefix, p.repeat_prefix_split_dims_mapping = [stack], [-1]
    return p


def model(*, stacked: bool = False) -> tuple[NestedMap, NestedMap]:
    """A small model: its variables, seeded, and their WeightHParams."""
    params = NestedMap(
        emb=hparams((6, 4), ("mdl", None)),
        head=NestedMap(w=hparams((4, 6), (None, "mdl")), b=hparams((6,))),
    )
    if stacked:
        params.layers = NestedMap(w=hparams((4, 4), ("data", "mdl"), stack=3), scale=hparams((4,), stack=3))
    var_hparams = NestedMap(params=params)
    return random_like(var_hparams, 0), var_hparams


def random_like(var_hparams: Any, seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (
            jnp.asarray(scale * rng.normal(size=tuple(p.full_shape)), jnp.float32)
            if isinstance(p, base_layer.WeightHParams)
            else jnp.asarray(scale * rng.normal(size=p.shape), jnp.float32)
        ),
        var_hparams,
    )


def praxis(cls: Any, learning_rate: float = 0.1, **kwargs: Any) -> Any:
    return Config(cls, learning_rate=learning_rate, lr_schedule=Config(schedules.Constant), **kwargs)


def sgd(learning_rate: float = 0.1, **kwargs: Any) -> Any:
    return praxis(optimizers.ShardedSgd, learning_rate, **kwargs)


def build(optimizer: Any, cls: Any = learners.Learner, **kwargs: Any) -> Any:
    return pax_fiddle.build(Config(cls, name="learner", loss_name="loss", optimizer=optimizer, **kwargs))


def two_groups(optimizer: Any, auxiliary: Any, regex: str = ".*/head", **kwargs: Any) -> Any:
    return build(
        optimizer,
        learners.MultiOptimizerLearner,
        auxiliary_optimizers=[auxiliary],
        auxiliary_regex=[regex],
        auxiliary_names=["head"],
        **kwargs,
    )


def train(learner: Any, mdl_vars: Any, var_hparams: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """Takes a step per gradient and returns variables and optimizer state."""
    state = learner.get_grad_tx(var_hparams).init(mdl_vars)
    step = jax.jit(lambda v, s, g: one_step(learner, v, s, g, var_hparams))
    for grads in gradients:
        mdl_vars, state = step(mdl_vars, state, grads)
    return mdl_vars, state


def one_step(learner: Any, mdl_vars: Any, state: Any, grads: Any, var_hparams: Any) -> tuple[Any, Any]:
    updates, state = learner.update_states(grads, state, mdl_vars, var_hparams)
    return learner.apply_gradient(mdl_vars, updates, var_hparams), state


def train_optax(tx: Any, mdl_vars: Any, gradients: list[Any]) -> Any:
    state = tx.init(mdl_vars)
    for grads in gradients:
        updates, state = tx.update(grads, state, mdl_vars)
        mdl_vars = optax.apply_updates(mdl_vars, updates)
    return mdl_vars


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), actual, expected)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def state_specs(learner: Any, var_hparams: Any) -> Any:
    """The learner's specs without the one MaskedState around each group of repeated layers."""
    is_masked = lambda x: isinstance(x, optax.MaskedState)  # noqa: E731
    specs = learner.get_grad_tx(var_hparams).init_partition_spec(var_hparams)
    outermost = jax.tree.leaves(specs, is_leaf=is_masked)
    assert outermost
    assert all(map(is_masked, outermost))
    return jax.tree.map(lambda x: x.inner_state, specs, is_leaf=is_masked)

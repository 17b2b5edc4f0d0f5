"""What is a matrix, a stack, a router: read from programs whose variables have names that say nothing."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer

from spmd_trainer.step import matrix_dims

D, E, F, N, H = 6, 3, 5, 3, 2
X = jnp.ones((2, 4, D))


def chosen(forward, shapes, heads="joined", rules=()):
    """What each variable of a forward pass, variables -> loss, is."""
    hparams = {"params": {name: base_layer.WeightHParams(shape, dtype=jnp.float32) for name, shape in shapes.items()}}
    known = matrix_dims.with_uses(hparams, lambda mdl_vars: forward(**mdl_vars["params"]))
    optimizer = types.SimpleNamespace(
        rules=rules,
        heads=heads,
        choices=lambda hparams: matrix_dims.choose(hparams, rules, heads, "Muon"),
        notes=lambda choices: "",
    )
    matrix_dims.log_choices(optimizer, known)
    return {path.removeprefix("params/"): choice for path, choice in optimizer.choices(known).items()}


def dims(choice):
    return None if choice.matrix is None else dataclasses.astuple(choice.matrix.dims)


def at_once(x, weights, b, c):
    return jnp.einsum("btef,efd,bte->btd", jnp.tanh(jnp.einsum("btd,edf->btef", x, b)), c, weights)


def then_weighed(x, weights, b, c):
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, b))
    return jnp.sum(jnp.einsum("btef,efd->bted", hidden, c) * weights[..., None], axis=2)


def weighed_before(x, weights, b, c):
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, b)) * weights[..., None]
    return jnp.einsum("btef,efd->btd", hidden, c)


def of_softmax(logits):
    return jax.nn.softmax(logits + 1.0)


def of_highest(logits):
    """Sigmoids of the two highest, put into a row of zeros."""
    values, where = jax.lax.top_k(jax.nn.sigmoid(logits), 2)
    rows = jnp.arange(2)[:, None, None], jnp.arange(4)[None, :, None]
    return jnp.zeros_like(logits).at[(*rows, where)].set(values)


def of_one_hot(logits):
    values, where = jax.lax.top_k(logits, 2)
    return jnp.einsum("btke,btk->bte", jax.nn.one_hot(where, E), jax.nn.softmax(values))


def at_least_the_second(logits):
    return jnp.where(logits >= jnp.sort(logits)[..., -2:-1], jnp.exp(logits), 0.0)


@pytest.mark.parametrize("combined", [at_once, then_weighed, weighed_before])
@pytest.mark.parametrize("weights_of", [of_softmax, of_highest, of_one_hot, at_least_the_second])
def test_routers_and_experts_of_any_name(caplog, weights_of, combined):
    """Each token goes through all experts, whose results are combined by weights that a matrix gives."""

    def forward(a, b, c, d):
        x = X + combined(X, weights_of(X @ a), b, c)
        return jnp.sum(jnp.square(x @ d))

    found = chosen(forward, {"a": (D, E), "b": (E, D, F), "c": (E, F, D), "d": (D, D)})
    assert "router" in found["a"].reason
    assert {name: dims(found[name]) for name in "abc"} == {"a": None, "b": ((0,), (1,), (2,)), "c": ((0,), (1,), (2,))}
    assert "output" in found["d"].reason
    assert not any(record.levelname == "WARNING" for record in caplog.records)


def gated(x, a, b, c):
    return (jax.nn.sigmoid(x @ a) * (x @ b)) @ c


def test_the_gate_of_a_feed_forward_layer_is_no_router(caplog):
    def forward(a, b, c, d):
        x = jax.nn.standardize(X + gated(X, a, b, c))
        return jnp.sum(jnp.square(x @ d))

    found = chosen(forward, {"a": (D, F), "b": (D, F), "c": (F, D), "d": (D, D)})
    assert [dims(found[name]) for name in "abc"] == [((), (0,), (1,))] * 3
    assert not any(record.levelname == "WARNING" for record in caplog.records)


def test_a_softmax_over_another_dimension_makes_no_router():
    def forward(a, b, d):
        weights = jax.nn.softmax(X @ a, axis=1)  # over time, as attention with linear cost has it
        x = jnp.einsum("btf,btd->bfd", weights, X @ b)
        return jnp.sum(jnp.square(x @ d))

    found = chosen(forward, {"a": (D, F), "b": (D, D), "d": (D, D)})
    assert [dims(found[name]) for name in "ab"] == [((), (0,), (1,))] * 2


@pytest.mark.parametrize("pooled", [jax.lax.add, jax.lax.max])
def test_matrices_are_found_beside_pooling(pooled):
    def forward(a, b, d):
        rows = jax.nn.relu(X @ a)
        rows = jax.lax.reduce_window(rows, 0.0, pooled, (1, 2, 1), (1, 2, 1), "VALID")
        return jnp.sum(jnp.square(jnp.tanh(rows @ b) @ d))

    found = chosen(forward, {"a": (D, F), "b": (F, D), "d": (D, D)})
    assert [dims(found[name]) for name in "ab"] == [((), (0,), (1,))] * 2


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("combined", "joined"), [(at_once, "params/c: dims 0+1"), (then_weighed, "params/b: dims 0+2")]
)
def test_a_sigmoid_that_weighs_vectors_is_a_doubt_and_a_rule_ends_it(caplog, combined, joined):
    """All experts count, each by a sigmoid: as an attention's gate of each head does."""

    def forward(a, b, c, d):
        x = X + combined(X, jax.nn.sigmoid(X @ a), b, c)
        return jnp.sum(jnp.square(x @ d))

    shapes = {"a": (D, E), "b": (E, D, F), "c": (E, F, D), "d": (D, D)}
    assert dims(chosen(forward, shapes)["a"]) == ((), (0,), (1,))
    (text,) = warnings(caplog)
    for fact in ("params/a: a sigmoid", "'adam'", "params/b: dims 0+2", joined, "'stack,rows,cols'"):
        assert fact in text
    caplog.clear()
    chosen(forward, shapes, rules=[("/a$", "adam"), ("/[bc]$", "stack,rows,cols")])
    assert not warnings(caplog)


def test_joined_dimensions_that_nothing_explains_are_a_doubt(caplog):
    def forward(b, c, d):
        x = X + jnp.einsum("btef,efd->btd", jnp.tanh(jnp.einsum("btd,edf->btef", X, b)), c)
        return jnp.sum(jnp.square(x @ d))

    found = chosen(forward, {"b": (E, D, F), "c": (E, F, D), "d": (D, D)})
    assert [dims(found[name]) for name in "bc"] == [((), (1,), (0, 2)), ((), (0, 1), (2,))]
    (text,) = warnings(caplog)
    for fact in ("params/b: dims 0+2", "params/c: dims 0+1", "('params/b', 'stack,rows,cols')"):
        assert fact in text


def attention(q, k, v):
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)


def of_heads(q, k, v, o, d):
    x = X + jnp.einsum("btnh,nhd->btd", attention(*(jnp.einsum("btd,dnh->btnh", X, w) for w in (q, k, v))), o)
    return jnp.sum(jnp.square(x @ d))


def of_fused_heads(q, k, v, o, d):
    x = X + attention(*((X @ w).reshape(2, 4, N, H) for w in (q, k, v))).reshape(2, 4, N * H) @ o
    return jnp.sum(jnp.square(x @ d))


@pytest.mark.parametrize(
    ("equation", "shape", "expected"),
    [
        ("btd,kdnh->kbtnh", (3, D, N, H), ((0,), (1,), (2, 3))),
        ("btd,dknh->kbtnh", (D, 3, N, H), ((1,), (0,), (2, 3))),
    ],
)
def test_queries_keys_and_values_of_one_product_are_a_stack(caplog, equation, shape, expected):
    def forward(w, o, d):
        q, k, v = checkpoint_name(jnp.einsum(equation, X, w), "qkv")
        x = X + jnp.einsum("btnh,nhd->btd", attention(q, k, v), o)
        return jnp.sum(jnp.square(x @ d))

    assert dims(chosen(forward, {"w": shape, "o": (N, H, D), "d": (D, D)})["w"]) == expected
    assert not warnings(caplog)


def test_heads_are_known_where_they_have_a_dimension(caplog):
    shapes = {**dict.fromkeys("qkv", (D, N, H)), "o": (N, H, D), "d": (D, D)}
    assert dims(chosen(of_heads, shapes)["q"]) == ((), (0,), (1, 2))
    assert dims(chosen(of_heads, shapes, "apart")["o"]) == ((0,), (1,), (2,))
    assert not warnings(caplog)


@pytest.mark.parametrize("kv", [1, 2])
def test_heads_of_grouped_queries_are_known(caplog, kv):
    def forward(q, k, v, o, d):
        first, second = jnp.split(jnp.einsum("btd,dnh->btnh", X, q), 2, axis=-1)  # as rotary positions do
        queries = jnp.concatenate([first - second, first + second], axis=-1).reshape(2, 4, kv, 4 // kv, H)
        keys, values = (jnp.einsum("btd,dnh->btnh", X, w) for w in (k, v))
        logits = jnp.einsum("btngh,bsnh->bngts", queries, keys)
        context = jnp.einsum("bngts,bsnh->btngh", jax.nn.softmax(logits), values).reshape(2, 4, 4, H)
        x = X + jnp.einsum("btnh,nhd->btd", context, o)
        return jnp.sum(jnp.square(x @ d))

    shapes = {"q": (D, 4, H), "k": (D, kv, H), "v": (D, kv, H), "o": (4, H, D), "d": (D, D)}
    assert dims(chosen(forward, shapes)["o"]) == ((), (0, 1), (2,))
    assert not warnings(caplog)


def test_heads_apart_that_share_a_dimension_with_their_columns_stay_joined_and_it_says_so(caplog):
    shapes = {**dict.fromkeys("qkv", (D, N * H)), "o": (N * H, D), "d": (D, D)}
    chosen(of_fused_heads, shapes)
    assert not warnings(caplog)
    found = chosen(of_fused_heads, shapes, "apart")
    assert [dims(found[name]) for name in "qkvo"] == [((), (0,), (1,))] * 4
    (text,) = warnings(caplog)
    assert "heads='apart'" in text
    assert "params/k, params/o, params/q, params/v" in text
    assert "params/d" not in text


def test_the_table_of_the_same_variables_is_logged_once(monkeypatch):
    logged = []
    monkeypatch.setattr(matrix_dims.logging, "info", lambda text, *values: logged.append(values))
    for width in (17, 17, 18):
        chosen(lambda a, b: jnp.sum(X @ a @ b), {"a": (D, width), "b": (width, D)}, rules=[("", "rows,cols")])
    assert [f"x {width} " in text for (_, text), width in zip(logged, (17, 18), strict=True)] == [True, True]

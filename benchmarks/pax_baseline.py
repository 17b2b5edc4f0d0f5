"""The step of a Pax experiment (`lm.cloud.LmCloudSpmd`), hand-written in plain JAX with explicit shardings and donation.

It has the experiment's variables, loss, gradients, optimizer and metrics. `Choices` says what the experiment chooses, and a lean
program would not; each choice can be dropped. `pax_layers` measures it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from praxis.py_utils import NestedMap

ROWS = ("replica", "data")
# Settings of `lm.cloud.LmCloudSpmd`.
ATTENTION_CAP, LOGIT_CAP, CLIP, WEIGHT_DECAY, RATE, WARMUP, BETA1, BETA2 = 50.0, 30.0, 5.0, 1e-3, 1e-3, 4000, 0.9, 0.99
TIMESCALE = 10_000.0
SOFTPLUS_OF_0 = 1.442695041  # its inverse: praxis' learnt scale of queries begins at 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch; `dtype` is that of the computation."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    rows: int
    dtype: Any


HOST = Sizes(layers=2, width=128, hidden=512, heads=4, vocab=256, seq=128, rows=16, dtype=jnp.float32)
CHIPS = Sizes(layers=2, width=2048, hidden=8192, heads=16, vocab=32000, seq=1024, rows=32, dtype=jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the experiment chooses, and a lean program would not. The breakdown drops them in this order.

    Attributes:
      recomputation: layers save only their inputs for the backward pass.
      loop: one layer's program runs in a loop over stacked weights.
      split_activations: activations between layers are also split over mdl (TRAINING_OPTIMIZED_SHARDING).
      caps: logits of attention and of the softmax are limited by a tanh.
      packing: a token sees those of its segment only.
      query_scale: queries have a learnt scale.
      one_hot_lookup: embeddings are looked up by a product with one-hot ids.
      layer_metrics: mean, deviation and largest value of each layer's input.
      norms: norms of all variables and updates, besides the gradients'.
      update_limits: Adam's update of each variable of each layer is limited to a mean square of 1.
      weight_decay: Adam with decoupled weight decay.
      skipping: a step whose gradients are not finite changes nothing.
    """

    recomputation: bool = True
    loop: bool = True
    split_activations: bool = True
    caps: bool = True
    packing: bool = True
    query_scale: bool = True
    one_hot_lookup: bool = True
    layer_metrics: bool = True
    norms: bool = True
    update_limits: bool = True
    weight_decay: bool = True
    skipping: bool = True


def batch(sizes: Sizes) -> NestedMap:
    """Returns random tokens in the form of a text input."""
    ids = np.random.default_rng(0).integers(0, sizes.vocab, (sizes.rows, sizes.seq), dtype=np.int32)
    ones = np.ones_like(ids)
    weights = ones.astype(np.float32)
    positions = np.broadcast_to(np.arange(sizes.seq, dtype=np.int32), ids.shape).copy()
    labels = np.roll(ids, -1, axis=1)
    return NestedMap(
        ids=ids, labels=labels, weights=weights, paddings=1 - weights, segment_ids=ones, segment_pos=positions
    )


SPECS = {
    "embedding": P("data", "mdl"),
    "logit_bias": P("mdl"),
    "norm": P(),
    "norm_bias": P(),
    "layers": {
        "norm1": P(),
        "norm1_bias": P(),
        "norm2": P(),
        "norm2_bias": P(),
        "query_scale": P(),
        "qkv": P(None, None, "data", "mdl", None),
        "out": P(None, "data", "mdl", None),
        "w1": P(None, "data", "mdl"),
        "b1": P(None, "mdl"),
        "w2": P(None, "mdl", "data"),
        "b2": P(None, "mdl"),
    },
}


def parameters(mdl_vars: Any) -> Any:
    """Returns the trainer's variables (or anything in their structure) in the hand-written program's structure."""
    lm = mdl_vars["params"]["lm"]
    layer, softmax = lm["transformer"]["repeat"]["sub"]["x_layers_0"], lm["softmax"]["logits_ffn"]
    mlp, attention = layer["ff_layer"], layer["self_attention"]
    return {
        "embedding": softmax["linear"]["w"],
        "logit_bias": softmax["bias"]["b"],
        "norm": lm["final_ln"]["scale"],
        "norm_bias": lm["final_ln"]["bias"],
        "layers": {
            "norm1": layer["layer_norm"]["scale"],
            "norm1_bias": layer["layer_norm"]["bias"],
            "norm2": mlp["layer_norm"]["scale"],
            "norm2_bias": mlp["layer_norm"]["bias"],
            "query_scale": attention["per_dim_scale"]["per_dim_scale"],
            "qkv": attention["combined_qkv"]["w"],
            "out": attention["post"]["w"],
            "w1": mlp["ffn_layer1"]["linear"]["w"],
            "b1": mlp["ffn_layer1"]["bias"]["b"],
            "w2": mlp["ffn_layer2"]["linear"]["w"],
            "b2": mlp["ffn_layer2"]["bias"]["b"],
        },
    }


def split(x: jax.Array, *axes: Any) -> jax.Array:
    """Constrains the sharding of `x`: the batch, and then one entry per dimension."""
    return jax.lax.with_sharding_constraint(x, P(ROWS, *axes))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalises the last dimension."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + bias


def capped(x: jax.Array, cap: float, applies: bool) -> jax.Array:
    """Limits `x` to plus or minus `cap` by a tanh."""
    return cap * jnp.tanh(x / cap) if applies else x


def embed(choices: Choices, sizes: Sizes, embedding: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the embeddings of tokens and positions [rows, seq, width]."""
    if choices.one_hot_lookup:
        x = jax.nn.one_hot(rows["ids"], sizes.vocab, dtype=sizes.dtype) @ embedding.T
    else:
        x = jax.lax.with_sharding_constraint(embedding.T, P("mdl", None))[rows["ids"]]
    half = sizes.width // 2
    angles = rows["segment_pos"][..., None] * TIMESCALE ** -(jnp.arange(half) / (half - 1))
    positions = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(sizes.dtype)
    return x * sizes.width**0.5 + positions


def layer(
    choices: Choices, sizes: Sizes, seen: jax.Array, live: jax.Array, x: jax.Array, w: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Runs a layer on x [rows, seq, width]; also returns the metrics of its input."""
    axis = "mdl" if choices.split_activations else None
    metrics = None
    if choices.layer_metrics:
        wide = x.astype(jnp.float32)
        mean = (wide * live).mean()
        metrics = jnp.stack([mean, jnp.sqrt(jnp.square((wide - mean) * live).mean()), jnp.abs(wide * live).max()])
    y = layer_norm(x, w["norm1"], w["norm1_bias"])
    q, k, v = (split(z, None, "mdl", None) for z in jnp.einsum("btd,cdnh->cbtnh", y, w["qkv"]))
    scale = (sizes.width // sizes.heads) ** -0.5
    q = q * (SOFTPLUS_OF_0 * scale * jax.nn.softplus(w["query_scale"]) if choices.query_scale else scale)
    logits = capped(jnp.einsum("btnh,bsnh->bnts", q, k), ATTENTION_CAP, choices.caps)
    weights = jax.nn.softmax(jnp.where(seen, logits.astype(jnp.float32), -1e30)).astype(x.dtype)
    heads = split(jnp.einsum("bnts,bsnh->btnh", weights, v), None, "mdl", None)
    x = x + split(jnp.einsum("btnh,dnh->btd", heads, w["out"]), None, axis)
    hidden = layer_norm(x, w["norm2"], w["norm2_bias"]) @ w["w1"] + w["b1"]
    hidden = jax.nn.gelu(split(hidden, None, "mdl")) * live
    return split(x + split(hidden @ w["w2"] + w["b2"], None, axis) * live, None, axis), metrics


def loss_fn(choices: Choices, sizes: Sizes, params: Any, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Returns the weighted mean cross-entropy in nats, metrics, and the log-probability of each row."""
    axis = "mdl" if choices.split_activations else None
    params = jax.tree.map(lambda x: x.astype(sizes.dtype), params)
    x = split(embed(choices, sizes, params["embedding"], rows), None, axis)
    index, segments = jnp.arange(sizes.seq), rows["segment_ids"]
    seen = (index[:, None] >= index)[None, None]
    if choices.packing:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    live = (1 - rows["paddings"][..., None]).astype(sizes.dtype)
    body: Callable[..., Any] = functools.partial(layer, choices, sizes, seen, live)
    if choices.recomputation:
        body = jax.checkpoint(body, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
    x, layer_metrics = jax.lax.scan(body, x, params["layers"], unroll=1 if choices.loop else sizes.layers)
    logits = layer_norm(x, params["norm"], params["norm_bias"]) @ params["embedding"] + params["logit_bias"]
    logits = capped(split(logits, None, "mdl"), LOGIT_CAP, choices.caps).astype(jnp.float32)
    token = jnp.arange(sizes.vocab)
    nats = jax.nn.logsumexp(logits, -1) - jnp.where(token == rows["labels"][..., None], logits, 0).sum(-1)
    weights = rows["weights"]
    count = weights.sum()
    hits = (jnp.argmax(logits, -1) == rows["labels"]) * weights
    metrics = {"accuracy": hits.sum() / count, "tokens": live.sum(), "layers": layer_metrics}
    return (nats * weights).sum() / (count + 1e-6), (metrics, -(nats * weights).sum(-1))


def root_mean_square(x: jax.Array, stacked: bool) -> jax.Array:
    """Returns that of a variable; of each layer's, with the shape to broadcast, if the variable is stacked."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=tuple(range(1, x.ndim)) if stacked else None, keepdims=stacked))


def norm(tree: Any) -> jax.Array:
    """Returns the L2 norm over all leaves."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def hand_written_step(choices: Choices, sizes: Sizes, state: Any, rows: Any) -> tuple[Any, ...]:
    """Takes a step of Adam; returns the new state, [loss, metrics...], and the log-probability of each row."""
    loss = functools.partial(loss_fn, choices, sizes)
    (value, (metrics, scores)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], rows)
    metrics["gradients"] = norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / metrics["gradients"]), grads)
    t = state["step"].astype(jnp.float32) + 1
    decay1, decay2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in (BETA1, BETA2))
    m = jax.tree.map(lambda m, g: decay1 * m + (1 - decay1) * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: decay2 * v + (1 - decay2) * g * g, state["v"], grads)
    rate = RATE * jnp.minimum(1.0, (t - 1) / WARMUP)

    def update(path: Any, p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        change = m / (jnp.sqrt(v) + 1e-6)
        if choices.update_limits:
            change = change / jnp.maximum(1.0, root_mean_square(change, stacked=path[0].key == "layers"))
        return -rate * (change + WEIGHT_DECAY * p if choices.weight_decay else change)

    updates = jax.tree_util.tree_map_with_path(update, state["params"], m, v)
    new = {"step": state["step"] + 1, "params": jax.tree.map(jnp.add, state["params"], updates), "m": m, "v": v}
    if choices.skipping:
        new = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(metrics["gradients"]), new, old), new, state)
    if choices.norms:
        metrics |= {"updates": norm(updates), "old": norm(state["params"])}
        metrics["variables"] = [root_mean_square(x, stacked=False) for x in jax.tree.leaves(new["params"])]
    return new, jnp.concatenate([value[None], *(x.reshape(-1) for x in jax.tree.leaves(metrics))]), scores


def lower_hand_written(choices: Choices, sizes: Sizes, mesh: Mesh, shapes: Any) -> Any:
    """Returns the lowered step.

    Args:
      choices, sizes: what to build.
      mesh: the mesh, of devices that exist or of a topology.
      shapes: ShapeDtypeStructs of the parameters.
    """

    def on(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(on, shapes, SPECS)
    state = {"step": on(jnp.zeros((), jnp.int32), P()), "params": params, "m": params, "v": params}
    rows = {name: on(x, P(ROWS, None)) for name, x in batch(sizes).items()}
    out = (jax.tree.map(lambda x: x.sharding, state), *[NamedSharding(mesh, P())] * 2)
    step = functools.partial(hand_written_step, choices, sizes)
    with jax.set_mesh(mesh):
        return jax.jit(step, out_shardings=out, donate_argnums=0).lower(state, rows)

"""The floor: the model of `lm.stdlib.StdlibBytes` written by hand in plain JAX, with explicit shardings and donation.

No framework, one file: what a careful person would write for this one model on this one mesh. The vocabulary is padded by
hand to the next even size, logits of the padding masked.
"""

from __future__ import annotations

import argparse
import functools
import glob
import os
import sys
import sysconfig
import time

MESH = {"replica": 1, "data": 4, "mdl": 2}
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, HIDDEN, SEQ, BATCH, VOCAB = 4, 256, 4, 1024, 256, 8, 257
PADDED_VOCAB = 258
BATCH_AXES = ("replica", "data")
SPECS = {
    "emb": P("mdl", "data"),
    "scale": P(None),
    "layers": {
        "ln1": P(None),
        "ln2": P(None),
        "qkv": P(None, "data", "mdl", None),
        "out": P("data", "mdl", None),
        "w1": P("data", "mdl"),
        "b1": P("mdl"),
        "w2": P("mdl", "data"),
        "b2": P("data"),
    },
}


def init(key: jax.Array) -> dict:
    """Returns the parameters, float32."""
    head = WIDTH // HEADS
    shapes = {
        "qkv": (3, WIDTH, HEADS, head),
        "out": (WIDTH, HEADS, head),
        "w1": (WIDTH, HIDDEN),
        "w2": (HIDDEN, WIDTH),
    }
    keys = iter(jax.random.split(key, 1 + LAYERS * len(shapes)))
    layers = []
    for _ in range(LAYERS):
        layer = {name: jax.random.normal(next(keys), shape) * 0.05 for name, shape in shapes.items()}
        zeros = {"b1": HIDDEN, "b2": WIDTH, "ln1": WIDTH, "ln2": WIDTH}
        layers.append(layer | {name: jnp.zeros(size) for name, size in zeros.items()})
    emb = jax.random.normal(next(keys), (VOCAB, WIDTH)) / WIDTH**0.5
    return {"emb": jnp.pad(emb, ((0, PADDED_VOCAB - VOCAB), (0, 0))), "scale": jnp.zeros(WIDTH), "layers": layers}


def param_specs() -> dict:
    """PartitionSpecs of `init`'s result."""
    return {**SPECS, "layers": [SPECS["layers"]] * LAYERS}


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises the last dimension."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of [batch, time, heads, width]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(SEQ)[:, None, None] / 10000 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def loss_fn(params: dict, ids: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=P(BATCH_AXES, None, None))
    x = split(jax.nn.one_hot(ids, PADDED_VOCAB) @ params["emb"] * WIDTH**0.5)
    mask = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), 0.0, -1e9)
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", layer_norm(x, layer["ln1"]), layer["qkv"])
        scores = jnp.einsum("btnh,bsnh->bnts", rotate(q), rotate(k)) * (WIDTH // HEADS) ** -0.5 + mask
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        x = split(x + jnp.einsum("btnh,dnh->btd", mixed, layer["out"]))
        hidden = jax.nn.gelu(layer_norm(x, layer["ln2"]) @ layer["w1"] + layer["b1"])
        x = split(x + hidden @ layer["w2"] + layer["b2"])
    logits = layer_norm(x, params["scale"]) @ params["emb"].T
    logits = jnp.where(jnp.arange(PADDED_VOCAB) < VOCAB, logits, -1e9)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def train_step(state: dict, ids: jax.Array, labels: jax.Array) -> tuple[dict, jax.Array]:
    """One Adam step with global-norm clipping and a short warmup."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], ids, labels)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
    t = state["step"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, state["v"], grads)
    rate = 2e-3 * jnp.minimum(1.0, t / 100)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.98**t)) + 1e-6)

    params = jax.tree.map(update, state["params"], m, v)
    return {"step": t, "params": params, "m": m, "v": v}, loss


def read_text() -> np.ndarray:
    """The standard library's sources as one token stream."""
    root = sysconfig.get_paths()["stdlib"]
    paths = [
        p for p in sorted(glob.glob(f"{root}/**/*.py", recursive=True)) if "site-packages" not in p and "/test" not in p
    ]
    parts = []
    for path in paths:
        with open(path, "rb") as file:
            parts.append(np.frombuffer(file.read(), np.uint8).astype(np.int32))
        parts.append(np.array([256], np.int32))
    return np.concatenate(parts)


def main() -> None:
    """Trains for --steps steps; prints 'first step' when the first one starts, then one step time per line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    devices = np.array(jax.devices()).reshape(tuple(MESH.values()))
    mesh = Mesh(devices, tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    params = jax.tree.map(functools.partial(NamedSharding, mesh), param_specs(), is_leaf=lambda x: isinstance(x, P))
    shardings = {"step": NamedSharding(mesh, P()), "params": params, "m": params, "v": params}
    batch = NamedSharding(mesh, P(tuple(MESH), None))

    def init_state(key: jax.Array) -> dict:
        values = init(key)
        zeros = jax.tree.map(jnp.zeros_like, values)
        return {"step": jnp.zeros((), jnp.float32), "params": values, "m": zeros, "v": zeros}

    with jax.set_mesh(mesh):
        text = read_text()
        state = jax.jit(init_state, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(
            train_step, in_shardings=(shardings, batch, batch), out_shardings=(shardings, None), donate_argnums=0
        )
        shape = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
        compiled = step.lower(state, shape, shape).compile()
        rng = np.random.default_rng(0)
        for n in range(steps):
            starts = rng.integers(0, len(text) - SEQ - 1, BATCH)
            rows = text[starts[:, None] + np.arange(SEQ + 1)]
            ids, labels = jax.device_put((rows[:, :-1], rows[:, 1:]), batch)
            if n == 0:
                print("first step", flush=True)
            started = time.perf_counter()
            state, loss = compiled(state, ids, labels)
            jax.block_until_ready(loss)
            print(f"{time.perf_counter() - started:.4f} {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

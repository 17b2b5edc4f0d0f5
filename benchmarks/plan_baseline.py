"""Compares the bytes per chip of the trainer's plan with a hand-written step: same maths, layout, batch and topology.

`python -m benchmarks.plan_baseline [NAME ...]` compiles both for each case (CASES; all but the tiny one by default) and prints
two ratios: bytes that the compiler allocates, and bytes live at the peak. The baseline is plain JAX in this file: layers
repeated by scan and recomputed in the backward pass, bfloat16 compute with float32 variables, Adam. Heads and vocabulary that
their mesh axis doesn't divide are padded by hand. Cases on TPUs need the `tpu` extra, those on GPUs `cuda12` or `cuda13`; a case
whose compiler is not installed is left out, and named. Exits with 1 if the trainer needs over 5% more than the baseline, or if
nothing could be compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.errors import UserError

GIB = 2**30
BAR = 1.05
BATCH = ("replica", "data")
# Hyperparameters of `lm.cloud.LmCloudSpmd`.
LOGIT_CAP, CLIP, WEIGHT_DECAY, RATE, BETA1, BETA2 = 30.0, 5.0, 1e-3, 2.5e-4, 0.9, 0.99


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one mesh.

    Attributes:
      exp: the trainer's experiment.
      topology: as in --topology; None for the host devices of this machine.
      mesh: sizes of replica, data and mdl.
      rows: global batch.
      layers, width, hidden, head, vocab, seq: sizes of the model; `head` is the width of one head.
      dtype: dtype of the computation.
      attention_cap: tanh limit of the attention logits; 0 for no limit.
      fused_attention: attention through `jax.nn.dot_product_attention`, by cuDNN on a GPU; for `benchmarks.gpu`.
      packed: rows hold several segments, which attention keeps apart; if not, fused attention is causal without a mask.
    """

    exp: str
    topology: str | None
    mesh: tuple[int, int, int]
    rows: int
    layers: int
    width: int
    hidden: int
    head: int = 128
    vocab: int = 32000
    seq: int = 1024
    dtype: Any = jnp.bfloat16
    attention_cap: float = 50.0
    fused_attention: bool = False
    packed: bool = True

    def padded(self, size: int) -> int:
        """Returns the next size that the mdl axis divides."""
        return -(-size // self.mesh[2]) * self.mesh[2]


CASES = {
    "2B": Case("lm.cloud.LmCloudSpmd2B", "v5e:16x16", (1, 16, 16), 512, 18, 3072, 12288),
    # Above, 16 does not divide the 24 heads: the trainer slices the padding off, the baseline keeps it. Here all divides.
    "2B even": Case("lm.cloud.LmCloudSpmd2B", "v5e:16x16", (1, 256, 1), 512, 18, 3072, 12288),
    "16B": Case("lm.cloud.LmCloudSpmd16B", "v5p:8x8x8", (1, 64, 8), 512, 36, 6144, 24576),
    "2B h100": Case("lm.cloud.LmCloudSpmd2B", "h100:32x8", (1, 256, 1), 512, 18, 3072, 12288),
    "2B h100 mdl": Case("lm.cloud.LmCloudSpmd2B", "h100:32x8", (1, 32, 8), 512, 18, 3072, 12288),
    "16B h200": Case("lm.cloud.LmCloudSpmd16B", "h200:1x8", (1, 8, 1), 64, 36, 6144, 24576),
    "16B b200": Case("lm.cloud.LmCloudSpmd16B", "b200:4x8", (1, 32, 1), 256, 36, 6144, 24576),
    "tiny": Case("lm.cloud.LmCloudSpmdAdamTiny", None, (1, 4, 2), 8, 2, 32, 67, 8, 61, 16, jnp.float32),
}


def variables(case: Case) -> dict[str, tuple[tuple[int, ...], P]]:
    """Returns the padded shape and the PartitionSpec of each trainable variable; those of the layers are stacked."""
    n, d, h, layers = case.padded(case.width // case.head), case.width, case.head, case.layers
    hidden, vocab = case.padded(case.hidden), case.padded(case.vocab)
    return {
        "embedding": ((d, vocab), P("data", "mdl")),
        "logit_bias": ((vocab,), P("mdl")),
        "ln_scale": ((d,), P()),
        "ln_bias": ((d,), P()),
        "qkv": ((layers, 3, d, n, h), P(None, None, "data", "mdl", None)),
        "per_dim_scale": ((layers, h), P()),
        "out": ((layers, d, n, h), P(None, "data", "mdl", None)),
        "w1": ((layers, d, hidden), P(None, "data", "mdl")),
        "b1": ((layers, hidden), P(None, "mdl")),
        "w2": ((layers, hidden, d), P(None, "mdl", "data")),
        "b2": ((layers, d), P(None, "mdl")),
        "ln1_scale": ((layers, d), P()),
        "ln1_bias": ((layers, d), P()),
        "ln2_scale": ((layers, d), P()),
        "ln2_bias": ((layers, d), P()),
    }


OF_A_LAYER = ("qkv", "per_dim_scale", "out", "w1", "b1", "w2", "b2", "ln1_scale", "ln1_bias", "ln2_scale", "ln2_bias")


def init_state(case: Case, key: jax.Array) -> dict[str, Any]:
    """Returns a random initial state; the padding of heads and vocabulary is random too."""
    params = {name: 0.02 * jax.random.normal(key, shape) for name, (shape, _) in variables(case).items()}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"step": jnp.zeros(()), "params": params, "m": zeros, "v": zeros}


def split(x: jax.Array, *axes: Any) -> jax.Array:
    """Constrains the sharding of `x`, one entry per dimension."""
    return jax.lax.with_sharding_constraint(x, P(*axes))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalises the last dimension."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + bias


def positions(case: Case, where: jax.Array) -> jax.Array:
    """Returns sinusoidal embeddings [rows, seq, width] of positions [rows, seq]."""
    half = case.width // 2
    angle = where[..., None] / 10000 ** (jnp.arange(half) / (half - 1))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(case.dtype)


def attend(case: Case, seen: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention outputs [rows, seq, heads, head]; q, k, v have the same shape, and q is already scaled."""
    if case.fused_attention:
        # The mesh's devices may be those of a topology.
        device = jax.sharding.get_abstract_mesh().abstract_device
        kernel: Any = "cudnn" if device is not None and device.platform == "gpu" else "xla"
        mask = seen if case.packed else None
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=not case.packed, scale=1.0, implementation=kernel
        )
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    if case.attention_cap:
        logits = case.attention_cap * jnp.tanh(logits / case.attention_cap)
    probs = jax.nn.softmax(jnp.where(seen, logits.astype(jnp.float32), -2e38)).astype(case.dtype)
    return jnp.einsum("bnts,bsnh->btnh", probs, v)


def layer(case: Case, seen: jax.Array, x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Runs one layer on x [rows, seq, width]; `seen` [rows, 1, seq, seq] is True where a query attends to a key."""
    heads = (BATCH, None, "mdl", None)
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", layer_norm(x, w["ln1_scale"], w["ln1_bias"]), w["qkv"])
    q = split(q, *heads) * (1.442695041 / case.head**0.5 * jax.nn.softplus(w["per_dim_scale"]))
    mixed = split(attend(case, seen, q, split(k, *heads), split(v, *heads)), *heads)
    x = x + split(jnp.einsum("btnh,dnh->btd", mixed, w["out"]), BATCH, None, "mdl")
    hidden = split(layer_norm(x, w["ln2_scale"], w["ln2_bias"]) @ w["w1"] + w["b1"], BATCH, None, "mdl")
    return x + split(jax.nn.gelu(hidden) @ w["w2"] + w["b2"], BATCH, None, "mdl"), None


def loss_fn(case: Case, params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the weighted mean cross-entropy of packed rows, in nats."""
    batch = jax.lax.with_sharding_constraint(batch, P(BATCH, None))
    params = jax.tree.map(lambda value: value.astype(case.dtype), params)
    embedding = params["embedding"]
    one_hot = jax.nn.one_hot(batch["ids"], case.padded(case.vocab), dtype=case.dtype)
    x = one_hot @ embedding.T * case.width**0.5 + positions(case, batch["segment_pos"])
    x = split(x, BATCH, None, "mdl")
    segments = batch["segment_ids"]
    causal = jnp.tril(jnp.ones((case.seq, case.seq), bool))
    seen = (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]
    body = jax.checkpoint(functools.partial(layer, case, seen), prevent_cse=False)
    x, _ = jax.lax.scan(body, x, {name: params[name] for name in OF_A_LAYER})
    x = layer_norm(x, params["ln_scale"], params["ln_bias"])
    logits = split(x @ embedding + params["logit_bias"], BATCH, None, "mdl")
    logits = (LOGIT_CAP * jnp.tanh(logits / LOGIT_CAP)).astype(jnp.float32)
    places = jnp.arange(logits.shape[-1])
    logits = jnp.where(places < case.vocab, logits, -2e38)
    # A comparison instead of one-hot labels, which would be another array as large as the logits.
    of_label = jnp.where(places == batch["labels"][..., None], logits, 0).sum(-1)
    nats = jax.nn.logsumexp(logits, -1) - of_label
    return (nats * batch["weights"]).sum() / batch["weights"].sum()


def train_step(case: Case, state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
    """Takes one step of Adam with global-norm clipping and weight decay; returns the new state and the loss."""
    loss, grads = jax.value_and_grad(functools.partial(loss_fn, case))(state["params"], batch)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
    t = state["step"] + 1
    m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state["v"], grads)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - RATE * (m / (1 - BETA1**t) / (jnp.sqrt(v / (1 - BETA2**t)) + 1e-6) + WEIGHT_DECAY * p)

    return {"step": t, "params": jax.tree.map(update, state["params"], m, v), "m": m, "v": v}, loss


def compile_baseline(case: Case, devices: Sequence[Any]) -> Any:
    """Compiles the hand-written step for these devices, with the state donated."""
    mesh = Mesh(np.array(devices).reshape(case.mesh), ("replica", "data", "mdl"), axis_types=(AxisType.Auto,) * 3)

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: array(shape, jnp.float32, spec) for name, (shape, spec) in variables(case).items()}
    state = {"step": array((), jnp.float32, P()), "params": params, "m": params, "v": params}
    names = dict.fromkeys(("ids", "labels", "segment_ids", "segment_pos"), jnp.int32) | {"weights": jnp.float32}
    batch = {name: array((case.rows, case.seq), dtype, P((*BATCH, "mdl"), None)) for name, dtype in names.items()}
    out = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(train_step, case), out_shardings=(out, None), donate_argnums=0)
        return step.lower(state, batch).compile()


def devices_of(case: Case) -> Sequence[Any]:
    """Returns the devices to compile for."""
    from spmd_trainer.planner.topologies import topology_devices

    return topology_devices(case.topology) if case.topology else jax.devices()


def trainer_job(case: Case, directory: str) -> Any:
    """Returns the trainer's job of the case."""
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import make_run_config

    batch = () if case.topology is None else (f"train_datasets[0].batch_size.global_batch_size={case.rows}",)
    mesh = tuple(zip(("replica", "data", "mdl"), case.mesh, strict=True))
    return Job.build(
        make_run_config(case.exp, directory, overrides=batch, mode="inspect", mesh=mesh, topology=case.topology)
    )


def row(name: str, sizes: Any, seconds: float) -> str:
    """Returns one line of the table, sizes in GiB."""
    whole = (sizes.arguments, sizes.temporaries, sizes.outputs, sizes.total, sizes.peak)
    parts = "".join(f"{'-':>10}" if part is None else f"{part / GIB:10.4f}" for part in whole)
    return f"  {name:8}{parts}{seconds:8.0f} s"


def compare(name: str, case: Case, devices: Sequence[Any]) -> float:
    """Compiles both, prints their sizes and ratios, and returns the larger of the two ratios trainer / baseline."""
    from spmd_trainer.planner import plan

    with tempfile.TemporaryDirectory() as directory:
        trainer = plan.plan(trainer_job(case, directory))
    started = time.monotonic()
    baseline = plan.chip_bytes(compile_baseline(case, devices), case.topology)
    seconds = time.monotonic() - started
    ratios = {"total": trainer.total / baseline.total}
    if trainer.peak is not None and baseline.peak is not None:
        ratios["live at the peak"] = trainer.peak / baseline.peak
    print(f"{name}: {case.exp} on {case.topology or 'host devices'}, mesh {case.mesh}, global batch {case.rows}")
    print(f"  {'GiB':8}{'arguments':>10}{'temporary':>10}{'outputs':>10}{'total':>10}{'peak':>10}   compiled")
    print(row("trainer", trainer, trainer.seconds))
    print(row("baseline", baseline, seconds))
    for of, ratio in ratios.items():
        verdict = "ABOVE BY OVER" if ratio > BAR else "within" if ratio > 2 - BAR else "below by over"
        print(f"  trainer / baseline, {of}: {ratio:.3f}, {verdict} {BAR - 1:.0%}", flush=True)
    return max(ratios.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the named cases; returns 1 if nothing could be compiled, or if the trainer needs over 5% more."""
    parser = argparse.ArgumentParser(description="bytes per chip: trainer against hand-written JAX")
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="cases to compare; default: all but tiny")
    names = parser.parse_args(arguments).cases or [name for name in CASES if name != "tiny"]
    ratios = []
    for name in names:
        try:
            devices = devices_of(CASES[name])  # this alone says that a compiler is missing
        except UserError as error:
            print(f"{name} left out: {error}", flush=True)
            continue
        ratios.append(compare(name, CASES[name], devices))
    return int(not ratios or max(ratios) > BAR)


if __name__ == "__main__":
    sys.exit(main())

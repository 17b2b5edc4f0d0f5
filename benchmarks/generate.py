"""Tokens per second of generation with a Llama, against a hand-written JAX loop with a key/value cache.

    python -m benchmarks.generate [--rounds 10] [--rows 8] [--sample]

Both continue prompts of 64 tokens by 64 tokens, with the same random values, in float32, on 8 host devices, mesh (replica, data,
mdl) = (1, 4, 2), which divides all sizes. The trainer runs the decode step of `--mode=decode`, the baseline runs
`hand_written` below with the variables in the same layout. A measured call copies the prompts to the devices, generates, and
copies the ids back. The two take turns in random order, and no row ends early. Greedy tokens are compared; with --sample, both
draw from the 40 most likely tokens.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from praxis.pax_fiddle import Config

from benchmarks import reporting
from benchmarks.decode import measure, rotate
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.training import experiment_config
from spmd_trainer.training.decode import DecodeDataset
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig

BAR = 1 / 0.9
PROMPT, NEW, TOP_K = 64, 64, 40
BATCH = ("replica", "data")
CACHE = P(BATCH, None, "mdl", None)


class Llama(SyntheticDecoder):
    """A small Llama and random prompts."""

    ICI_MESH_SHAPE = (1, 4, 2)
    FPROP_DTYPE = jnp.float32
    MAX_SEQ_LEN = 64
    VOCAB_SIZE, MODEL_DIMS, HIDDEN_DIMS = 512, 256, 704
    NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = 4, 8, 4, 32
    # Larger values than usual, so that the tokens vary and no two logits are nearly equal.
    INITIALIZER_RANGE = 0.1
    ROWS = 8

    def decode_datasets(self) -> list[Any]:
        """Returns the prompts."""
        ids = np.random.default_rng(0).integers(0, self.VOCAB_SIZE, (self.ROWS, PROMPT), dtype=np.int32)
        arrays = {"ids": ids, "prefix_lengths": np.full(self.ROWS, PROMPT, np.int32)}
        return [Config(ArrayInput, name="prompts", arrays=arrays, batch_size=self.ROWS)]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides x by its root mean square and multiplies it by the scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def extend(params: dict[str, Any], caches: list[Any], ids: jax.Array, start: jax.Array) -> tuple[list[Any], jax.Array]:
    """Runs tokens int32 [batch, time] through the model after the cached ones, from position `start`.

    Returns:
      The caches with these tokens, (keys, values) [batch, PROMPT + NEW, heads, width] per layer; and the logits after the last.
    """
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=P(BATCH, None, None))
    positions = start + jnp.arange(ids.shape[1])
    mask = jnp.where(jnp.arange(PROMPT + NEW) <= positions[:, None], 0.0, -1e30)
    embedding = jax.lax.with_sharding_constraint(params["token_emb"], P("mdl", None))
    x = split(embedding[ids])
    new_caches = []
    for layer, (keys, values) in zip(params["layers"], caches, strict=True):
        normed = norm(x, layer["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", normed, layer[name]) for name in ("query", "key", "value"))
        keys = jax.lax.dynamic_update_slice_in_dim(keys, rotate(k, positions), start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
        keys, values = jax.lax.with_sharding_constraint((keys, values), CACHE)
        new_caches.append((keys, values))
        grouped = rotate(q, positions).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, keys) * q.shape[3] ** -0.5 + mask
        mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), values).reshape(q.shape)
        x = split(x + jnp.einsum("btnh,nhd->btd", mixed, layer["output"]))
        normed = norm(x, layer["mlp_norm"])
        x = split(x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"])
    return new_caches, norm(x[:, -1], params["final_norm"]) @ params["logits"]


def choose(logits: jax.Array, step: jax.Array, sample: bool) -> jax.Array:
    """Returns the most likely token of each row, or draws one of the TOP_K most likely."""
    if not sample:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    best, ids = jax.lax.top_k(logits, TOP_K)
    drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), step), best)
    return jnp.take_along_axis(ids, drawn[:, None], -1)[:, 0]


def hand_written(params: dict[str, Any], prompts: jax.Array, sample: bool) -> jax.Array:
    """Continues prompts int32 [batch, PROMPT]; returns int32 [batch, PROMPT + NEW]."""
    rows, (_, heads, width) = len(prompts), params["layers"][0]["key"].shape
    empty = jnp.zeros((rows, PROMPT + NEW, heads, width))
    caches, logits = extend(params, [(empty, empty)] * len(params["layers"]), prompts, jnp.int32(0))
    token = choose(logits, jnp.int32(PROMPT), sample)
    output = jnp.zeros((rows, PROMPT + NEW), jnp.int32).at[:, :PROMPT].set(prompts).at[:, PROMPT].set(token)

    def body(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        step, caches, token, output = loop
        caches, logits = extend(params, caches, token[:, None], step)
        token = choose(logits, step + 1, sample)
        return step + 1, caches, token, jax.lax.dynamic_update_slice_in_dim(output, token[:, None], step + 1, axis=1)

    start = (jnp.int32(PROMPT), caches, token, output)
    return jax.lax.while_loop(lambda loop: loop[0] < PROMPT + NEW - 1, body, start)[-1]


def params_of(variables: Any) -> dict[str, Any]:
    """Returns the trainer's variables as `hand_written` takes them: a list of layers."""
    lm = variables["params"]["lm"]
    stacked = lm["layers"]["sub"]["layer_0"]

    def layer(index: int) -> dict[str, jax.Array]:
        attention = {name: part["w"] for name, part in stacked["attention"].items()}
        mlp = {name: part["w"] for name, part in stacked["mlp"].items()}
        norms = {name: stacked[name]["scale"] for name in ("attention_norm", "mlp_norm")}
        return {name: x[index] for name, x in {**attention, **mlp, **norms}.items()}

    return {
        "token_emb": lm["token_emb"]["w"],
        "layers": [layer(index) for index in range(Llama.NUM_LAYERS)],
        "final_norm": lm["final_norm"]["scale"],
        "logits": lm["logits"]["w"],
    }


def programs(rows: int, sample: bool) -> dict[str, Callable[[], np.ndarray]]:
    """Returns two functions that generate: with the trainer's decode step, and with the hand-written loop."""
    settings = [f"max_tokens={NEW}", "eos_ids=()"] + ([f"top_k={TOP_K}", "temperature=1.0"] if sample else [])
    fields = [f"ROWS={rows}", *(f"task.model.generation.{setting}" for setting in settings)]
    resolved = experiment_config.resolve(Llama, fields)
    job = Job.build(TrainConfig(resolved, epath.Path(tempfile.gettempdir())))
    config = resolved.config.decode_datasets[0]
    dataset = DecodeDataset(job, config, 0)
    mesh = job.partitioner.mesh
    state = job.partitioner.initialize_train_state(jax.random.key(0), with_opt_states=False)
    batch = job.build_input(config).get_next_padded()
    split = NamedSharding(mesh, P(BATCH, None))
    with jax.set_mesh(mesh):
        params = jax.jit(params_of)(state.mdl_vars)
        step = jax.jit(functools.partial(hand_written, sample=sample), out_shardings=NamedSharding(mesh, P()))
        shape = jax.ShapeDtypeStruct(batch.ids.shape, jnp.int32, sharding=split)
        compiled = step.lower(params, shape).compile()
    return {
        "trainer": lambda: np.asarray(dataset.outputs(state, batch).output_ids)[:, 0],
        "hand-written": lambda: np.asarray(compiled(params, jax.device_put(batch.ids, split))),
    }


def main() -> int:
    """Measures and reports; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=10)
    parser.add_argument("--rows", type=int, default=8, help="prompts per batch")
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the most likely")
    arguments = parser.parse_args()
    calls = programs(arguments.rows, arguments.sample)
    if not arguments.sample:
        ours, theirs = (calls[name]() for name in ("trainer", "hand-written"))
        if not np.array_equal(ours, theirs):
            print(f"the tokens differ from column {np.flatnonzero((ours != theirs).any(0))[0]} on: not comparable")
            return 1
    seconds = measure(calls, arguments.rounds)
    report = reporting.Report("generate", arguments.json)
    for name, values in seconds.items():
        report.figure(name, arguments.rows * NEW / values, "tokens/s")
    report.ratio("time per batch, trainer / hand-written", seconds["trainer"], seconds["hand-written"], bar=BAR)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

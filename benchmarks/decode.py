"""Tokens per second of greedy decode, against a hand-written JAX loop with a KV cache.

    python -m benchmarks.decode [--rounds 10] [--rows 8]

Both decode 64 tokens after prompts of 64 tokens, with the model of `lm.stdlib.StdlibBytes` at random values, float32, on 8
devices, mesh (replica, data, mdl) = (1, 4, 2): the trainer runs the decode step of `--mode=decode`, the baseline runs
`baseline_decode` below. A measured call copies the prompts to the devices, decodes, and copies the ids back to the host. The
two take turns in random order. No row ends early.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import baseline_lm, reporting  # baseline_lm sets up the host devices, so before JAX
from spmd_trainer.training import experiment_config
from spmd_trainer.training.decode import DecodeDataset
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig

PROMPT, NEW = 64, 64
HEAD = baseline_lm.STDLIB.width // baseline_lm.STDLIB.heads
CACHE = P(baseline_lm.BATCH_AXES, None, "mdl", None)
# End-of-text id that is never decoded, so that all rows are decoded to full length.
NEVER = -1


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary position embedding to [batch, time, heads, width] at positions [time]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10000 ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def extend(params: dict, caches: list, ids: jax.Array, start: jax.Array) -> tuple[list, jax.Array]:
    """Runs tokens through the model, after the cached ones.

    Args:
      params: result of `baseline_lm.init`.
      caches: (keys, values) of each layer, [batch, PROMPT + NEW, heads, HEAD], rotated.
      ids: int32 [batch, time].
      start: position of the first token.

    Returns:
      The caches with these tokens added, and the most likely next token of each row, int32 [batch].
    """
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=P(baseline_lm.BATCH_AXES, None, None))
    positions = start + jnp.arange(ids.shape[1])
    mask = jnp.where(jnp.arange(PROMPT + NEW) <= positions[:, None], 0.0, -1e9)
    x = split(jax.nn.one_hot(ids, baseline_lm.PADDED_VOCAB) @ params["emb"] * baseline_lm.STDLIB.width**0.5)
    new_caches = []
    for layer, (keys, values) in zip(params["layers"], caches, strict=True):
        q, k, v = jnp.einsum(
            "btd,cdnh->cbtnh", baseline_lm.layer_norm(x, layer["ln1"], layer["ln1_shift"]), layer["qkv"]
        )
        keys = jax.lax.dynamic_update_slice_in_dim(keys, rotate(k, positions), start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
        new_caches.append(jax.lax.with_sharding_constraint((keys, values), CACHE))
        scores = jnp.einsum("btnh,bsnh->bnts", rotate(q, positions), keys) * HEAD**-0.5 + mask
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), values)
        x = split(x + jnp.einsum("btnh,dnh->btd", mixed, layer["out"]))
        hidden = jax.nn.gelu(baseline_lm.layer_norm(x, layer["ln2"], layer["ln2_shift"]) @ layer["w1"] + layer["b1"])
        x = split(x + hidden @ layer["w2"] + layer["b2"])
    logits = baseline_lm.layer_norm(x[:, -1], params["scale"], params["shift"]) @ params["emb"].T + params["bias"]
    logits = jnp.where(jnp.arange(baseline_lm.PADDED_VOCAB) < baseline_lm.VOCAB, logits, -1e9)
    return new_caches, jnp.argmax(logits, -1).astype(jnp.int32)


def baseline_decode(params: dict, prompts: jax.Array) -> jax.Array:
    """Decodes NEW tokens greedily after prompts int32 [batch, PROMPT]; returns int32 [batch, PROMPT + NEW]."""
    rows = prompts.shape[0]
    empty = jnp.zeros((rows, PROMPT + NEW, baseline_lm.STDLIB.heads, HEAD))
    caches, token = extend(params, [(empty, empty)] * baseline_lm.STDLIB.layers, prompts, jnp.int32(0))
    output = jnp.zeros((rows, PROMPT + NEW), jnp.int32).at[:, :PROMPT].set(prompts)

    def body(loop: tuple) -> tuple:
        step, caches, token, output, done = loop
        output = jax.lax.dynamic_update_slice_in_dim(output, token[:, None], step, axis=1)
        done |= token == NEVER
        caches, token = extend(params, caches, token[:, None], step)
        return step + 1, caches, token, output, done

    def goes_on(loop: tuple) -> jax.Array:
        return (loop[0] < PROMPT + NEW - 1) & ~jnp.all(loop[-1])

    loop = jax.lax.while_loop(goes_on, body, (jnp.int32(PROMPT), caches, token, output, jnp.zeros(rows, bool)))
    step, _, token, output, _ = loop
    return jax.lax.dynamic_update_slice_in_dim(output, token[:, None], step, axis=1)


def baseline(mesh: jax.sharding.Mesh, prompts: np.ndarray) -> Callable[[], np.ndarray]:
    """Returns a function that decodes the prompts with the hand-written loop."""
    shardings = jax.tree.map(
        functools.partial(NamedSharding, mesh),
        baseline_lm.param_specs(baseline_lm.STDLIB),
        is_leaf=lambda x: isinstance(x, P),
    )
    batch = NamedSharding(mesh, P(tuple(mesh.axis_names), None))
    with jax.set_mesh(mesh):
        params = jax.jit(functools.partial(baseline_lm.init, sizes=baseline_lm.STDLIB), out_shardings=shardings)(
            jax.random.key(0)
        )
        shape = jax.ShapeDtypeStruct(prompts.shape, jnp.int32)
        step = jax.jit(baseline_decode, in_shardings=(shardings, batch), out_shardings=NamedSharding(mesh, P()))
        compiled = step.lower(params, shape).compile()
    return lambda: np.asarray(compiled(params, jax.device_put(prompts, batch)))


def ours(rows: int) -> tuple[jax.sharding.Mesh, np.ndarray, Callable[[], np.ndarray]]:
    """Returns the mesh, the prompts, and a function that decodes them with the trainer's step."""
    name = "lm.stdlib.StdlibBytes"
    fields = (f"decode_datasets[0].num_prompts={rows}", f"decode_datasets[0].batch_size={rows}")
    resolved = experiment_config.resolve(name, fields)
    resolved.config.task.model.decoder_tpl.eos_id = NEVER
    job = Job.build(TrainConfig(resolved, epath.Path(tempfile.gettempdir())))
    config = resolved.config.decode_datasets[0]
    dataset = DecodeDataset(job, config, 0)
    state = job.partitioner.initialize_train_state(jax.random.key(0), with_opt_states=False)
    batch = job.build_input(config).get_next_padded()
    return job.partitioner.mesh, np.asarray(batch.ids), lambda: np.asarray(dataset.outputs(state, batch).output_ids)


def measure(calls: dict[str, Callable[[], np.ndarray]], rounds: int) -> dict[str, np.ndarray]:
    """Returns the seconds of each call, [rounds] per name, after one unmeasured round."""
    order = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            started = time.perf_counter()
            calls[name]()
            if count:
                seconds[name].append(time.perf_counter() - started)
    return {name: np.array(values) for name, values in seconds.items()}


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=10)
    parser.add_argument("--rows", type=int, default=8, help="prompts per batch")
    arguments = parser.parse_args()
    mesh, prompts, trainer = ours(arguments.rows)
    seconds = measure({"trainer": trainer, "baseline": baseline(mesh, prompts)}, arguments.rounds)
    report = reporting.Report("decode", arguments.json)
    tokens = arguments.rows * NEW
    for name, values in seconds.items():
        report.figure(name, tokens / values, "tokens/s")
    report.ratio("time per batch, trainer / baseline", seconds["trainer"], seconds["baseline"])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

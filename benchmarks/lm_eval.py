"""Rows per second of scoring texts for lm-eval, against a hand-written batched loop.

    python -m benchmarks.lm_eval [--rounds 5] [--requests 512]

Both score continuations of 1 to 20 tokens in texts of 10 to 500 tokens, uniformly distributed, with the model of
`benchmarks.generate` on 8 host devices, mesh (replica, data, mdl) = (1, 4, 2). The trainer runs `lm_eval.requests.Requests`,
with its choice of shapes, from the tokens of the requests to their scores. The baseline sorts the texts by length, takes 32 at a
time, pads them to a multiple of 64 tokens, and runs `hand_written` below with the variables in the same layout. The two take
turns in random order after one unmeasured round, which compiles; their scores are compared. Also reports the fraction of padding
tokens and the number of compiled shapes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import reporting
from benchmarks.decode import measure, rotate
from benchmarks.generate import BATCH, Llama, norm, params_of
from spmd_trainer.lm_eval import steps
from spmd_trainer.lm_eval.requests import Requests, Scored, Source
from spmd_trainer.training import experiment_config
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig

BAR = 1 / 0.9
PADDING_BAR = 0.15
ROWS, MULTIPLE, LONGEST = 32, 64, 512


def hand_written(
    params: dict[str, Any], ids: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the log-probabilities of weighted labels, and whether all of them are the most likely tokens.

    Args:
      params: see `benchmarks.generate.params_of`.
      ids, labels: int32 [batch, time].
      weights: float32 [batch, time].
    """
    split = lambda x: jax.lax.with_sharding_constraint(x, P(BATCH, None, None))  # noqa: E731
    positions = jnp.arange(ids.shape[1])
    mask = jnp.where(positions <= positions[:, None], 0.0, -1e30)
    x = split(jax.lax.with_sharding_constraint(params["token_emb"], P("mdl", None))[ids])
    for layer in params["layers"]:
        normed = norm(x, layer["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", normed, layer[name]) for name in ("query", "key", "value"))
        q, k = rotate(q, positions), rotate(k, positions)
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * q.shape[3] ** -0.5 + mask
        mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v).reshape(q.shape)
        x = split(x + jnp.einsum("btnh,nhd->btd", mixed, layer["output"]))
        normed = norm(x, layer["mlp_norm"])
        x = split(x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"])
    logits = norm(x, params["final_norm"]) @ params["logits"]
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return jnp.sum(own * weights, -1), jnp.all((jnp.argmax(logits, -1) == labels) | (weights == 0), -1)


def loop(rows: Sequence[Scored], run: Callable[..., Any], split: NamedSharding) -> np.ndarray:
    """Scores rows in batches of similar length; returns float64 [rows]."""
    order = np.argsort([-len(row.tokens) for row in rows])
    found = np.zeros(len(rows))
    for start in range(0, len(rows), ROWS):
        members = order[start : start + ROWS]
        width = -(-(len(rows[members[0]].tokens) - 1) // MULTIPLE) * MULTIPLE
        ids, labels = np.zeros((2, ROWS, width), np.int32)
        weights = np.zeros((ROWS, width), np.float32)
        for place, index in enumerate(members):
            tokens, scored = rows[index]
            length = len(tokens) - 1
            ids[place, :length], labels[place, :length] = tokens[:-1], tokens[1:]
            weights[place, length - scored : length] = 1
        sums, _ = run(*jax.device_put((ids, labels, weights), split))
        found[members] = np.asarray(sums)[: len(members)]
    return found


def programs(rows: Sequence[Scored]) -> tuple[dict[str, Callable[[], np.ndarray]], Requests]:
    """Returns the two programs, which score all rows, and the trainer's `Requests`."""
    resolved = experiment_config.resolve(Llama, [])
    job = Job.build(TrainConfig(resolved, epath.Path(tempfile.gettempdir())))
    state = job.partitioner.initialize_train_state(jax.random.key(0), with_opt_states=False)
    mesh = job.partitioner.mesh
    with jax.set_mesh(mesh):
        params = jax.jit(params_of)(state.mdl_vars)
        run = jax.jit(hand_written, out_shardings=NamedSharding(mesh, P()))
    requests = Requests(job.task, job.partitioner, tokens_per_batch=ROWS * 256, max_length=LONGEST)

    class Silent:
        def advance(self) -> None:
            pass

    def trainer() -> np.ndarray:
        source = Source(state, "model", None, lambda what, total: contextlib.nullcontext(Silent()))
        return np.array([score for score, _ in requests.scores(rows, source)])

    def baseline() -> np.ndarray:
        with jax.set_mesh(mesh):
            return loop(rows, lambda *batch: run(params, *batch), NamedSharding(mesh, P(BATCH, None)))

    return {"trainer": trainer, "hand-written": baseline}, requests


def main() -> int:
    """Measures and reports; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--requests", type=int, default=512, help="number of texts")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    rows = [
        Scored(
            tuple(random.integers(0, Llama.VOCAB_SIZE, length + 1).tolist()),
            int(random.integers(1, min(length, 20) + 1)),
        )
        for length in random.integers(10, 501, arguments.requests).tolist()
    ]
    calls, requests = programs(rows)
    ours, theirs = (call() for call in calls.values())
    worst = np.abs(ours - theirs).max()
    if worst > 1e-3:
        print(f"the scores differ by {worst:.2g}: not comparable")
        return 1
    lengths = [len(row.tokens) - 1 for row in rows]
    planned = steps.batches(lengths, requests.shapes(lengths))
    wasted = 1 - sum(lengths) / sum(batch.shape.rows * batch.shape.width for batch in planned)
    seconds = measure(calls, arguments.rounds)
    report = reporting.Report("lm_eval", arguments.json)
    for name, values in seconds.items():
        report.figure(name, len(rows) / values, "rows/s")
    report.ratio("time for all rows, trainer / hand-written", seconds["trainer"], seconds["hand-written"], bar=BAR)
    print(
        f"{wasted:.1%} of the trainer's tokens are padding (bar {PADDING_BAR:.0%}), {requests.compiled} shapes compiled"
    )
    return report.finish() or int(wasted > PADDING_BAR)


if __name__ == "__main__":
    sys.exit(main())

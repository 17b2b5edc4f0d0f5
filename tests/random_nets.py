"""Random small nets on random meshes, trained by the trainer and by plain JAX on one device.

`python tests/random_nets.py 500 [first seed]` trains 500 and prints the seeds of those that differ; `one SEED` trains one and
says what it is. The test suite draws some (`test_mesh_equivalence.py`).
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from praxis import pax_fiddle

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import verify

STEPS = 5
RATE = 0.05
# Largest differences, relative to the loss and to a variable's largest change in training.
LOSS, VARIABLES = 1e-5, 2e-3

Params = dict[str, jax.Array]
Layer = Callable[[Params, jax.Array], jax.Array]
AXES = ("data", "mdl", "replica")
MESHES = [
    (1,),
    (2,),
    (3,),
    (5,),
    (8,),
    (2, 2),
    (4, 2),
    (2, 4),
    (3, 2),
    (2, 3),
    (1, 8),
    (8, 1),
    *[(2, 2, 2)] * 3,  # axes of one size are what XLA confuses
    (1, 4, 2),
    (2, 1, 3),
]


@dataclasses.dataclass
class Net:
    """A net, its mesh and its batch.

    Attributes:
      seed: what it is drawn from.
      names, sizes: the mesh's axes.
      rows, length, width, vocabulary: sizes of the batch and of the model.
      mapping: `inputs_split_mapping`.
      strategy: `sharding_strategy`.
      partitioner: makes a partitioner for a mesh.
      layers: (name, function) of each layer.
      shapes: of the parameters.
      text: what was drawn, for a person.
    """

    seed: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: int
    length: int
    width: int
    vocabulary: int
    mapping: dict[str, Any] | None
    strategy: list[Any] | None
    partitioner: Callable[..., Partitioner]
    layers: list[tuple[str, Layer]]
    shapes: dict[str, tuple[int, ...]]
    text: str


def draw(seed: int) -> Net:
    """Draws a net."""
    rng = random.Random(seed)
    sizes = rng.choice(MESHES)
    names = tuple(rng.sample(AXES, len(sizes)))
    kind = rng.choice(["pjit"] * 6 + ["minibatches", "dp", "fsdp"])
    rows, length = rng.randint(1, 33), rng.randint(1, 6)
    minibatches = rng.choice([n for n in (1, 2, 3, 4) if rows % n == 0]) if kind == "minibatches" else 1
    net = Net(
        seed, names, sizes, rows, length, rng.randint(1, 9), rng.randint(2, 13), None, None, PjitPartitioner, [], {}, ""
    )
    if kind == "pjit":
        net.mapping, net.strategy = _mapping(rng, names), _strategy(rng, names)
    elif kind == "minibatches":
        net.mapping = _mapping(rng, names)
        net.partitioner = lambda **settings: PjitPartitioner(num_minibatches=minibatches, **settings)
    else:
        fields = {"min_weight_size": 1} if kind == "fsdp" else {}
        net.partitioner = lambda **settings: ShardMapPartitioner(kind, **fields, **settings)
    choices = [name for name in LAYERS if kind == "pjit" or name not in OVER_ROWS]
    for number in range(rng.randint(1, 4)):
        LAYERS[rng.choice(choices)](net, rng, number)
    if kind == "pjit" and rng.random() < 0.5:
        LAYERS["norm_over_rows"](net, rng, 9)
    net.shapes |= {"embedding": (net.vocabulary, net.width), "output": (net.width, net.vocabulary)}
    layers = [name for name, _ in net.layers]
    net.text = (
        f"seed {seed}: {kind} {minibatches if minibatches > 1 else ''} {dict(zip(names, sizes, strict=True))} rows={rows} "
        f"length={length} width={net.width} vocabulary={net.vocabulary} {layers} mapping={net.mapping} {net.strategy}"
    )
    return net


def _entry(rng: random.Random, names: Sequence[str], most: int = 2) -> Any:
    axes = tuple(rng.sample(names, rng.randint(0, min(most, len(names)))))
    return axes[0] if len(axes) == 1 else axes or None


def _mapping(rng: random.Random, names: Sequence[str]) -> dict[str, Any] | None:
    if rng.random() < 0.15:
        return None
    rows = _entry(rng, names, len(names)) if rng.random() < 0.3 else rng.choice(names)
    return {f"map_{rank}d": (rows, *[None] * (rank - 1)) for rank in (1, 2, 3)}


def _strategy(rng: random.Random, names: Sequence[str]) -> list[Any] | None:
    if rng.random() < 0.3:
        return None

    def spec_of(spec: PartitionSpec, mesh: Any, path: str, leaf: Any) -> PartitionSpec:
        return _spec(random.Random(path), names, len(leaf.shape))

    return [(".*", spec_of)]


def _spec(rng: random.Random, names: Sequence[str], rank: int) -> PartitionSpec:
    free = rng.sample(names, len(names))
    entries: list[Any] = []
    for _ in range(rank):
        taken = tuple(free.pop() for _ in range(min(rng.choice([0, 1, 1, 2]), len(free))))
        entries.append(taken[0] if len(taken) == 1 else taken or None)
    return PartitionSpec(*entries)


def _parameter(net: Net, name: str, *shape: int) -> str:
    net.shapes[name] = shape
    return name


def _linear(net: Net, rng: random.Random, number: int) -> None:
    wide = rng.randint(1, 9)
    w, b = _parameter(net, f"w{number}", net.width, wide), _parameter(net, f"b{number}", wide)
    o = _parameter(net, f"o{number}", wide, net.width)
    net.layers.append((f"linear {wide}", lambda p, h: h + jnp.tanh(h @ p[w] + p[b]) @ p[o]))


def _tied(net: Net, rng: random.Random, number: int) -> None:
    w = _parameter(net, "shared", net.width, net.width)
    net.layers.append(("shared weight", lambda p, h: h + jnp.tanh(h @ p[w] @ p[w].T)))


def _normalised(h: jax.Array, dims: Any) -> jax.Array:
    return (h - h.mean(dims, keepdims=True)) / jnp.sqrt(h.var(dims, keepdims=True) + 0.1)


def _norm_over_rows(net: Net, rng: random.Random, number: int) -> None:
    net.layers.append(("norm over rows", lambda p, h: _normalised(h, (0, 1))))


def _layer_norm(net: Net, rng: random.Random, number: int) -> None:
    net.layers.append(("layer norm", lambda p, h: _normalised(h, -1)))


def _convolution(net: Net, rng: random.Random, number: int) -> None:
    groups = rng.choice([1, net.width])
    w = _parameter(net, f"k{number}", 3, net.width // groups, net.width)
    numbers = ("NHC", "HIO", "NHC")

    def layer(p: Params, h: jax.Array) -> jax.Array:
        return h + lax.conv_general_dilated(
            h, p[w], (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    net.layers.append((f"convolution in {groups} groups", layer))


def _attention(net: Net, rng: random.Random, number: int) -> None:
    heads, size = rng.randint(1, 3), rng.randint(1, 4)
    w = _parameter(net, f"qkv{number}", 3, net.width, heads, size)
    o = _parameter(net, f"post{number}", heads, size, net.width)

    def layer(p: Params, h: jax.Array) -> jax.Array:
        q, k, v = jnp.einsum("btd,sdnh->sbtnh", h, p[w])
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        later = jnp.arange(net.length)[:, None] < jnp.arange(net.length)
        probabilities = jax.nn.softmax(jnp.where(later, -1e9, scores))
        return h + jnp.einsum("bnts,bsnh,nhd->btd", probabilities, v, p[o])

    net.layers.append((f"attention {heads}x{size}", layer))


def _stack(net: Net, rng: random.Random, number: int) -> None:
    depth, remat = rng.randint(1, 3), rng.random() < 0.5
    w = _parameter(net, f"stack{number}", depth, net.width, net.width)

    def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w), None

    net.layers.append(
        (f"scan over {depth}", lambda p, h: lax.scan(jax.checkpoint(body) if remat else body, h, p[w])[0])
    )


def _recurrent(net: Net, rng: random.Random, number: int) -> None:
    w = _parameter(net, f"r{number}", net.width, net.width)

    def layer(p: Params, h: jax.Array) -> jax.Array:
        step = lambda s, x: (jnp.tanh(s @ p[w] + x),) * 2  # noqa: E731
        return h + lax.scan(step, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(0, 1)

    net.layers.append(("scan over time", layer))


def _pool(net: Net, rng: random.Random, number: int) -> None:
    net.layers.append(
        ("max pool", lambda p, h: h + lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME"))
    )


def _second_lookup(net: Net, rng: random.Random, number: int) -> None:
    t = _parameter(net, f"t{number}", net.width, net.width)
    net.layers.append(("lookup of the largest", lambda p, h: h + p[t][jnp.argmax(h, -1)]))


def _mixed(net: Net, rng: random.Random, number: int) -> None:
    dim, name = rng.choice([(0, "rows"), (1, "time"), (2, "features")]), rng.choice(["sort", "cumsum", "roll", "rev"])
    fn = {"sort": jnp.sort, "cumsum": jnp.cumsum, "roll": lambda h, d: jnp.roll(h, 1, d), "rev": jnp.flip}[name]
    if dim[0] == 0:
        dim = (1, "time")
    net.layers.append((f"{name} along {dim[1]}", lambda p, h: 0.5 * h + 0.3 * fn(h, dim[0])))


def _over_rows(name: str, fn: Callable[[jax.Array], jax.Array]) -> Callable[[Net, random.Random, int], None]:
    def add(net: Net, rng: random.Random, number: int) -> None:
        net.layers.append((name, lambda p, h: 0.5 * h + 0.3 * fn(h)))

    return add


def _joined(net: Net, rng: random.Random, number: int) -> None:
    w = _parameter(net, f"j{number}", 2 * net.width, net.width)
    net.layers.append(("joined features", lambda p, h: jnp.concatenate([h, jnp.tanh(h)], -1) @ p[w]))


def _shifted(net: Net, rng: random.Random, number: int) -> None:
    def layer(p: Params, h: jax.Array) -> jax.Array:
        return h + 0.3 * jnp.pad(h[:, :-1], ((0, 0), (1, 0), (0, 0)))

    net.layers.append(("shift along time", layer))


def _constraint(net: Net, rng: random.Random, number: int) -> None:
    spec = _spec(rng, net.names, 3)

    def layer(p: Params, h: jax.Array) -> jax.Array:
        return h if jax.sharding.get_abstract_mesh().empty else lax.with_sharding_constraint(h, spec)

    net.layers.append((f"constraint {spec}", layer))


def _constrained_product(net: Net, rng: random.Random, number: int) -> None:
    """Rows over several axes in any order, features over another one, and a weight over two: XLA confuses axes of one size."""
    features, *rows = rng.sample(net.names, len(net.names))
    spec = PartitionSpec(tuple(rows) or None, None, features)
    weight = PartitionSpec(*rng.sample((features, rng.choice(rows) if rows else None), 2))
    w = _parameter(net, f"c{number}", net.width, net.width)

    def layer(p: Params, h: jax.Array) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return h + jnp.tanh(h @ p[w])
        split = lax.with_sharding_constraint
        return h + jnp.tanh(split(split(h, spec) @ split(p[w], weight), spec))

    net.layers.append((f"product {spec} {weight}", layer))


# Minibatches, and `ShardMapPartitioner`, compute these over their own rows; and that has no constraints.
OVER_ROWS = ("norm_over_rows", "roll_rows", "sort_rows", "cumsum_rows", "constraint", "constrained_product")
LAYERS: dict[str, Callable[[Net, random.Random, int], None]] = {
    "linear": _linear,
    "tied": _tied,
    "norm_over_rows": _norm_over_rows,
    "layer_norm": _layer_norm,
    "convolution": _convolution,
    "attention": _attention,
    "stack": _stack,
    "recurrent": _recurrent,
    "pool": _pool,
    "lookup": _second_lookup,
    "mixed": _mixed,
    "joined": _joined,
    "shifted": _shifted,
    "roll_rows": _over_rows("roll rows", lambda h: jnp.roll(h, 1, 0)),
    "sort_rows": _over_rows("sort rows", lambda h: jnp.sort(h, 0)),
    "cumsum_rows": _over_rows("mean of the rows so far", lambda h: jnp.cumsum(h, 0) / len(h)),
    "constraint": _constraint,
    "constrained_product": _constrained_product,
}


def _parameters(net: Net) -> dict[str, np.ndarray]:
    """Returns the initial values."""
    rng = np.random.default_rng(net.seed)
    return {
        name: (rng.normal(size=shape) / math.sqrt(max((1, *shape[:-1][-2:])))).astype(np.float32)
        for name, shape in sorted(net.shapes.items())
    }


def _apply(net: Net, params: Params, ids: jax.Array) -> jax.Array:
    h = params["embedding"][ids]
    for _, layer in net.layers:
        h = layer(params, h)
    return h @ params["output"]


def _loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
    return -jnp.mean(taken)


def _batches(net: Net) -> list[dict[str, np.ndarray]]:
    rng, shape = np.random.default_rng(net.seed), (net.rows, net.length)
    return [
        {name: rng.integers(0, net.vocabulary, shape).astype(np.int32) for name in ("ids", "labels")}
        for _ in range(STEPS)
    ]


def _by_hand(net: Net, params: Params) -> tuple[list[float], dict[str, np.ndarray]]:
    """Trains with plain JAX on one device."""

    @jax.jit
    def step(params: Params, batch: dict[str, jax.Array]) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: _loss(_apply(net, p, batch["ids"]), batch))(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss

    losses = []
    for batch in _batches(net):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return losses, {name: np.asarray(x) for name, x in params.items()}


def differences(net: Net) -> tuple[float, float]:
    """Trains a net both ways; returns the largest relative difference of a loss, and of a variable."""
    model_p = pax_fiddle.Config(
        models.FunctionModel,
        init=lambda key: {name: jnp.zeros(shape) for name, shape in net.shapes.items()},
        apply=lambda params, ids: _apply(net, params, ids),
        loss=lambda logits, batch: {"loss": (_loss(logits, batch), jnp.asarray(float(batch["ids"].size)))},
        inputs="ids",
        mesh_axis_names=list(net.names),
        ici_mesh_shape=list(net.sizes),
    )
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="t", model=model_p)
    task_p.train.learner.loss_name, task_p.train.learner.optimizer = "loss", optax.sgd(RATE)
    task_p.train.inputs_split_mapping, task_p.train.sharding_strategy = net.mapping, net.strategy
    task = tasks_lib.build_task(task_p)
    batches = _batches(net)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    devices = jax.devices()[: math.prod(net.sizes)]
    mesh = sharding.create_device_mesh(list(zip(net.names, net.sizes, strict=True)), devices=devices)
    partitioner = net.partitioner(mesh=mesh)
    partitioner.setup(task, shapes)
    params = _parameters(net)
    variables = partitioner.metadata.variables.mdl_vars
    state = dataclasses.replace(
        jax.tree.map(lambda v: np.zeros(v.logical_shape, v.dtype), partitioner.metadata.variables),
        mdl_vars=jax.tree.map(lambda v: params[v.path.split("/")[-1]], variables),
    )
    snapshots = list(verify.run_steps(partitioner, batches, jax.random.key(0), state))
    losses, final = _by_hand(net, params)
    ours = {path.split("/")[-1]: x for path, x in snapshots[-1].variables.items() if path.startswith("mdl_vars")}
    worst_loss = max(abs(s.loss - loss) / max(abs(loss), 1e-3) for s, loss in zip(snapshots[1:], losses, strict=True))
    worst = 0.0
    for name, x in final.items():
        changed = max(float(np.abs(x - params[name]).max()), 1e-4)
        worst = max(worst, float(np.abs(ours[name] - x).max()) / changed)
    return worst_loss, worst


def agrees(net: Net) -> bool:
    """Returns True if both ways give the same numbers."""
    loss, variables = differences(net)
    return loss <= LOSS and variables <= VARIABLES


def main(args: Sequence[str]) -> int:
    """Trains nets; returns 1 if some differ."""
    if args[0] == "one":
        net = draw(int(args[1]))
        sys.stdout.write(f"{net.text}\n{differences(net)}\n")
        return 0
    first = int(args[1]) if len(args) > 1 else random.SystemRandom().randrange(10**9)
    bad = 0
    for seed in range(first, first + int(args[0])):
        net = draw(seed)
        try:
            loss, variables = differences(net)
        except Exception as error:
            bad += 1
            sys.stdout.write(f"FAILS {net.text}\n  {type(error).__name__}: {str(error)[:300]}\n")
            continue
        if not (loss <= LOSS and variables <= VARIABLES):
            bad += 1
            sys.stdout.write(f"DIFFERS {net.text}\n  loss {loss:.2g}, variables {variables:.2g}\n")
        sys.stdout.flush()
        jax.clear_caches()
    sys.stdout.write(f"{args[0]} nets from seed {first}: {bad} differ or fail\n")
    return int(bad > 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    raise SystemExit(main(sys.argv[1:]))

"""In a train step, each loop with exchanges is ordered with every other exchange by data.

XLA's CPU runtime starts what has its inputs, so host devices that reach a loop and an exchange beside it in different orders wait
for each other forever. It happened under load, in one run of three.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer import sharding
from spmd_trainer.sharding import exchange_order
from spmd_trainer.training import experiment_config, start_up
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import InspectConfig

EXCHANGE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
NAME = re.compile(r"%([\w.\-]+)")


def computations(program):
    """Returns {computation: [(instruction, its text without metadata)]}."""
    found, inside = {}, []
    for line in program.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            inside = found.setdefault(head[1], [])
        elif instruction := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", line):
            inside.append((instruction[1], instruction[2].partition(", metadata={")[0]))
    return found


def unordered(program):
    """Returns the number of loops with exchanges, and the pairs of one and another loop or exchange of which neither needs the
    other.
    """
    all_of, known = computations(program), {}

    def has_exchange(name):
        if name not in known:
            known[name] = False
            known[name] = any(EXCHANGE.search(text) or any(map(has_exchange, called(text))) for _, text in all_of[name])
        return known[name]

    def called(text):
        names = re.findall(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)", text)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", text):
            names += NAME.findall(branches)
        return [name for name in names if name in all_of]

    num_loops, pairs = 0, []
    for instructions in all_of.values():
        needs, seen = {}, []
        for name, text in instructions:
            inputs = [found for found in NAME.findall(text) if found in needs]
            needs[name] = set(inputs).union(*(needs[found] for found in inputs))
            is_loop = (" while(" in text or " conditional(" in text) and any(map(has_exchange, called(text)))
            num_loops += is_loop
            if is_loop or EXCHANGE.search(text):
                pairs += [
                    (other, name) for other, was_loop in seen if (is_loop or was_loop) and other not in needs[name]
                ]
                seen.append((name, is_loop))
    return num_loops, pairs


FULL = {
    "lm.gpt2.TinyGpt2": [],
    "lm.mistral.TinyMixtral": [],
    "lm.llama4.TinyLlama4": [],  # layers before and after the loop
    "lm.deepseek.TinyDeepSeekMtp": [],  # layers after it that predict further tokens
    "lm.llama.TinyLlamaLong": ["NUM_LAYERS=4"],  # rows split over the mesh
    "lm.qwen_next.TinyQwenNext": ["NUM_LAYERS=6"],  # loops with exchanges in the loop over the layers
    "synthetic.structures.TinyRepeated": [],
}


@pytest.mark.parametrize("name", ["lm.llama.TinyLlama", *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_no_exchange_may_start_beside_a_loop(name, tmp_path):
    resolved = experiment_config.resolve(name, FULL.get(name, []))
    program = start_up.compile_train_step(Job.build(InspectConfig(resolved, epath.Path(tmp_path)))).fn.as_text()
    num_loops, pairs = unordered(program)
    assert num_loops >= 2  # over the layers, forward and backward
    assert pairs == []


def steps(before, stacked, beside, after, ids, count):
    """A loop over layers with layers before and after it, a value beside all of them, a second loop, and results of both."""
    x = jnp.tanh(before[ids])
    x, kept = lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum(axis=1)), x, stacked)
    y = jax.checkpoint(lambda x: jnp.tanh(x @ after) @ after.T)(x)
    still, w = lax.stop_gradient((y, stacked[0]))
    late = jax.jit(lambda n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.cos(c[1] @ w)), (0, still)))
    return jnp.sum(y), (beside @ beside.T, kept, late(count), lax.cond(count > 2, lambda x: x + 1, lambda x: x, x))


def test_programs_in_order_compute_the_same():
    mesh = sharding.create_device_mesh([("data", 4), ("mdl", 2)])
    rng = np.random.default_rng(0)
    shapes = [(8, 16), (3, 16, 16), (8, 16), (16, 4)]
    specs = [P("data"), P(None, "data", "mdl"), P("mdl", "data"), P("data", "mdl"), P("data"), P()]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes] + [
        np.arange(8, dtype=np.int32),
        np.int32(3),
    ]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    fn = jax.value_and_grad(steps, argnums=(0, 1, 2, 3), has_aux=True)
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*arrays)
    new = exchange_order.ordered(closed, shardings, 4)
    found = []
    for program in (closed, new):
        jitted = jax.jit(core.jaxpr_as_fun(program), in_shardings=shardings)
        found.append(jitted(*arrays))
        num_loops, pairs = unordered(jitted.lower(*arrays).compile().as_text())
        assert num_loops == 3  # forward, backward, and the one whose number of rounds is known late
        assert bool(pairs) == (program is closed)
    assert len(found[0]) == len(jax.tree.leaves(out))
    for before, after in zip(*found, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-6)


def layers(x, stacked):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]


def beside(x, stacked, w):
    return layers(x, stacked), w @ w.T


def nested(x, stacked, w):
    """A loop of one round over a loop: XLA inlines the outer one."""
    return lax.scan(lambda x, _: (layers(x, stacked), None), x, None, length=1)[0], w @ w.T


def independent(x, stacked, w):
    return layers(x, stacked), layers(w, stacked)


def in_a_branch(x, stacked, w):
    return lax.cond(jnp.sum(x) > 0, layers, lambda x, _: x, x, stacked), w @ w.T


def mapped(x, stacked, w):
    """Each row has its own number of rounds."""
    rounds = jax.vmap(lambda row: lax.while_loop(lambda r: jnp.sum(r) > 1, lambda r: r * 0.5, row))
    return layers(rounds(jnp.abs(x)), stacked), w @ w.T


def of_a_platform(x, stacked, w):
    return lax.platform_dependent(x, cpu=lambda x: layers(x, stacked), default=lambda x: layers(-x, stacked)), w @ w.T


def written_and_read(x, stacked, w):
    """Side effects keep their order."""
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = 1.0
    return layers(x, stacked) * ref[...], w @ w.T


@pytest.mark.parametrize("fn", [beside, nested, independent, in_a_branch, mapped, of_a_platform, written_and_read])
def test_forms_of_loops(fn):
    mesh = sharding.create_device_mesh([("data", 4), ("mdl", 2)])
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in [(8, 16), (3, 16, 16), (8, 16)]]
    shardings = [NamedSharding(mesh, spec) for spec in (P("data"), P(None, "data", "mdl"), P("mdl", "data"))]
    closed = jax.make_jaxpr(fn)(*arrays)
    new = exchange_order.ordered(closed, shardings, 3)
    (x, y), ours = (jax.jit(core.jaxpr_as_fun(p), in_shardings=shardings)(*arrays) for p in (closed, new))
    np.testing.assert_allclose(ours[0], x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours[1], y, rtol=1e-5, atol=1e-6)
    if fn in (of_a_platform, written_and_read):
        assert new is closed
    else:
        text = jax.jit(core.jaxpr_as_fun(new), in_shardings=shardings).lower(*arrays).compile().as_text()
        assert unordered(text)[1] == []


def test_operations_keep_their_names():
    def fn(x, stacked):
        with jax.named_scope("outer"):
            return jax.checkpoint(lambda x: jnp.sum(jax.jit(layers)(x, stacked)))(x)

    arrays = [np.ones((8, 16), np.float32), np.ones((3, 16, 16), np.float32)]
    closed = jax.make_jaxpr(jax.grad(fn))(*arrays)
    names = [
        set(re.findall(r'op_name="([^"]*while)"', jax.jit(core.jaxpr_as_fun(p)).lower(*arrays).compile().as_text()))
        for p in (closed, exchange_order.ordered(closed))
    ]
    assert names[0] == names[1]
    assert any("transpose" in name and "outer" in name for name in names[0])


def test_programs_without_loops_stay_as_they_are():
    closed = jax.make_jaxpr(lambda x: x @ x.T)(np.ones((8, 8), np.float32))
    assert exchange_order.ordered(closed) is closed

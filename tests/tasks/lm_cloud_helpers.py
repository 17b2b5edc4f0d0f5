"""Loads paxml's published experiment files with their imports renamed, and compares configs."""

import importlib.util
import pathlib
import re
import sys
import types

import fiddle as fdl
import jax
import numpy as np

from spmd_trainer import partitioning

# Small enough to train: what is left of a published model when its sizes are overridden.
TINY = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 32,
    "HIDDEN_DIMS": 64,
    "VOCAB_SIZE": 64,
    "MAX_SEQ_LEN": 16,
    "PERCORE_BATCH_SIZE": 1,
    "LEARNING_RATE": 4.0,  # the schedule begins at a 4000th of it
}


def moved_over(name: str) -> str:
    """The text of paxml/tasks/lm/NAME with `paxml` renamed in its import lines, and nothing else. paxml isn't imported."""
    root = importlib.util.find_spec("paxml").submodule_search_locations[0]
    text = (pathlib.Path(root) / "tasks" / "lm" / name).read_text()
    return re.sub(r"(?m)^(from|import) paxml\b", r"\1 spmd_trainer", text)


def load(monkeypatch, name: str, text: str) -> types.ModuleType:
    """A module made of a text, known by its name until the monkeypatch ends."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def flattened(config) -> dict[str, str]:
    """Every field of a config by path."""

    def walk(value, path):
        if isinstance(value, fdl.Buildable):
            yield path, fdl.get_callable(value).__qualname__
            for name, child in fdl.ordered_arguments(value, include_defaults=True).items():
                yield from walk(child, f"{path}.{name}")
        else:
            yield path, repr(value)

    return dict(walk(config, "task"))


def differences(ours, theirs) -> dict[str, tuple[str | None, str | None]]:
    """The fields in which two configs differ, by path."""
    ours, theirs = flattened(ours), flattened(theirs)
    return {path: (ours.get(path), theirs.get(path)) for path in ours | theirs if ours.get(path) != theirs.get(path)}


def num_params(task, inputs_shape) -> int:
    """Elements of a built task's trainable variables, from the abstract initialisation."""
    variables = task.model.abstract_init_with_metadata(inputs_shape)
    return sum(int(np.prod(v.full_shape)) for v in jax.tree.leaves(variables["params"]))


def train(task_p, batch, steps: int = 4) -> list[float]:
    """Losses of a few steps on one batch, on the mesh that the task declares."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    key = jax.random.key(0)
    state, _, _, train_step, _, _ = partitioning.partition_spmd_model(task_p, key, shapes)
    losses = []
    for _ in range(steps):
        state, loss, *_ = train_step(state, key, batch)
        losses.append(float(loss))
    return losses

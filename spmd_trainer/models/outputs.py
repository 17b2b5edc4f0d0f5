"""Checks the results of a model's functions, and converts metrics to the step's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.train_states import PyTree

LOSS = "loss"
_FORM = "return (loss, weight), or {'loss': (loss, weight), ...}, all scalars"


def metrics(found: Any) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, clu_metrics.Metric]]:
    """Returns the metrics of a loss function as {name: (mean value, weight)} and {name: clu metric}. `found`: the result of
    `task.model.loss`.

    clu's averages (`Average`, `Accuracy`, ...) become pairs, so that a loss can be one. The metrics of a clu `Collection` have
    the names of its fields.

    Raises:
      UserError: a metric has another form; names it and its shape.
    """
    if isinstance(found, tuple) and len(found) == 2:
        found = {LOSS: found}
    elif isinstance(found, clu_metrics.Collection):
        found = {"": found}
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"task.model.loss returns {_shown(found)}; {_FORM}")
    scalars: dict[str, tuple[jax.Array, jax.Array]] = {}
    others: dict[str, clu_metrics.Metric] = {}
    for name, value in _each(found):
        if name in scalars or name in others:
            raise UserError(
                f"task.model.loss returns two metrics named {name!r}; a clu Collection gives its fields' names"
            )
        if _is_average(value):
            count = jnp.asarray(value.count, jnp.float32)
            scalars[name] = _pair(name, (value.total / jnp.where(count == 0, 1.0, count), count))
        elif isinstance(value, clu_metrics.Metric):
            others[name] = value
        else:
            scalars[name] = _pair(name, value)
    return scalars, others


def _each(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the metrics by name; a clu Collection yields its metrics one by one."""
    for name, value in found.items():
        if isinstance(value, clu_metrics.Collection):
            # The only field with an underscore is clu's own counter.
            yield from ((field, metric) for field, metric in vars(value).items() if not field.startswith("_"))
        else:
            yield str(name), value


def _is_average(value: Any) -> bool:
    """Returns True for a clu metric with value total / count, which is merged by adding both up."""
    own, average = type(value), clu_metrics.Average
    return isinstance(value, average) and own.compute is average.compute and own.merge is average.merge


def _pair(name: str, value: Any) -> tuple[jax.Array, jax.Array]:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise UserError(f"task.model.loss: metric {name!r} is {_shown(value)}; give (value, weight), two scalars")
    if not all(jax.tree_util.all_leaves([part]) for part in value):
        raise UserError(f"task.model.loss: metric {name!r} is {_shown(value)}; {_FORM}")
    for what, part in zip(("value", "weight"), value, strict=True):
        shape = jnp.shape(part)
        if shape:
            fix = "take its mean over the batch" if what == "value" else "give the sum of the examples' weights"
            raise UserError(f"task.model.loss: the {what} of metric {name!r} has shape {shape}, not (); {fix}")
    return jnp.asarray(value[0]), jnp.asarray(value[1], jnp.float32)


def written(path: tuple[Any, ...], new: Any, old: jax.Array) -> jax.Array:
    """Returns the new value of a variable that the forward pass wrote, in the variable's dtype.

    Args:
      path: the variable's path, as keys of `jax.tree_util`.
      new: its new value.
      old: its value before.

    Raises:
      UserError: the forward pass changed its shape.
    """
    if jnp.shape(new) != old.shape:
        raise UserError(
            f"the forward pass changes the shape of {path_str(path)} from {old.shape} to {jnp.shape(new)}; a train state has "
            "fixed shapes"
        )
    return jnp.asarray(new, old.dtype)


def check_per_example(found: PyTree, batch: PyTree, what: str) -> None:
    """Checks that arrays have the batch as dimension 0.

    Raises:
      UserError: an array has another dimension 0; the message names it, its shape and the number of rows.
    """
    rows = num_rows(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != rows:
            name = jax.tree_util.keystr(path) or "its result"
            raise UserError(
                f"{what} returns {name} of shape {shape}; the batch has {rows} rows, and dimension 0 must be those rows"
            )


def num_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch: of its `eval_sample_weights`, or of its first array with a dimension."""
    weights = batch.get("eval_sample_weights") if isinstance(batch, Mapping) else None
    arrays = [weights] if weights is not None else [x for x in jax.tree.leaves(batch) if x.ndim]
    return int(arrays[0].shape[0])


def entry(batch: PyTree, name: str, field: str) -> Any:
    """Returns an entry of a batch.

    Raises:
      UserError: the batch lacks this entry.
    """
    if name not in batch:
        raise UserError(f"{field}: the batch has no entry {name!r}{did_you_mean(name, list(batch))}")
    return batch[name]


def _shown(value: Any) -> str:
    shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", value)
    return f"{shapes!r:.200}"

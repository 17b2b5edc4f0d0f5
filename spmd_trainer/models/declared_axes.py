"""Converts the sharding that a Flax module declares for its variables to praxis' WeightHParams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
from praxis import base_layer

from spmd_trainer.errors import UserError, did_you_mean

# Statistics and counters keep their own dtype: a bfloat16 counter could not count past 256.
_NOT_TRAINABLE = (
    base_layer.WeightHParamsCollection.NON_TRAINABLE,
    base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION,
)
# With the `shard_map` partitioner, each device computes statistics of its own rows, so they must be averaged over devices.
_MEAN = (*_NOT_TRAINABLE, base_layer.WeightHParamsCollection.REQUIRES_MEAN_SYNC)


def boxed(
    value: Any,
    names: Sequence[str | Sequence[str] | None] | None,
    *,
    path: str,
    rules: Sequence[tuple[str, Any]],
    trainable: bool,
) -> base_layer.BoxedParam:
    """Returns a variable in a praxis `BoxedParam` that holds the sharding which the variable's module declares.

    Args:
      value: the variable's value.
      names: the axis names with which the module annotates the variable: one name, several names or None for each dimension.
        `names` is None if the variable has no annotation.
      path: the variable's path, for error messages.
      rules: `ModuleModel.logical_axis_rules`.
      trainable: True if the optimizer updates the variable.

    Raises:
      UserError: an axis has no rule, or the number of axes differs from the number of dimensions.
    """
    mapping = None
    if names is not None:
        if len(names) != len(value.shape):
            raise UserError(
                f"{path} has shape {tuple(value.shape)} and is annotated with {len(names)} axes: {tuple(names)}"
            )
        mapping = list(_mesh_axes(names, rules, path))
    collections = None if trainable else list(_MEAN)
    return base_layer.BoxedParam(
        value=value,
        meta=base_layer.WeightHParams(
            shape=tuple(value.shape), dtype=value.dtype, collections=collections, tensor_split_dims_mapping=mapping
        ),
    )


def _mesh_axes(names: Sequence[Any], rules: Sequence[tuple[str, Any]], path: str) -> Sequence[Any]:
    if not rules:
        return [list(name) if isinstance(name, tuple | list) else name for name in names]
    known = [name for name, _ in rules]
    for name in names:
        if name is not None and name not in known:
            raise UserError(
                f"{path} is annotated with the logical axis {name!r}, which task.model.logical_axis_rules doesn't have"
                f"{did_you_mean(str(name), known)}; add it, with None if it is not split"
            )
    try:
        spec = nn.logical_to_mesh_axes(tuple(names), tuple(rules)) or ()
    except ValueError as error:
        raise UserError(f"{path} is annotated with {tuple(names)}: {error}") from error
    found = [*spec, *[None] * (len(names) - len(spec))]
    first = dict(reversed(list(rules)))
    for name, axes in zip(names, found, strict=True):
        # A later rule (name, None) for this axis says that leaving it unsharded is intended.
        if (
            name is not None
            and axes is None
            and first[name] is not None
            and (name, None) not in list(map(tuple, rules))
        ):
            raise UserError(
                f"{path} is annotated with {tuple(names)}: {name!r} would not be split, because another of these axes is split "
                f"over {first[name]!r} already; add another rule for it, or ({name!r}, None)"
            )
    return [list(axes) if isinstance(axes, tuple) else axes for axes in found]

"""Wraps Flax Linen modules as models for the trainer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta, unfreeze
from praxis import base_layer, pax_fiddle

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.models import declared_axes
from spmd_trainer.models.base import GatheredVariables, ModuleModel
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.train_states import NestedJTensor, PyTree

# {known name of an argument or field that selects training or evaluation: its value in training}.
_MODE_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# Flax's collection for fp8 scales. A step sets these variables to their gradients.
_OVERWRITTEN = "_overwrite_with_gradient"


class LinenModel(ModuleModel):
    """A Flax Linen module as a model.

    The optimizer updates the collection 'params'. Other collections, such as 'batch_stats', are kept in the train state with the
    values that the module writes, except `dropped_collections`.

    Attributes:
      module: config of the module's class.
      mode_argument: name of the `__call__` argument, or of the module's field, that selects training or evaluation. Known names
        are `train`, `training`, `is_training` (True in training), `deterministic` and `use_running_average` (False in
        training). For an unknown name or several names, give {name: value in training}. None finds the `__call__` argument with
        a known name, or else the field with a known name. '' leaves the mode as the module sets it.
      rng_streams: names of the random streams that the module draws from in training. Initialization also has 'params'.
      dropped_collections: collections that are not kept in the train state, e.g. because the module sows intermediates in them.
    """

    # Flax unboxes a variable when a module reads it. `nn.scan` slices dimension 0 of its variables, which nothing marks.
    gathered_variables = GatheredVariables(where_read=True, stacked_dims=1)

    module: pax_fiddle.Config[Any] = pax_fiddle.template_field(None)
    mode_argument: str | Mapping[str, bool] | None = None
    rng_streams: Sequence[str] = ("dropout",)
    dropped_collections: Sequence[str] = ("intermediates",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.module is None:
            raise UserError("task.model.module is not set; give a config of a flax.linen.Module")

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        arguments = jax.tree.map(self._cast, self.arguments(inputs))
        module, mode = self._in_mode(do_eval=False)
        variables = unfreeze(module.init(self._rngs(key, "params"), *arguments, **mode))
        if _OVERWRITTEN in variables:
            raise UserError("task.model.module has fp8 scales, which LinenModel does not support")
        boxed = {
            name: jax.tree_util.tree_map_with_path(
                lambda path, value, name=name: self._boxed(path_str(path), value, trainable=name == "params"),
                collection,
                is_leaf=lambda x: isinstance(x, meta.AxisMetadata),
            )
            for name, collection in variables.items()
            if name not in self.dropped_collections
        }
        params = boxed.pop("params", {})
        return {base_layer.PARAMS: params, **({base_layer.NON_TRAINABLE: boxed} if boxed else {})}

    def run(
        self, mdl_vars: NestedJTensor, arguments: tuple[Any, ...], key: jax.Array, *, do_eval: bool
    ) -> tuple[Any, PyTree]:
        kept = mdl_vars.get(base_layer.NON_TRAINABLE, {})
        module, mode = self._in_mode(do_eval=do_eval)
        outputs, written = module.apply(
            {"params": mdl_vars[base_layer.PARAMS], **kept},
            *arguments,
            **mode,
            rngs={} if do_eval else self._rngs(key),
            mutable=[*kept, *self.dropped_collections],
        )
        new = {name: unfreeze(written[name]) for name in kept}
        for name in kept:
            if jax.tree.structure(new[name]) != jax.tree.structure(unfreeze(kept[name])):  # type: ignore[operator]
                raise UserError(
                    f"task.model.module sows into its collection {name!r}, which is kept between steps. Name the collection in "
                    "task.model.dropped_collections, and return what the loss needs"
                )
        return outputs, new

    def for_generate(self, mdl_vars: NestedJTensor) -> NestedJTensor:
        """Returns the variables as Linen's `apply` takes them: {collection: variables}, for 'params' and all kept collections."""
        return {"params": mdl_vars[base_layer.PARAMS], **mdl_vars.get(base_layer.NON_TRAINABLE, {})}

    @functools.cached_property
    def _module(self) -> nn.Module:
        module = pax_fiddle.build(self.module)
        if not isinstance(module, nn.Module):
            raise UserError(f"task.model.module makes a {type(module).__name__}, which is not a flax.linen.Module")
        return module

    def _in_mode(self, *, do_eval: bool) -> tuple[Any, dict[str, bool]]:
        """Returns the module set to training or evaluation, and the `__call__` arguments that select training or evaluation."""
        values = {name: value is not do_eval for name, value in self._mode_arguments.items()}
        arguments = {name: value for name, value in values.items() if name in _call_arguments(self._module)}
        fields: dict[str, Any] = {name: value for name, value in values.items() if name not in arguments}
        return (self._module.clone(**fields) if fields else self._module), arguments

    @functools.cached_property
    def _mode_arguments(self) -> dict[str, bool]:
        """{name: value in training} for the arguments or fields of the module that select training or evaluation."""
        in_call, fields = _call_arguments(self._module), _fields(self._module)
        if self.mode_argument is not None:
            given = self.mode_argument
            values = dict(given) if isinstance(given, Mapping) else _known_meaning(given)
            for name in values:
                if name not in in_call and name not in fields:
                    known = [*in_call, *fields]
                    raise UserError(
                        f"task.model.mode_argument: {type(self._module).__name__} has neither an argument nor a field {name!r}"
                        f"{did_you_mean(name, known)}; it has {', '.join(known) or 'none'}"
                    )
            return values
        found = [name for name in _MODE_ARGUMENTS if name in in_call] or [
            name for name in _MODE_ARGUMENTS if name in fields
        ]
        if len(found) > 1:
            every = {name: _MODE_ARGUMENTS[name] for name in found}
            raise UserError(
                f"{type(self._module).__name__} has several settings for training or evaluation: {', '.join(found)}. Set "
                f"task.model.mode_argument to one of them, or to {every} for all"
            )
        for name in found:
            if name not in in_call and name in self.module.__arguments__:
                raise UserError(
                    f"task.model.module sets {name}, which LinenModel sets itself in training and in evaluation; leave it out, "
                    "or set task.model.mode_argument='' to keep it as it is"
                )
        return {name: _MODE_ARGUMENTS[name] for name in found}

    def _rngs(self, key: jax.Array, *more: str) -> dict[str, jax.Array]:
        names = [*more, *self.rng_streams]
        return dict(zip(names, jax.random.split(key, len(names)), strict=True)) if names else {}

    def _boxed(self, path: str, value: Any, *, trainable: bool) -> base_layer.BoxedParam:
        names = getattr(value, "names", None)
        array = value.unbox(apply_constraint=False) if isinstance(value, nn.Partitioned) else meta.unbox(value)
        return declared_axes.boxed(array, names, path=path, rules=self.logical_axis_rules, trainable=trainable)


def _call_arguments(module: nn.Module) -> list[str]:
    _, *names = inspect.signature(type(module).__call__).parameters
    return names


def _fields(module: nn.Module) -> list[str]:
    return [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]


def _known_meaning(name: str) -> dict[str, bool]:
    if name and name not in _MODE_ARGUMENTS:
        raise UserError(
            f"task.model.mode_argument is {name!r}, which may mean both training and evaluation; give "
            f"{{{name!r}: its value in training}}, e.g. {{{name!r}: False}}"
        )
    return {name: _MODE_ARGUMENTS[name]} if name else {}

"""Wraps Flax NNX modules as models for the trainer."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from flax.core import meta
from praxis import base_layer, pax_fiddle

from spmd_trainer.errors import UserError, not_a_config
from spmd_trainer.models import declared_axes
from spmd_trainer.models.base import ModuleModel
from spmd_trainer.train_states import NestedJTensor, PyTree

_Path: TypeAlias = tuple[Any, ...]
# Flax's names for the metadata that annotates a variable's axes, in its newest and in earlier versions.
_AXES = ("out_sharding", "sharding_names", "sharding")


class NnxModel(ModuleModel):
    """A Flax NNX module as a model.

    The optimizer updates `nnx.Param`s, including subclasses. All other variables, such as batch-norm statistics, are kept in the
    train state with the values that the module writes. Random streams are not kept: each step seeds them from its PRNG key, so a
    resumed run draws the same numbers as an uninterrupted run. Intermediates (`sow`) are dropped. The trainer calls
    `module.train()` or `module.eval()` to select training or evaluation.

    Attributes:
      module: config of the module's class; the trainer adds the argument `rngs`. Variables that several submodules share (tied
        weights) are stored once.
    """

    module: pax_fiddle.Config[Any] = pax_fiddle.template_field(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.module is None:
            raise UserError(
                "task.model.module is not set; give a config of an nnx.Module, e.g. Config(MyNet, features=64)"
            )
        if not isinstance(self.module, fdl.Buildable):
            raise not_a_config("task.model.module", self.module)

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        del inputs
        flat: dict[_Path, Any] = {}
        for path, variable in _variables(self._build(key)):
            trainable = isinstance(variable, nnx.Param)
            flat[_stored_path(path, variable)] = declared_axes.boxed(
                variable.get_value(),
                _axes(variable),
                path=_text(path),
                rules=self.logical_axis_rules,
                trainable=trainable,
            )
        return {base_layer.PARAMS: {}, **traverse_util.unflatten_dict(flat)}  # type: ignore[no-untyped-call]

    def run(
        self, mdl_vars: NestedJTensor, arguments: tuple[Any, ...], key: jax.Array, *, do_eval: bool
    ) -> tuple[Any, PyTree]:
        """Calls the module. Returns the module's output and the new values of the variables that aren't trainable.

        Raises UserError if the call writes a trainable variable, or adds or removes variables.
        """
        module = self._module(mdl_vars, key, do_eval=do_eval)
        before = dict(_variables(module))
        outputs = module(*arguments)
        after = dict(_variables(module))
        _check_structure(before, after)
        written: dict[_Path, Any] = {}
        for path, variable in after.items():
            if not isinstance(variable, nnx.Param):
                written[_stored_path(path, variable)] = variable.get_value()
            elif variable is not before[path]:
                _refuse_write(_text(path), None, None)  # replaced by another Param, which the hook can't notice
        collections = traverse_util.unflatten_dict(written)  # type: ignore[no-untyped-call]
        return outputs, collections.get(base_layer.NON_TRAINABLE, {})

    def for_generate(self, mdl_vars: NestedJTensor) -> Any:
        """Returns the module with its variables, in evaluation mode."""
        return self._module(mdl_vars, jax.random.key(0), do_eval=True)

    def _module(self, mdl_vars: NestedJTensor, key: jax.Array, *, do_eval: bool) -> Any:
        graphdef, abstract = self._abstract
        stored = traverse_util.flatten_dict(mdl_vars)  # type: ignore[no-untyped-call]
        flat = []
        for path, variable in abstract:
            if isinstance(variable, nnx.RngState):
                value = _random(variable, path, key)
            else:
                # A partitioner may pass variables in boxes, which gather a variable when it is unboxed.
                value = meta.unbox(stored[_stored_path(path, variable)])
            variable = variable.replace(value)
            # The step has decided the sharding. With axes set, Flax's transformations would look them up in the mesh.
            for name in _AXES:
                if name in variable.get_metadata():
                    variable.set_metadata(name, None)
            if isinstance(variable, nnx.Param):
                hooks = variable.get_metadata().get("on_set_value", ())
                own = functools.partial(_refuse_write, _text(path))
                variable.set_metadata(on_set_value=(own, *(hooks if isinstance(hooks, tuple) else (hooks,))))
            flat.append((path, variable))
        module = nnx.merge(graphdef, nnx.from_flat_state(flat))
        # Flags such as `deterministic` and `use_running_average`, as Flax sets them.
        module.eval() if do_eval else module.train()
        return module

    @functools.cached_property
    def _abstract(self) -> tuple[Any, list[tuple[_Path, Any]]]:
        structure = []

        def build() -> Any:
            graphdef, state = nnx.split(self._build(jax.random.key(0)))
            structure.append(graphdef)
            return state

        # Not `nnx.eval_shape`, which looks the variables' axes up in the mesh.
        flat = list(nnx.to_flat_state(jax.eval_shape(build)))
        return structure.pop(), flat

    def _build(self, key: jax.Array) -> Any:
        # The trainer lays variables out itself; Flax would need a mesh here.
        with nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            module = pax_fiddle.build(self.module.clone().set(rngs=nnx.Rngs(key)))
        if not isinstance(module, nnx.Module):
            raise UserError(f"task.model.module makes a {type(module).__name__}, which is not an nnx.Module")
        _check_attributes(module)
        return module


def _variables(module: Any) -> Iterator[tuple[_Path, Any]]:
    """Yields (path, variable) for the variables of a module, except random streams and intermediates."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if not isinstance(variable, nnx.Variable):
            raise UserError(
                f"task.model.module keeps {_text(path)} as {type(variable).__name__}, not as an nnx.Variable; nnx.WeightNorm and "
                "the like are not supported"
            )
        if not isinstance(variable, nnx.RngState | nnx.Intermediate):
            yield path, variable


def _check_attributes(module: nnx.Module) -> None:
    """Raises UserError if a module has a JAX array as a plain attribute, which would leak from one JAX trace into others."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in vars(node).items():
                if isinstance(value, jax.Array):
                    raise UserError(
                        f"task.model.module has a JAX array as its attribute {_text((*path, name))}; make it an nnx.Variable, "
                        "or a NumPy array if it is constant"
                    )


def _random(variable: Any, path: _Path, key: jax.Array) -> jax.Array:
    """Returns the initial value of a random stream's key or counter (`variable`) in a step with the PRNG key `key`."""
    shape = variable.get_value().shape
    if not isinstance(variable, nnx.RngKey):
        return jnp.zeros(shape, variable.get_value().dtype)
    own = jax.random.fold_in(key, zlib.crc32(_text(path).encode()))
    return jax.random.split(own, shape) if shape else own


def _axes(variable: Any) -> Any:
    metadata = variable.get_metadata()
    return next((metadata[name] for name in _AXES if metadata.get(name) is not None), None)


def _refuse_write(path: str, variable: Any, value: Any) -> None:
    """Raises UserError. Trainable parameters call this hook if the forward pass assigns a value, which would be lost."""
    del variable, value
    raise UserError(
        f"task.model.module writes its parameter {path} in the forward pass, where only the optimizer may; make it an "
        "nnx.Variable of another type, e.g. nnx.BatchStat"
    )


def _check_structure(before: Mapping[_Path, Any], after: Mapping[_Path, Any]) -> None:
    for path in [*before, *after]:
        if path not in after or path not in before:
            change = "adds" if path in after else "removes"
            raise UserError(
                f"task.model.module {change} the variable {_text(path)} in the forward pass; create all variables in __init__"
            )


def _text(path: _Path) -> str:
    return "/".join(str(part) for part in path)


def _stored_path(path: _Path, variable: Any) -> _Path:
    """Returns a variable's path in the train state: the name of its collection, then its path in the module as strings."""
    return (base_layer.PARAMS if isinstance(variable, nnx.Param) else base_layer.NON_TRAINABLE, *map(str, path))

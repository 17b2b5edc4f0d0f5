"""Models that consist of plain functions on dicts of arrays, for hand-written JAX, Equinox and Haiku."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax.core import meta
from praxis import base_layer

from spmd_trainer.errors import UserError
from spmd_trainer.models import declared_axes
from spmd_trainer.models.base import ModuleModel
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.train_states import NestedJTensor, PyTree


class FunctionModel(ModuleModel):
    """A model that consists of two functions, `init` and `apply`.

    Attributes:
      init: function from a PRNG key to the parameters, nested dicts of arrays. With `has_state`, it returns (parameters, state);
        the optimizer doesn't update the state.
      apply: function (parameters, *inputs) -> outputs. With `has_state`, (parameters, state, *inputs) -> (outputs, new state). If
        it has an argument `key`, this is the step's PRNG key; if it has an argument `train`, this is True in training.
      has_state: True if `init` and `apply` use a state, e.g. statistics of batch norm.
    """

    init: Callable[[jax.Array], PyTree] | None = None
    apply: Callable[..., Any] | None = None
    has_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("init", "apply"):
            if getattr(self, name) is None:
                raise UserError(f"task.model.{name} is not set; FunctionModel needs the functions init and apply")

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        del inputs
        assert self.init is not None
        params, state = self.init(key) if self.has_state else (self.init(key), {})

        def box(trainable: bool) -> Callable[[Any, Any], Any]:
            return lambda path, x: declared_axes.boxed(x, None, path=path_str(path), rules=(), trainable=trainable)

        tree = {base_layer.PARAMS: jax.tree_util.tree_map_with_path(box(True), params)}
        if self.has_state:
            tree[base_layer.NON_TRAINABLE] = jax.tree_util.tree_map_with_path(box(False), state)
        return tree

    def run(
        self, mdl_vars: NestedJTensor, arguments: tuple[Any, ...], key: jax.Array, *, do_eval: bool
    ) -> tuple[Any, PyTree]:
        """Calls `apply`. Returns its outputs and the new state, {} without `has_state`.

        Raises UserError if the new state's tree structure differs from that of the old state.
        """
        assert self.apply is not None
        known = inspect.signature(self.apply).parameters
        named = {name: value for name, value in {"key": key, "train": not do_eval}.items() if name in known}
        params = self.for_generate(mdl_vars)
        if not self.has_state:
            return self.apply(params, *arguments, **named), {}
        state = mdl_vars[base_layer.NON_TRAINABLE]
        outputs, new = self.apply(params, state, *arguments, **named)
        before, after = str(jax.tree.structure(state)), str(jax.tree.structure(new))
        if before != after:
            raise UserError(f"task.model.apply returns a state of structure {after}; it was {before}")
        return outputs, new

    def for_generate(self, mdl_vars: NestedJTensor) -> NestedJTensor:
        # A partitioner may pass variables in boxes, which gather a variable when it is unboxed.
        unboxed: NestedJTensor = meta.unbox(mdl_vars[base_layer.PARAMS])
        return unboxed

"""`LoraModel`, a `Model` with adapters. It traces the base model and replaces the weights in its matrix products."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from absl import logging
from flax.core import meta
from praxis import base_layer

from spmd_trainer.decoder.lora import adapted_weight, uses, variables
from spmd_trainer.decoder.lora.interpreter import Interpreter
from spmd_trainer.decoder.lora.settings import Lora
from spmd_trainer.errors import UserError
from spmd_trainer.models.base import ForwardResult, Model, ModuleModel, praxis_rngs
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.step import masks, matrix_uses
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree

# Collections that the forward pass of a frozen base must not change.
_KEPT = (base_layer.NON_TRAINABLE, *base_layer.NON_PAX_VAR_COLLECTION)
_PROBE_MUTABLE = (base_layer.AUX_LOSS, base_layer.SUMMARIES, *_KEPT)
# Axis names of Flax modules' parameters: metadata, not variables.
_AXES = "params_axes"
_ROWS = "adapter"


_mesh: contextvars.ContextVar[jax.sharding.AbstractMesh | None] = contextvars.ContextVar(
    "mesh to trace on", default=None
)


@contextlib.contextmanager
def traced_on(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Context manager that sets the mesh for `init_variables`, which traces the forward pass to see how targets are used."""
    token = _mesh.set(mesh.abstract_mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


@dataclasses.dataclass
class LoraModel:
    """A `Model` that consists of a frozen base model and adapters. Targets are those base variables that have adapters.

    Attributes:
      base: the model without adapters.
      settings: the adapters' settings.
      fprop_dtype: dtype of the base model's computations; a training step casts variables to it.
      dims: {path of a target: its stack, input and output dimensions}; None until the model has been traced.
    """

    base: Model
    settings: Lora
    fprop_dtype: Any = jnp.float32
    dims: dict[str, MatrixDims] | None = None
    # {target: names of the operations other than products that read it}, in a program that shows all products.
    _others: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    _warned: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        """Returns the base model's variables, marked frozen, and the adapters below 'params/lora'. See `Model`.

        Raises:
          UserError: a target is invalid, or the base model has variables below 'params/lora'.
        """
        boxed = self.base.init_variables(key, inputs)
        params = boxed[base_layer.PARAMS]
        if not isinstance(params, Mapping):
            raise UserError(f"task.lora needs a model whose parameters are a dict; they are a {type(params).__name__}")
        if variables.LORA in params:
            raise UserError(
                f"task.model has variables below 'params/{variables.LORA}', which task.lora uses for its adapters; rename them"
            )
        boxed = {
            name: tree if name == _AXES else jax.tree.map(_frozen, tree, is_leaf=_is_box)
            for name, tree in boxed.items()
        }
        values = base_layer.maybe_unbox_value(boxed)
        hparams = dict(masks.with_paths(base_layer.unbox_meta(boxed)))
        weights = dict(masks.with_paths(values))
        adapters = {}
        for path, roles in self._found_dims(values, inputs, key).items():
            own = {
                name: variables.adapter_hparams(self.settings, roles, name, hparams[path])
                for name in variables.names_of(self.settings)
            }
            initial = variables.initial_adapters(self.settings, roles, path, weights[path], own, key)
            adapters[path] = {name: base_layer.BoxedParam(value=initial[name], meta=own[name]) for name in initial}
        return variables.with_adapters(boxed, adapters)

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        """Runs the base model with adapters; see `Model`. Discards updates of the base model's variables, which are frozen."""
        if self.settings.reference:
            inputs = self._with_reference(mdl_vars, inputs, key)

        run = functools.partial(self.base.forward, do_eval=do_eval, mutable=mutable)
        dropping = self.settings.dropout and not do_eval
        outputs, written = self._run(run, mdl_vars, inputs, key, dropping=bool(dropping))
        return outputs, {name: tree for name, tree in written.items() if name not in _KEPT}

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        run = functools.partial(self.base.decode, mutable=mutable)
        found: ForwardResult = self._run(run, mdl_vars, inputs, key, dropping=False)
        return found

    def prepare(self, mdl_vars: NestedJTensor) -> NestedJTensor:
        """Sets DoRA's magnitudes to the norms of the base model's weights. If the base model was loaded after the adapters were
        initialized, call this method under jit. Takes and returns all variables, without padding.
        """
        if not self.settings.dora:
            return mdl_vars
        weights = dict(masks.with_paths(variables.base_only(mdl_vars)))
        return variables.with_adapters(
            mdl_vars,
            {
                path: {
                    **variables.adapters_of(mdl_vars, path),
                    variables.MAGNITUDE: variables.initial_magnitude(self.settings, roles, weights[path]),
                }
                for path, roles in self.matrix_dims().items()
            },
        )

    def merged(self, mdl_vars: NestedJTensor) -> NestedJTensor:
        """Merges the adapters into the base model's weights: W + scale * a b (with DoRA, times its gain). Call it under jit.

        Args:
          mdl_vars: all variables, without padding.

        Returns:
          The variables without 'params/lora'. Merged weights are computed in float32 and cast to the base model's dtypes.

        Raises:
          UserError: there are several adapters.
        """
        if self.settings.adapters is not None:
            raise UserError(
                f"task.lora.adapters are {list(self.settings.adapters)}, and a merged model has one; give a task with one adapter"
            )
        base, dims = variables.base_only(mdl_vars), self.matrix_dims()
        leaves = []
        for path, w in masks.with_paths(base):
            if path in dims:
                own = variables.adapters_of(mdl_vars, path)
                w = adapted_weight.merge(variables.adapted(self.settings, dims[path], path, w, own))
            leaves.append(w)
        return jax.tree.unflatten(jax.tree.structure(base), leaves)

    def matrix_dims(self) -> dict[str, MatrixDims]:
        """Returns {path of a target, e.g. 'params/lm/mlp/w': its stack, input and output dimensions}.

        Raises:
          RuntimeError: none of `init_variables`, `forward` and `decode` has been traced yet. A partitioner's `setup` does this.
        """
        if self.dims is None:
            raise RuntimeError("the adapters' targets are unknown until init_variables has been traced")
        return self.dims

    def split_like_base(
        self, hparams: NestedWeightHParams, base: NestedWeightHParams, reasons: PyTree
    ) -> tuple[NestedWeightHParams, PyTree]:
        """Shards each adapter like its weight. Returns `base` and `reasons` with added entries for the adapters.

        Args:
          hparams: WeightHParams of all variables.
          base: WeightHParams of the base model's variables, with their `tensor_split_dims_mapping`.
          reasons: a tree like `base` with a text for each variable, which explains how it is sharded.
        """
        weights = dict(masks.with_paths(base))
        found = {
            path: {
                name: variables.split_like_base(self.settings, roles, name, adapter, weights[path], path)
                for name, adapter in variables.adapters_of(hparams, path).items()
            }
            for path, roles in self.matrix_dims().items()
        }
        parts = ({path: {name: pair[i] for name, pair in own.items()} for path, own in found.items()} for i in range(2))
        return variables.with_adapters(base, next(parts)), variables.with_adapters(reasons, next(parts))

    def _found_dims(self, values: NestedJTensor, inputs: PyTree, key: jax.Array) -> dict[str, MatrixDims]:
        """Returns `matrix_dims()`. First traces the base model, if needed, with the variables cast as in a training step."""

        def run(base_vars: NestedJTensor, inputs: PyTree, key: jax.Array) -> ForwardResult:
            if self.settings.reference:
                inputs = self._with_reference(base_vars, inputs, key)
            return self.base.forward(base_vars, inputs, key, do_eval=True, mutable=_PROBE_MUTABLE)

        if self.dims is None:
            low = jnp.dtype(self.fprop_dtype) == jnp.bfloat16
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if low and x.dtype == jnp.float32 else x.dtype),
                values,
            )
            # The forward pass of modules of other libraries may name mesh axes; praxis gets its mesh in another way.
            mesh = _mesh.get() if isinstance(self.base, ModuleModel) else None
            with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
                jaxpr, _ = matrix_uses.traced(run, (shapes, inputs, key))
            self._find_dims(jaxpr, shapes)
        return self.matrix_dims()

    def _find_dims(self, jaxpr: Any, base_vars: PyTree) -> None:
        paths = {
            i: path
            for i, (path, x) in enumerate(_named_values(base_vars))
            if path.startswith(f"{base_layer.PARAMS}/") and jnp.issubdtype(x.dtype, jnp.floating)
        }
        found = matrix_uses.find_uses(jaxpr, paths)
        self.dims = uses.choose_targets(self.settings, found)
        self._others = {path: frozenset(found[path].others) for path in self.dims}

    def _traced(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, PyTree]:
        """Traces `fn`, which calls the base model. Returns its jaxpr and the shapes of its results.

        If a matrix product with a target is hidden in a loss computed in blocks, traces again with a loss computed from logits.
        """
        jaxpr, shapes = matrix_uses.traced(fn, args, shown=False)
        paths = {i: path for i, (path, _) in enumerate(_named_values(args[0])) if path in self.matrix_dims()}
        found = matrix_uses.find_uses(jaxpr, paths)
        hidden = [path for path, use in found.items() if not self._others.get(path, frozenset()).issuperset(use.others)]
        if not hidden:
            return jaxpr, shapes
        logging.info(
            "task.lora adapts %s, so the loss is computed from the logits of all tokens, not in blocks", hidden[0]
        )
        return matrix_uses.traced(fn, args)

    def _run(
        self, fn: Callable[..., Any], mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, dropping: bool
    ) -> Any:
        """Calls `fn(base variables, inputs, key)` with the targets replaced by adapted weights."""
        if self.settings.adapters is not None:
            self._check_rows(fn, mdl_vars, inputs, key)
        found, shapes = self._evaluated(fn, mdl_vars, inputs, key, dropping=dropping)
        found = [adapted_weight.merge(x) if isinstance(x, adapted_weight.AdaptedWeight) else x for x in found]
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    def _evaluated(
        self,
        fn: Callable[..., Any],
        mdl_vars: NestedJTensor,
        inputs: PyTree,
        key: jax.Array,
        *,
        dropping: bool,
        multiplied: list[tuple[str, tuple[int, ...]]] | None = None,
    ) -> tuple[list[Any], PyTree]:
        """Like `_run`, but returns the leaves of the results, which may include adapted weights, and the results' shapes."""
        base_vars = variables.base_only(mdl_vars)
        args = (base_vars, inputs, key)
        if self.dims is None:
            self._find_dims(matrix_uses.traced(fn, args)[0], base_vars)
        jaxpr, shapes = self._traced(fn, args)
        leaves = jax.tree.leaves(args)
        for i, (path, x) in enumerate(_named_values(base_vars)):
            if path in self.matrix_dims():
                leaves[i] = self._adapted(path, leaves[i], mdl_vars, whole=leaves[i] is x)
        masks_key = jax.random.fold_in(key, zlib.crc32(variables.LORA.encode())) if dropping else None
        interpreter = Interpreter(self._warn, self.settings.dropout, masks_key, self._rows(inputs), multiplied)
        return interpreter.run(jaxpr.jaxpr, jaxpr.consts, leaves), shapes

    def _check_rows(self, fn: Callable[..., Any], mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array) -> None:
        """Checks that in every product with a target, dimension 0 of the other operand is the batch.

        Traces the model with the batch, and with twice its rows: dimension 0 must double, and the others must stay the same.

        Raises:
          UserError: an operand fails this check; the message names the target.
        """
        rows = self._rows(inputs)
        assert rows is not None

        def shapes(times: int) -> list[tuple[str, tuple[int, ...]]]:
            found: list[tuple[str, tuple[int, ...]]] = []

            def run(mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array) -> int:
                self._evaluated(fn, mdl_vars, inputs, key, dropping=False, multiplied=found)
                return 0

            def repeated(x: Any) -> Any:
                per_row = jnp.ndim(x) and jnp.shape(x)[0] == rows.shape[0]
                shape = (times * x.shape[0], *x.shape[1:]) if per_row else jnp.shape(x)
                return jax.ShapeDtypeStruct(shape, x.dtype)

            jax.eval_shape(run, mdl_vars, jax.tree.map(repeated, inputs), key)
            return found

        for (path, once), (_, twice) in zip(shapes(1), shapes(2), strict=True):
            if once[0] % rows.shape[0] or twice != (2 * once[0], *once[1:]):
                raise UserError(
                    f"task.lora.adapters: the model multiplies {path} with an array of shape {once}, and of {twice} for "
                    "twice the rows; to choose an adapter for each row, dimension 0 must be the rows"
                )

    def _adapted(
        self, path: str, w: jax.Array, mdl_vars: NestedJTensor, *, whole: bool
    ) -> adapted_weight.AdaptedWeight:
        own = {name: x.unbox() if _is_box(x) else x for name, x in variables.adapters_of(mdl_vars, path).items()}
        weight = variables.adapted(self.settings, self.matrix_dims()[path], path, w, own)
        # Computes the gain of all stacked layers at once, before the loop over them, unless the loop gathers the weight.
        return adapted_weight.with_gain(weight) if whole else weight

    def _rows(self, inputs: PyTree) -> jax.Array | None:
        if self.settings.adapters is None:
            return None
        if _ROWS not in inputs:
            raise UserError(
                f"task.lora.adapters are {list(self.settings.adapters)}, and the batch has no entry {_ROWS!r} to choose one for "
                "each row; add it, int32 [rows], with an index into these names, or -1 for the base alone"
            )
        return jnp.asarray(inputs[_ROWS], jnp.int32)

    def _with_reference(self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array) -> PyTree:
        """Returns the batch with the reference log-probabilities, which the base model's method `with_reference` adds.

        Raises:
          UserError: the base model lacks this method.
        """
        model = getattr(self.base, "model", None)
        if model is None or not hasattr(model, "with_reference"):
            raise UserError(
                f"task.lora.reference=True, and task.model is a {type(model or self.base).__name__}, which compares with no "
                "reference; use decoder.preferences.model.PreferenceModel, or leave reference out"
            )
        found, _ = model.apply(
            variables.base_only(mdl_vars),
            inputs,
            method=model.with_reference,
            mutable=list(_PROBE_MUTABLE),
            rngs=praxis_rngs(key),
        )
        return found

    def _warn(self, path: str, operation: str) -> None:
        if (path, operation) not in self._warned:
            self._warned.add((path, operation))
            logging.warning(
                "task.lora: %s is read by %s, which needs the weight and its adapters merged: a copy of the weight in memory",
                path,
                operation,
            )


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _named_values(base_vars: PyTree) -> list[tuple[str, Any]]:
    """Returns (path, value) of each variable, in the order of `jax.tree.leaves`. A boxed variable counts as one value."""
    named = jax.tree_util.tree_leaves_with_path(base_vars, is_leaf=_is_box)
    return [(path_str(path), x) for path, x in named]


def _frozen(box: Any) -> base_layer.BoxedParam:
    hparams = base_layer.unbox_meta(box)
    collections = [*hparams.collections, base_layer.WeightHParamsCollection.NON_TRAINABLE, masks.FROZEN]
    return base_layer.BoxedParam(
        value=base_layer.maybe_unbox_value(box), meta=dataclasses.replace(hparams, collections=collections)
    )

"""The interface between a training, evaluation or decode step and its model, for praxis models and other libraries' models."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from absl import logging
from clu import metrics as clu_metrics
from flax import linen as nn
from flax.core import unfreeze
from praxis import base_hyperparams, base_layer

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.train_states import NestedJTensor, PyTree

# ((weighted scalars, outputs per example, clu metrics if there are any), collections that the model has written)
ForwardResult: TypeAlias = tuple[tuple[Any, ...], Mapping[str, PyTree]]
# Function from (the module's output, the batch) to metrics; see `loss_metrics`.
LossFn: TypeAlias = Callable[[Any, PyTree], Any]
LOSS = "loss"
_FORM = "return (loss, weight), or {'loss': (loss, weight), ...}, all scalars"


class Model(Protocol):
    """The interface of a model that training, evaluation and decode steps call. JAX must be able to trace all methods."""

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        """Returns the initial variables as {collection: variables}, nested dicts.

        A variable with a declared sharding is a praxis `BoxedParam`, whose `WeightHParams` hold the sharding.

        Args:
          key: PRNG key for the initialization.
          inputs: a batch.
        """
        ...

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        """Runs the model and computes its metrics.

        Args:
          mdl_vars: the variables as {collection: variables}.
          inputs: a batch.
          key: PRNG key of this step.
          do_eval: True in evaluation, False in training.
          mutable: names of the collections that the model may write.

        Returns:
          Two items: a tuple (weighted scalars, outputs per example, and clu metrics if there are any), and the collections that
          the model has written.
        """
        ...

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        """Decodes a batch. Arguments and results are those of `forward`."""
        ...


def as_model(model: Any) -> Model:
    """Returns a task's model as a `Model`; a praxis layer is wrapped in a `PraxisModel`."""
    return PraxisModel(model) if isinstance(model, base_layer.BaseLayer) else model


def praxis_rngs(key: jax.Array) -> dict[str, jax.Array]:
    params, random, non_pax = jax.random.split(key, 3)
    return {base_layer.PARAMS: params, base_layer.RANDOM: random, base_layer.NON_PAX_RNG_KEY: non_pax}


@dataclasses.dataclass(frozen=True)
class PraxisModel:
    """Wraps a praxis model as a `Model`. Ignores `do_eval`: praxis layers get it from praxis' context, where the step sets it.

    Attributes:
      model: the praxis model.
    """

    model: Any

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        # praxis' own `init` would remove the boxes.
        mutable, method = base_layer.DEFAULT_INIT_MUTABLE_LIST, self.model.__call__
        return unfreeze(nn.Module.init(self.model, praxis_rngs(key), inputs, method=method, mutable=mutable))

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        del do_eval
        method, rngs = self.model.__call__, praxis_rngs(key)
        result: ForwardResult = self.model.apply(mdl_vars, inputs, method=method, mutable=list(mutable), rngs=rngs)
        return result

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        method, rngs = self.model.decode, praxis_rngs(key)
        result: ForwardResult = self.model.apply(mdl_vars, inputs, method=method, mutable=list(mutable), rngs=rngs)
        return result


@dataclasses.dataclass(frozen=True)
class GatheredVariables:
    """Describes how a model all-gathers its variables. A partitioner may pass them to it sharded, each in a Flax box.

    Attributes:
      where_read: True if the module gets the boxes, so that a variable is gathered when a layer reads it. False if the model
        gathers all variables before it calls the module.
      stacked_dims: number of leading dimensions that the partitioner must not shard, because a loop such as `nn.scan` may run
        over them. It applies to variables of rank 2 or more.
    """

    where_read: bool
    stacked_dims: int = 0


class ModuleModel(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):  # type: ignore[misc]  # untyped
    """Base class of models of libraries other than praxis. Trainable variables are in the collection 'params', all other
    variables in 'non_trainable'.

    Attributes:
      inputs: what the module is called with. A name: this entry of the batch. Several names: these entries. A function of the
        batch: its result, which is one value or a tuple of values. None: the whole batch.
      loss: function (module's output, batch) -> (loss, weight), or -> {name: (mean value, weight)}. Both items of a pair are
        scalars: a mean over the batch's examples, and its weight, e.g. the number of examples. The learner minimizes the entry
        `loss_name`, by default 'loss'. If the function returns a scalar without a weight, its weight is the number of rows,
        padding rows included. Entries may also be clu metrics or clu `Collection`s of metrics, and the loss may be a clu
        `Average`. clu metrics are merged over batches, minibatches and devices. They are computed on the host, so `compute`
        must return a scalar or a dict of scalars. Give them the rows' weights as `mask`.
      per_example: function (module's output, batch) -> arrays with the batch as dimension 0, which evaluations can write to
        files; or None.
      generate: function (variables, batch, PRNG key) -> arrays with the batch as dimension 0, for `--mode=decode`; or None. For
        NNX models, the first argument is the module in evaluation mode.
      logical_axis_rules: for modules that annotate their variables with logical axes: a list of (logical axis, target), where
        the target is a mesh axis, a tuple of mesh axes, or None. If the list is empty, annotations name mesh axes.
      ici_mesh_shape: size of each mesh axis within a slice or host; None means a single axis 'data' over all devices.
      dcn_mesh_shape: size of each mesh axis across slices or hosts; None means a single slice.
      mesh_axis_names: names of the mesh axes.
      fprop_dtype: bfloat16 casts the float32 parameters and the float32 arguments of the module. The loss gets the batch
        uncast, and other variables keep their dtypes. None casts nothing.
    """

    # Name of the loss if the learner's `loss_name` is not set.
    default_loss_name: ClassVar[str] = LOSS
    gathered_variables: ClassVar[GatheredVariables] = GatheredVariables(where_read=False)

    inputs: str | Sequence[str] | Callable[[PyTree], Any] | None = None
    loss: LossFn | None = None
    per_example: Callable[[Any, PyTree], PyTree] | None = None
    generate: Callable[[Any, PyTree, jax.Array], PyTree] | None = None
    logical_axis_rules: Sequence[tuple[str, Any]] = ()
    ici_mesh_shape: Sequence[int] | None = None
    dcn_mesh_shape: Sequence[int] | None = None
    mesh_axis_names: Sequence[str] | None = None
    fprop_dtype: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is None:
            raise UserError(
                f"task.model.loss is not set; give a function (outputs, batch) -> (loss, weight) to {type(self).__name__}"
            )

    @abc.abstractmethod
    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        """Returns the initial variables as {collection: variables}; see `Model.init_variables`."""

    @abc.abstractmethod
    def run(
        self, mdl_vars: NestedJTensor, arguments: tuple[Any, ...], key: jax.Array, *, do_eval: bool
    ) -> tuple[Any, PyTree]:
        """Calls the module. Returns the module's output and the new value of the collection 'non_trainable'."""

    @abc.abstractmethod
    def for_generate(self, mdl_vars: NestedJTensor) -> Any:
        """Returns the first argument for the function `generate`: the variables, or a module that contains them."""

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        assert self.loss is not None
        arguments = jax.tree.map(self._cast, self.arguments(inputs))
        found, non_trainable = self.run(mdl_vars, arguments, key, do_eval=do_eval)
        before = mdl_vars.get(base_layer.NON_TRAINABLE, {})
        non_trainable = jax.tree_util.tree_map_with_path(_written, non_trainable, before)
        scalars, clu = loss_metrics(_with_weight(self.loss(found, inputs), inputs, do_eval=do_eval))
        per_example = {} if self.per_example is None else self.per_example(found, inputs)
        _check_per_example(per_example, inputs, "task.model.per_example")
        written = {base_layer.NON_TRAINABLE: non_trainable} if base_layer.NON_TRAINABLE in mutable else {}
        return (scalars, per_example, *([clu] if clu else [])), (written if jax.tree.leaves(non_trainable) else {})

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        del mutable
        if self.generate is None:
            raise UserError(
                "decoding needs task.model.generate: a function (variables, batch, key) -> arrays per example"
            )
        found = self.generate(self.for_generate(mdl_vars), inputs, key)
        _check_per_example(found, inputs, "task.model.generate")
        if "eval_sample_weights" in inputs:  # 0 for padding rows
            rows = jnp.sum(inputs["eval_sample_weights"].astype(jnp.float32))
        else:
            rows = jnp.asarray(_num_rows(inputs), jnp.float32)
        return ({"num_decoded": (rows, jnp.ones((), jnp.float32))}, found), {}

    def _cast(self, x: Any) -> Any:
        return x.astype(self.fprop_dtype) if self.fprop_dtype and x.dtype == jnp.float32 else x

    def arguments(self, batch: PyTree) -> tuple[Any, ...]:
        """Returns the module's arguments for a batch. Raises UserError if the batch lacks an entry that `inputs` names."""
        if self.inputs is None:
            return (batch,)
        if callable(self.inputs):
            found = self.inputs(batch)
            return found if isinstance(found, tuple) else (found,)
        names = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        return tuple(_entry(batch, name, "task.model.inputs") for name in names)


def vocabulary_size(task: Any) -> int | None:
    """Returns the vocabulary size in a task's config; None if the model has no vocabulary.

    It is `task.model.lm_tpl.vocab_size`, or `task.model.lm_tpl.spec.vocab_size` for models of `spmd_trainer.decoder`.
    """
    lm_p = getattr(task.model, "lm_tpl", None)
    vocab_size = getattr(lm_p, "vocab_size", None) or getattr(getattr(lm_p, "spec", None), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) and vocab_size else None


def loss_metrics(found: Any) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, clu_metrics.Metric]]:
    """Splits the result of `task.model.loss` into {name: (mean value, weight)} and {name: clu metric}.

    clu's averages (`Average`, `Accuracy`, ...) become (mean value, weight), so that the loss may be one of them. Each metric in
    a clu `Collection` is named after its field.

    Raises:
      UserError: a metric has none of the supported forms. The message names the metric and its shape.
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


def _with_weight(found: Any, batch: PyTree, *, do_eval: bool) -> Any:
    """Returns `found`, the result of a loss function. If it is a scalar without a weight, adds the number of rows as weight."""
    if not jax.tree_util.all_leaves([found]) or jnp.shape(found):
        return found
    if do_eval and isinstance(batch, Mapping) and "eval_sample_weights" in batch:
        logging.warning(
            "task.model.loss returns a loss without a weight, so rows that only fill an evaluation's last batch count in it; "
            "return (loss, weight) with the batch's eval_sample_weights to leave them out"
        )
    return found, jnp.asarray(_num_rows(batch), jnp.float32)


def _each(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, metric) for each metric. For a clu Collection, yields each of its metrics."""
    for name, value in found.items():
        if isinstance(value, clu_metrics.Collection):
            # The only field with an underscore is clu's own counter.
            yield from ((field, metric) for field, metric in vars(value).items() if not field.startswith("_"))
        else:
            yield str(name), value


def _is_average(value: Any) -> bool:
    """Returns True for a clu metric that computes total / count, and that is merged by adding totals and counts."""
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


def _written(path: tuple[Any, ...], new: Any, old: jax.Array) -> jax.Array:
    """Returns `new`, a variable's value after the forward pass, cast to the dtype of `old`, its value before.

    Raises UserError if the shape has changed. `path` is the variable's path, as keys of `jax.tree_util`.
    """
    if jnp.shape(new) != old.shape:
        raise UserError(
            f"the forward pass changes the shape of {path_str(path)} from {old.shape} to {jnp.shape(new)}; a train state has "
            "fixed shapes"
        )
    return jnp.asarray(new, old.dtype)


def _check_per_example(found: PyTree, batch: PyTree, what: str) -> None:
    """Raises UserError unless dimension 0 of each array in `found` has the batch's size. `what` names what returned `found`."""
    rows = _num_rows(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != rows:
            name = jax.tree_util.keystr(path) or "its result"
            raise UserError(
                f"{what} returns {name} of shape {shape}; the batch has {rows} rows, and dimension 0 must be those rows"
            )


def _num_rows(batch: PyTree) -> int:
    """Returns the number of rows of a batch, from `eval_sample_weights` or else from the first array that isn't a scalar."""
    weights = batch.get("eval_sample_weights") if isinstance(batch, Mapping) else None
    arrays = [weights] if weights is not None else [x for x in jax.tree.leaves(batch) if x.ndim]
    return int(arrays[0].shape[0])


def _entry(batch: PyTree, name: str, field: str) -> Any:
    if name not in batch:
        raise UserError(f"{field}: the batch has no entry {name!r}{did_you_mean(name, list(batch))}")
    return batch[name]


def _shown(value: Any) -> str:
    shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", value)
    return f"{shapes!r:.200}"

"""The interface between a step and its model, for praxis models and models of other libraries."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from praxis import base_hyperparams, base_layer

from spmd_trainer.errors import UserError
from spmd_trainer.models import outputs as outputs_lib
from spmd_trainer.train_states import NestedJTensor, PyTree

# ((weighted scalars, outputs per example, clu metrics if there are some), collections that were written)
ForwardResult: TypeAlias = tuple[tuple[Any, ...], Mapping[str, PyTree]]
# (the module's output, the batch) -> metrics; see `outputs.metrics`
LossFn: TypeAlias = Callable[[Any, PyTree], Any]


class Model(Protocol):
    """The methods of a model that a step calls. All of them can be traced."""

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        """Returns the variables by collection. A variable with a declared layout is a praxis BoxedParam with WeightHParams.

        Args:
          key: the key of the initialisation.
          inputs: a batch.
        """
        ...

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        """Runs the model and computes its metrics.

        Args:
          mdl_vars: the variables by collection.
          inputs: a batch.
          key: the key of this step.
          do_eval: True in evaluation, False in training.
          mutable: collections that may be written.
        """
        ...

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        """Decodes a batch; arguments as for `forward`."""
        ...


def as_model(model: Any) -> Model:
    """Returns a task's model as a `Model`; a praxis layer is wrapped in a `PraxisModel`."""
    return PraxisModel(model) if isinstance(model, base_layer.BaseLayer) else model


def praxis_rngs(key: jax.Array) -> dict[str, jax.Array]:
    params, random, non_pax = jax.random.split(key, 3)
    return {base_layer.PARAMS: params, base_layer.RANDOM: random, base_layer.NON_PAX_RNG_KEY: non_pax}


@dataclasses.dataclass(frozen=True)
class PraxisModel:
    """A praxis model as a `Model`. praxis reads `do_eval` from its context, which the step sets.

    Attributes:
      model: the praxis model.
    """

    model: Any

    def init_variables(self, key: jax.Array, inputs: PyTree) -> NestedJTensor:
        """See `Model`."""
        # praxis' own `init` would remove the boxes.
        mutable, method = base_layer.DEFAULT_INIT_MUTABLE_LIST, self.model.__call__
        return unfreeze(nn.Module.init(self.model, praxis_rngs(key), inputs, method=method, mutable=mutable))

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        """See `Model`."""
        del do_eval
        method, rngs = self.model.__call__, praxis_rngs(key)
        result: ForwardResult = self.model.apply(mdl_vars, inputs, method=method, mutable=list(mutable), rngs=rngs)
        return result

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        """See `Model`."""
        method, rngs = self.model.decode, praxis_rngs(key)
        result: ForwardResult = self.model.apply(mdl_vars, inputs, method=method, mutable=list(mutable), rngs=rngs)
        return result


@dataclasses.dataclass(frozen=True)
class GatheredVariables:
    """How a model reads variables that a partitioner splits and boxes, and that must be gathered before use.

    Attributes:
      where_read: True if the module gets the boxes, and each layer gathers what it reads; False if the model gathers all
        variables before it calls the module.
      stacked_dims: number of dimensions at the front of a variable of rank 2 or more that a loop may run over; they must stay
        whole.
    """

    where_read: bool
    stacked_dims: int = 0


class ModuleModel(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):  # type: ignore[misc]  # untyped
    """A model of another library. Its trainable variables are the collection 'params', all others 'non_trainable'.

    Attributes:
      inputs: the module's arguments: the name of an entry of the batch, several names, a function of the batch that returns
        one value or a tuple, or None for the whole batch.
      loss: (the module's output, the batch) -> (loss, weight), or {name: (mean value, weight)} with an entry 'loss'. All
        are scalars: means over the batch's examples, and the weight of the mean, e.g. the number of examples. The learner's
        `loss_name` names the one to minimise. Entries may also be clu metrics, and a clu `Collection` stands for its metrics;
        the loss may be a clu `Average`. They are merged over batches, minibatches and devices, and computed on the host, so
        their `compute` must return a scalar or a dict of scalars. Give them the rows' weights as `mask`.
      per_example: (the module's output, the batch) -> arrays with the batch as dimension 0, which evaluations can write; or
        None.
      generate: (variables, batch, key) -> arrays with the batch as dimension 0, for `--mode=decode`; or None. NNX models get
        the module, in evaluation mode, as `variables`.
      logical_axis_rules: [(logical axis, mesh axis, tuple of mesh axes, or None), ...] for modules whose variables are
        annotated with logical axes. Empty: annotations name mesh axes.
      ici_mesh_shape: size of each mesh axis within a slice or host; None: one axis 'data' over all devices.
      dcn_mesh_shape: size of each mesh axis over slices or hosts; None: one slice.
      mesh_axis_names: names of the mesh axes.
      fprop_dtype: bfloat16 casts float32 parameters, and what the module is called with, before the module runs; the loss gets
        the batch as it is, and other variables keep their dtypes. None casts nothing.
    """

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
        """See `Model`."""

    @abc.abstractmethod
    def run(
        self, mdl_vars: NestedJTensor, arguments: tuple[Any, ...], key: jax.Array, *, do_eval: bool
    ) -> tuple[Any, PyTree]:
        """Calls the module. Returns its output, and the new collection 'non_trainable'."""

    @abc.abstractmethod
    def for_generate(self, mdl_vars: NestedJTensor) -> Any:
        """Returns the first argument of `generate`."""

    def forward(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, do_eval: bool, mutable: Sequence[str]
    ) -> ForwardResult:
        """See `Model`."""
        assert self.loss is not None
        arguments = jax.tree.map(self._cast, self.arguments(inputs))
        found, non_trainable = self.run(mdl_vars, arguments, key, do_eval=do_eval)
        before = mdl_vars.get(base_layer.NON_TRAINABLE, {})
        non_trainable = jax.tree_util.tree_map_with_path(outputs_lib.written, non_trainable, before)
        scalars, clu = outputs_lib.metrics(self.loss(found, inputs))
        per_example = {} if self.per_example is None else self.per_example(found, inputs)
        outputs_lib.check_per_example(per_example, inputs, "task.model.per_example")
        written = {base_layer.NON_TRAINABLE: non_trainable} if base_layer.NON_TRAINABLE in mutable else {}
        return (scalars, per_example, *([clu] if clu else [])), (written if jax.tree.leaves(non_trainable) else {})

    def decode(
        self, mdl_vars: NestedJTensor, inputs: PyTree, key: jax.Array, *, mutable: Sequence[str]
    ) -> ForwardResult:
        """See `Model`."""
        del mutable
        if self.generate is None:
            raise UserError(
                "decoding needs task.model.generate: a function (variables, batch, key) -> arrays per example"
            )
        found = self.generate(self.for_generate(mdl_vars), inputs, key)
        outputs_lib.check_per_example(found, inputs, "task.model.generate")
        if "eval_sample_weights" in inputs:  # 0 for rows that only fill a batch
            rows = jnp.sum(inputs["eval_sample_weights"].astype(jnp.float32))
        else:
            rows = jnp.asarray(outputs_lib.num_rows(inputs), jnp.float32)
        return ({"num_decoded": (rows, jnp.ones((), jnp.float32))}, found), {}

    def _cast(self, x: Any) -> Any:
        return x.astype(self.fprop_dtype) if self.fprop_dtype and x.dtype == jnp.float32 else x

    def arguments(self, batch: PyTree) -> tuple[Any, ...]:
        """Returns the module's arguments.

        Raises:
          UserError: the batch lacks an entry of this name.
        """
        if self.inputs is None:
            return (batch,)
        if callable(self.inputs):
            found = self.inputs(batch)
            return found if isinstance(found, tuple) else (found,)
        names = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        return tuple(outputs_lib.entry(batch, name, "task.model.inputs") for name in names)


def vocabulary_size(task: Any) -> int | None:
    """Returns the size of the model's vocabulary; None for a model without one.

    It is `task.model.lm_tpl.vocab_size`, or `task.model.lm_tpl.spec.vocab_size` of a `decoder`.
    """
    lm_p = getattr(task.model, "lm_tpl", None)
    vocab_size = getattr(lm_p, "vocab_size", None) or getattr(getattr(lm_p, "spec", None), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) and vocab_size else None

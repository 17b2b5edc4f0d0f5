"""muP: transfers learning rate, initialization and weight decay tuned on a narrow model, the base model, to a wide model.

    task_p.mup = Config(st.Mup, base={"MODEL_DIMS": 64, "HIDDEN_DIMS": 256, "NUM_HEADS": 4, "NUM_KV_HEADS": 4})

This is the maximal update parametrization of Yang et al. 2022 (arXiv:2203.03466), in the form of their table 3, which needs no
change of the model. The base model is the same experiment with smaller widths. A variable's fan-in (the dimensions that its
matrix product contracts) is r times that of the base model, and its fan-out (its other dimensions) c times. muP multiplies:

| variable | standard deviation | Adam's update | SGD's update |
|---|---|---|---|
| input, norm, bias (r = 1) | 1 | 1 | c |
| hidden | r ** -0.5 | 1 / r | c / r |
| output (c = 1) | 1 / r | 1 / r | 1 / r |

All three rows are one formula: standard deviation r ** -0.5 * min(1, (c / r) ** 0.5) (the spectral condition, arXiv:2310.17813);
gradients are multiplied by c before the optimizer, updates by 1 / r after it (the abcd parametrization, arXiv:2308.01814). So
the formula holds for every elementwise optimizer, and Adam's epsilon keeps its meaning. The optimizer sees variables times r,
so decoupled weight decay shrinks a variable by the fraction learning rate * decay per step at every width, as arXiv:2405.13698
recommends. Muon's matrices get an update whose spectral norm grows by (c / r) ** 0.5.

muP also changes factors inside the model: attention's 1 / sqrt(d) becomes 1 / d. The change, a ratio that is 1 in the base model,
is folded into a variable applied before the factor: the variable's initial value, updates and gradient are multiplied by it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.extend import random as extend_random
from praxis import base_hyperparams, base_layer, optimizers, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.step import masks, matrix_dims, optax_bridge
from spmd_trainer.step.product_results import Uses
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

# Prefix of the note with a variable's `Scale` in its `collections`.
_SCALE = "_mup:"
# Variables before attention's logits, whose last dimension is a head's width, and norms before a tied output matrix.
_QUERY, _FUSED_QUERY = re.compile(r"(^|/)query(_norm)?/\w+$"), re.compile(r"(^|[/_])qkv\w*(/|$)")
_LAST_NORM = re.compile(r"(^|/)(final|last|out(put)?)_?(layer_?)?(norm|ln)/|/ln_f/|/norm_f/")
# Optimizers whose updates depend on the sizes of variables, or on whole matrices.
_BY_SIZE = ("Lamb", "Lars", "DistributedShampoo", "ShardedDistributedShampoo")


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """Holds the base model's config, hidden from `repr`, so that a listing of the experiment doesn't show the model twice."""

    config: Any = dataclasses.field(repr=False)


class Mup(base_hyperparams.FiddleBaseParameterizable):  # type: ignore[misc]  # untyped
    """Settings of muP.

    Attributes:
      base: settings in which the base model differs: {class attribute of the experiment, or path like 'task.model...': value}.
      rules: (regex, form) pairs. The first pair whose regex is found in a variable's path applies. The form lists the role of
        each dimension, without those of repeated layers: 'rows' (fan-in), 'cols' (fan-out) or 'stack', such as
        'rows,rows,rows,cols' for a convolution. Other variables get their roles from the traced model.
      multipliers: (regex, power) pairs. The first pair whose regex is found in a variable's path folds the factor c ** power
        into the variable, where c is the growth of its fan-out. Factors are built in for the norm before a tied output matrix
        (power -1), for praxis' `scale_sqrt_depth`, and for queries whose heads grow in width (width growth ** -0.5).
      base_model: the base model's config; set from `base` when the experiment is resolved.
    """

    base: Mapping[str, Any] = pax_fiddle.instance_field(default_factory=dict)
    rules: Sequence[tuple[str, str]] = ()
    multipliers: Sequence[tuple[str, float]] = ()
    base_model: BaseModel | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        matrix_dims.check_rules(self.rules, "Mup", others=())
        matrix_dims.check_rules([(regex, "cols") for regex, _ in self.multipliers], "Mup.multipliers", others=())


@dataclasses.dataclass(frozen=True)
class Scale:
    """The muP factors of one variable, relative to the base model.

    Attributes:
      rows: growth factor of the fan-in, r.
      cols: growth factor of the fan-out, c.
      folded: the ratio by which muP changes a factor inside the model, folded into the variable; 1 if there is none.
      update: the factor by which the optimizer's updates are multiplied.
    """

    rows: float
    cols: float
    folded: float
    update: float

    @property
    def gradient(self) -> float:
        """The factor by which the gradient is multiplied before the optimizer gets it."""
        return self.cols * self.folded

    @property
    def std(self) -> float:
        """Ratio of the initial standard deviation to the base model's."""
        return self.folded / math.sqrt(self.rows) * min(1.0, math.sqrt(self.cols / self.rows))

    @property
    def kind(self) -> str:
        """Name of the variable's kind in the muP table, for logs, such as 'hidden' or 'output'."""
        if self.rows == 1:
            return "does not grow" if self.cols == 1 else "input or vector"
        return "output" if self.cols == 1 else "hidden"

    def __str__(self) -> str:
        folded = "" if self.folded == 1 else f", with a factor of the model, {self.folded:g}"
        return f"{self.kind}: start x {self.std:g}, update x {self.update:g}, gradient x {self.gradient:g}{folded}"


def base_task(task: SingleTask) -> SingleTask:
    """Returns a copy of the task with the base model.

    Raises:
      UserError: `task.mup.base_model` is not set, the task has adapters, or muP doesn't apply to its optimizer.
    """
    if task.mup.base_model is None:
        raise UserError(
            "task.mup.base is applied where an experiment is resolved; without an experiment, give task.mup.base_model="
            "mup.BaseModel(config of the model at the base)"
        )
    if task.lora is not None:
        raise UserError("task.mup and task.lora are both set: muP is for training from scratch; set one to None")
    learner = task.learner
    for optimizer in (learner.optimizer, *getattr(learner, "auxiliary_optimizers", ())):
        name = type(optimizer).__name__
        if name in _BY_SIZE or getattr(optimizer, "multiply_by_parameter_scale", False):
            raise UserError(
                f"task.mup: the updates of {name} depend on the sizes of variables, which muP's multipliers don't know; use e.g. "
                "Adam, SGD, Lion or st.Muon, or Adafactor with multiply_by_parameter_scale=False"
            )
    base = copy.copy(task)
    base.model, base.mup = pax_fiddle.build(task.mup.base_model.config), None
    return base


def with_scales(
    task: SingleTask, hparams: NestedWeightHParams, base: NestedWeightHParams, uses: Mapping[str, Uses]
) -> NestedWeightHParams:
    """Returns the WeightHParams, with each trainable variable's `Scale` as a string in its `collections`. Logs the scales.

    Args:
      task: the task.
      hparams, base: WeightHParams of the variables, and of the base model's variables.
      uses: how the model uses the variables, by path; see `matrix_dims.find_uses`.

    Raises:
      UserError: the base isn't this model with other widths, a variable's fan-in is unknown, or a factor can't be folded into it.
    """
    growth = _growth(dict(masks.with_paths(hparams)), dict(masks.with_paths(base)))
    powers = [*task.mup.multipliers, *_of_embeddings(task, uses, growth)]
    choices = task.learner.optimizer.choices(hparams) if task.learner.sees_stacks else {}
    scales = {}
    for path, p in masks.with_paths(hparams):
        if path not in uses:
            continue
        sides = _roles(path, p, growth[path], uses[path], task.mup.rules)
        rows, cols = (math.prod(growth[path][dim] for dim in side) for side in sides)
        folded = _folded(path, growth[path], cols, uses[path], powers)
        update = 1 / rows
        if path in choices and (matrix := choices[path].matrix) is not None:
            update = _of_matrix(task.learner.optimizer, matrix, growth[path])
        scales[path] = Scale(rows, cols, folded, folded * update)
    logging.info("muP, against the base %s:\n%s", dict(task.mup.base), table(scales))

    def known(keys: tuple[Any, ...], p: base_layer.WeightHParams) -> base_layer.WeightHParams:
        scale = scales.get(path_str(keys))
        noted = [] if scale is None else [_SCALE + ",".join(map(repr, dataclasses.astuple(scale)))]
        return dataclasses.replace(p, collections=[*p.collections, *noted])

    return jax.tree_util.tree_map_with_path(known, hparams)


def scales_of(hparams: NestedWeightHParams) -> dict[str, Scale]:
    """Returns {path: `Scale`} as `with_scales` has noted it in the WeightHParams; empty without muP."""
    return {
        path: Scale(*map(float, name.removeprefix(_SCALE).split(",")))
        for path, p in masks.with_paths(hparams)
        for name in p.collections or ()
        if name.startswith(_SCALE)
    }


def table(scales: Mapping[str, Scale]) -> str:
    """Returns text with one line for each distinct `Scale`: the number of variables, the factors, and the first path."""
    counts = Counter(map(str, scales.values()))
    first = {str(scale): path for path, scale in reversed(list(scales.items()))}
    return "\n".join(f"  {count:4} x  {text}; e.g. {first[text]}" for text, count in counts.items())


def _growth(
    hparams: Mapping[str, base_layer.WeightHParams], base: Mapping[str, base_layer.WeightHParams]
) -> dict[str, tuple[float, ...]]:
    other = sorted(hparams.keys() ^ base.keys())
    if other:
        raise UserError(f"task.mup.base: {other[0]} is not in both models; the base may differ in widths alone")
    growth = {}
    for path, p in hparams.items():
        shape, small, stacked = tuple(p.full_shape), tuple(base[path].full_shape), len(p.repeat_prefix or ())
        if len(shape) != len(small) or shape[:stacked] != small[:stacked]:
            raise UserError(
                f"task.mup.base: {path} has shape {shape}, and {small} at the base; the base may differ in widths alone, not "
                "in its number of layers"
            )
        growth[path] = tuple(n / b for n, b in zip(shape, small, strict=True))
    return growth


def _roles(
    path: str, hparams: base_layer.WeightHParams, growth: Sequence[float], use: Uses, rules: matrix_dims.Rules
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the dimensions of a variable that its matrix product contracts (fan-in), and those that it keeps (fan-out)."""
    stacked, dims = len(hparams.repeat_prefix or ()), range(len(growth))
    form = next((form for regex, form in rules if re.search(regex, path)), None)
    if form is not None:
        roles = ["stack"] * stacked + [role.strip() for role in form.split(",")]
        if len(roles) != len(growth):
            raise UserError(
                f"Mup.rules: {form!r} is for {path}, of shape {tuple(hparams.shape)}; give rows, cols or stack for each dimension"
            )
        return [dim for dim in dims if roles[dim] == "rows"], [dim for dim in dims if roles[dim] == "cols"]
    if all(factor == 1 for factor in growth):
        return (), ()
    is_lookup = use.is_lookup or "gather" in use.others
    if not is_lookup and (len(use.products) > 1 or any("conv" in name for name in use.others)):
        forms = ",".join(["rows"] * (len(hparams.shape) - 1) + ["cols"])
        raise UserError(
            f"task.mup: nothing says which dimensions of {path}, of shape {tuple(hparams.shape)}, its products sum over; add a "
            f"rule, e.g. rules=[({path!r}, {forms!r})]"
        )
    if is_lookup or not use.products:
        return (), dims
    return use.products[0].inputs, use.products[0].outputs


def _of_embeddings(
    task: SingleTask, uses: Mapping[str, Uses], growth: Mapping[str, Sequence[float]]
) -> list[tuple[str, float]]:
    """Returns (regex, power) pairs, as in `Mup.multipliers`, for praxis' embeddings and for norms before tied output matrices.
    Raises UserError if no norm is found before a tied output matrix, and `Mup.multipliers` is empty."""
    lm_p, found = getattr(task.model, "lm_tpl", None), []
    for field, name in (("softmax_tpl", "softmax"), ("separate_embedding_tpl", "embedding_lookup")):
        # Such a layer multiplies the embeddings that it looks up by the root of the width.
        if getattr(getattr(lm_p, field, None), "scale_sqrt_depth", False):
            found.append((f"(^|/){name}/.*(?<!/b)$", -0.5))
    for path, use in uses.items():
        is_lookup = use.is_lookup or "gather" in use.others
        if not is_lookup or not any(growth[path][dim] != 1 for dims in use.products for dim in dims.inputs):
            continue
        norms = [other for other in uses if _LAST_NORM.search(other)]
        if not norms and not task.mup.multipliers:
            raise UserError(
                f"task.mup: {path} is the embedding and the output matrix, so the model must divide its logits by the growth of "
                "the width. Name the scale of the norm before them, e.g. multipliers=[('last_norm/scale', -1.0)], or untie them"
            )
        looked_up = sum(power for regex, power in found if re.search(regex, path))
        found += [(f"^{re.escape(norm)}$", -1.0 - looked_up) for norm in norms]
    return found


def _folded(path: str, growth: Sequence[float], cols: float, use: Uses, powers: Sequence[tuple[str, float]]) -> float:
    power = next((power for regex, power in powers if re.search(regex, path)), None)
    if power is not None:
        return float(cols**power)
    heads = growth[-1] if growth else 1.0
    # The last dimension of a matrix [width, heads x head] doesn't show how a head's width grows.
    is_flat = any(len(dims.outputs) < 2 for dims in use.products)
    if heads != 1 and not is_flat and _FUSED_QUERY.search(path):
        raise UserError(
            f"task.mup: heads grow in width, and {path} holds queries, keys and values in one; let the number of heads grow, or "
            "give queries a variable of their own"
        )
    return float(heads**-0.5) if _QUERY.search(path) and not is_flat else 1.0


def _of_matrix(optimizer: Any, matrix: matrix_dims.Matrix, growth: Sequence[float]) -> float:
    """Returns the factor that makes the spectral norm of a matrix's update grow by sqrt(fan-out growth / fan-in growth)."""
    rows, cols = (math.prod(growth[dim] for dim in side) for side in (matrix.dims.inputs, matrix.dims.outputs))
    of_base = optimizer.size(matrix.sides[0] / rows, matrix.sides[1] / cols)
    return float(math.sqrt(cols / rows) * of_base / optimizer.size(*matrix.sides))


def grad_transformation(
    optimizer: Any, hparams: NestedWeightHParams, *, include_ema: bool = True
) -> optimizers.ShardedGradientTransformation:
    """Returns `optax_bridge.grad_transformation` of an optimizer, with muP's factors if `with_scales` has noted any.

    The optimizer sees each variable divided by its update factor; moving averages see the variables themselves.
    """
    scales = scales_of(hparams)
    if not scales:
        return optax_bridge.grad_transformation(optimizer, hparams, include_ema=include_ema)
    inner = optax_bridge.grad_transformation(optimizer, hparams, include_ema=False)

    def times(tree: PyTree, factor: Callable[[Scale], float]) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda keys, x: x * factor(scales[path]) if (path := path_str(keys)) in scales else x, tree
        )

    def init(mdl_vars: NestedJTensor) -> PyTree:
        return inner.init(times(mdl_vars, lambda scale: 1 / scale.update))

    def update(grads: NestedJTensor, state: PyTree, mdl_vars: NestedJTensor = None) -> tuple[PyTree, PyTree]:
        seen = None if mdl_vars is None else times(mdl_vars, lambda scale: 1 / scale.update)
        updates, state = inner.update(times(grads, lambda scale: scale.gradient), state, seen)
        return times(updates, lambda scale: scale.update), state

    scaled = dataclasses.replace(inner, init=init, update=update)
    if not include_ema or not optimizer.ema_decay > 0:
        return scaled
    with_ema = optimizers.sharded_chain(scaled, optimizers.apply_ema_weights(optimizer.ema_decay))
    if not optax_bridge.sees_stacks(optimizer):
        return with_ema
    # praxis' specs of moving averages are those of a single layer.
    return dataclasses.replace(
        with_ema, init_partition_spec=lambda p: optax.MaskedState(optax_bridge.derived_specs(with_ema, p))
    )


def rescaled(
    init_variables: Callable[[jax.Array], NestedJTensor],
    of_base: Callable[[jax.Array], NestedJTensor],
    hparams: NestedWeightHParams,
) -> Callable[[jax.Array], NestedJTensor]:
    """Returns an initializer whose standard deviations are those of the base model times `Scale.std`.

    The model's own initializers may depend on the width. To measure and undo this, they are called at both widths, with a PRNG
    that returns the same bits for each element.

    Args:
      init_variables: `variables_initialiser` of the task.
      of_base: `variables_initialiser` of `base_task`.
      hparams: from `with_scales`.
    """
    scales = scales_of(hparams)

    def initialise(prng_key: jax.Array) -> NestedJTensor:
        with jax.ensure_compile_time_eval():  # concrete values, although the initializer is being traced
            own, base = _typical(init_variables), _typical(of_base)

        def one(keys: tuple[Any, ...], x: jax.Array) -> jax.Array:
            path = path_str(keys)
            if path not in scales:
                return x
            scale = scales[path]
            if scale.folded != 1 and path.endswith("scale"):
                return x - (1 - scale.folded)  # a norm's scale is 1 at the start; some are stored minus 1
            growth = own[path] / base[path] if own[path] and base[path] else 1.0
            return (x * (scale.std / growth)).astype(x.dtype)

        return jax.tree_util.tree_map_with_path(one, base_layer.maybe_unbox_value(init_variables(prng_key)))

    return initialise


def _typical(init_variables: Callable[[jax.Array], NestedJTensor]) -> dict[str, float]:
    """Returns {path: first element of the variable}; all elements are initialized with the same random bits."""
    key = jax.random.key(0, impl=_SAME_BITS)

    def first() -> PyTree:
        mdl_vars = base_layer.maybe_unbox_value(init_variables(key))
        return jax.tree.map(lambda x: jnp.ravel(x)[0].astype(jnp.float32) if x.size else jnp.zeros(()), mdl_vars)

    return {path: float(x) for path, x in masks.with_paths(jax.jit(first)())}


def _same_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    del key
    # 0.84 as a uniform number, so that a normal one is about 1.
    return jnp.full(shape, 0xD7A3D7A3D7A3D7A3 >> (64 - bit_width), jnp.dtype(f"uint{bit_width}"))


_SAME_BITS = extend_random.define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros((1,), jnp.uint32),
    split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
    random_bits=_same_bits,
    fold_in=lambda key, data: key,
    name="same_bits",
    tag="sb",
)

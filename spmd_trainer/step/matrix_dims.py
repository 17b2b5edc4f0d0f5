"""Finds the variables that hold matrices, and their row, column and stack dimensions, for matrix optimizers such as Muon.

The matrix products of the traced model determine these dimensions (`matrix_uses`). The rows of a variable are the dimensions that
a product contracts; the columns are the dimensions that it keeps. All others are stack dimensions, which index matrices: repeated
layers, batch dimensions of the product, experts (dimensions paired with a router's columns), and dimensions that the program
reads one index at a time (`product_results`). Embeddings, the output matrix, routers, and variables that no product reads (norms,
biases) don't count as matrices. Routers and experts are also recognized by common names. The user's rules take precedence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from absl import logging
from praxis import base_layer

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.step import masks, matrix_uses, optax_bridge
from spmd_trainer.step.product_results import Column, MatrixDims, Uses
from spmd_trainer.train_states import NestedWeightHParams, PyTree

# (regex, form): see `MatrixOptimizer.rules`.
Rules: TypeAlias = Sequence[tuple[str, str]]
# A rule's form is this, or a list of `_ROLES`.
NO_MATRIX = "adam"
_ROLES = ("rows", "cols", "stack")
HEADS = ("joined", "apart")
# Prefixes of notes in a variable's `collections`: its dimensions as stacks/rows/columns, or why it is not a matrix.
_DIMS, _REASON = "_matrix_dims:", "_no_matrix:"
# Prefixes of more such notes: what the program leaves open, and that one dimension holds several heads.
_DOUBT, _FUSED = "_matrix_doubt:", "_fused_heads:"
OUTPUT = "the output matrix"
# Names of routers (a sigmoid alone doesn't show that a matrix is one). The published recipes leave routers to Adam.
_ROUTER = re.compile(r"(^|/)(router|gating)(/|$)|/ff_layer/gate$")
# Names of variables with experts as first dimension, which the program doesn't show if every expert computes every token.
_STACKED = re.compile(r"^(?!.*(attention|attn)).*(expert|moe)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A variable that holds one matrix or a stack of matrices.

    Attributes:
      dims: the variable's stack, row and column dimensions. The stack dimensions include those of repeated layers.
      shape: the variable's shape, including the dimensions of repeated layers.
    """

    dims: MatrixDims
    shape: tuple[int, ...]

    @property
    def sides(self) -> tuple[int, int]:
        """(number of rows, number of columns) of each matrix."""
        rows, cols = (math.prod(self.shape[dim] for dim in side) for side in (self.dims.inputs, self.dims.outputs))
        return rows, cols

    def __str__(self) -> str:
        count, (rows, cols) = math.prod(self.shape[dim] for dim in self.dims.stack), self.sides
        return f"{count} {'matrix' if count == 1 else 'matrices'} {rows} x {cols}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision whether a variable holds matrices. `matrix` is None if it holds none; `reason` explains this in logs."""

    matrix: Matrix | None
    reason: str

    def __str__(self) -> str:
        return self.reason if self.matrix is None else f"{self.matrix} ({self.reason})"


def with_uses(hparams: NestedWeightHParams, forward: Callable[[PyTree], Any]) -> NestedWeightHParams:
    """Returns the WeightHParams with notes on how the model uses each variable. They are in `collections`; `choose` reads them.

    Args:
      hparams: WeightHParams of the variables.
      forward: the model's forward pass as a function of the variables; it is traced.
    """
    uses = find_uses(hparams, forward)
    known = [
        p if path not in uses else dataclasses.replace(p, collections=[*p.collections, *_known(path, p, uses)])
        for path, p in masks.with_paths(hparams)
    ]
    return jax.tree.unflatten(jax.tree.structure(hparams), known)


def find_uses(hparams: NestedWeightHParams, forward: Callable[[PyTree], Any]) -> dict[str, Uses]:
    """Returns {path: `Uses`}: how the model uses each floating-point parameter. Arguments as for `with_uses`."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype or jnp.float32), hparams)
    jaxpr, _ = matrix_uses.traced(forward, (shapes,))
    learning = {
        number: path
        for number, (path, x) in enumerate(masks.with_paths(shapes))
        if path.startswith(f"{base_layer.PARAMS}/") and jnp.issubdtype(x.dtype, jnp.floating)
    }
    return matrix_uses.find_uses(jaxpr, learning, matrix_uses.EVERY)


def _known(path: str, hparams: base_layer.WeightHParams, uses: Mapping[str, Uses]) -> list[str]:
    """Returns notes on the use of a variable, for `collections` of its WeightHParams."""
    use = uses[path]
    reason = _why_none(path, hparams, use)
    if reason is not None:
        return [_REASON + reason]
    dims, first = use.products[0], len(hparams.repeat_prefix or ())
    stack = {dim for dim, columns in use.aligned.items() if any(_is_expert(column, uses) for column in columns)}
    stack |= use.one_by_one & set(dims.outputs[:1])
    stack |= {first} if _STACKED.search(path) else set()
    for dim in sorted(stack):
        if any(dim in side and len(side) > 1 for side in (dims.inputs, dims.outputs)):
            sides = (tuple(other for other in side if other != dim) for side in (dims.inputs, dims.outputs))
            dims = MatrixDims((*dims.stack, dim), *sides)
    found = _DIMS + "/".join(",".join(map(str, side)) for side in (dims.stack, dims.inputs, dims.outputs))
    return [found, *(note + text for note, text in _notes(path, hparams, uses, dims))]


def _notes(
    path: str, hparams: base_layer.WeightHParams, uses: Mapping[str, Uses], dims: MatrixDims
) -> Iterator[tuple[str, str]]:
    """Yields (prefix, text) for each note on a matrix: that it may be a router or a stack, or that heads share one dimension."""
    use, first = uses[path], len(hparams.repeat_prefix or ())
    if use.may_route:
        yield _DOUBT, f"{path}: a sigmoid of its products weighs whole vectors; if it is a router, ({path!r}, 'adam')"
    before = [column for dim in dims.inputs[:1] for column in use.aligned.get(dim, ()) if column[0] != path]
    if len(dims.outputs) > 1 and _is_unexplained((path, dims.outputs[0]), uses):
        side = dims.outputs
    elif len(dims.inputs) > 1 and any(_is_unexplained(column, uses) for column in before):
        side = dims.inputs
    else:
        side = ()
    if side:
        roles = {**dict.fromkeys(dims.inputs, "rows"), **dict.fromkeys(dims.outputs, "cols"), side[0]: "stack"}
        form = ",".join(roles.get(dim, "stack") for dim in range(first, len(hparams.full_shape)))
        yield (
            _DOUBT,
            f"{path}: dims {'+'.join(map(str, side))} are joined, and the program shows neither heads of attention nor experts "
            f"of a router; if dim {side[0]} counts matrices, ({path!r}, {form!r})",
        )
    has_heads = len(dims.outputs) == 1 and dims.outputs[0] in use.heads
    if has_heads or (len(dims.inputs) == 1 and any(dim in uses[other].heads for other, dim in before)):
        yield _FUSED, path


def _is_unexplained(column: Column, uses: Mapping[str, Uses]) -> bool:
    """Returns True if `column`, (path, dimension), is the first of several output dimensions, and its meaning is unclear."""
    path, dim = column
    use = uses[path]
    if len(use.products) != 1 or len(use.products[0].outputs) < 2 or use.products[0].outputs[0] != dim:
        return False
    paired = use.aligned.get(dim, set())
    if any(_is_expert(other, uses) for other in paired):
        return False
    # If a gate multiplies the output of heads, the program shows what the gate's columns are, too.
    is_shown = any(other_dim in uses[other].heads | uses[other].elsewhere for other, other_dim in (column, *paired))
    return not is_shown or any(uses[other].may_route for other, _ in paired)


def _is_expert(column: Column, uses: Mapping[str, Uses]) -> bool:
    """Returns True if `column`, (path, dimension), indexes experts, because it is an output dimension of a router."""
    path, dim = column
    use = uses[path]
    return (use.routes or bool(_ROUTER.search(path))) and any(dim in kind.outputs for kind in use.products)


def _why_none(path: str, hparams: base_layer.WeightHParams, use: Uses) -> str | None:
    others = ", ".join(use.others)
    if not use.products:
        if len(hparams.shape) < 2:
            return "a vector"
        return "an embedding" if "gather" in use.others else f"read by no product, but by {others or 'nothing'}"
    if use.is_lookup or "gather" in use.others:
        return "an embedding"
    if len(use.products) > 1:
        return "products read it over different dimensions"
    if not use.is_read_on:
        return OUTPUT
    if use.others:
        return f"read by products, and by {others}"
    if use.routes:
        return "a router: a softmax or top_k reads its products"
    if _ROUTER.search(path):
        return "a router by its name"
    dims, shape = use.products[0], hparams.full_shape
    if any(math.prod(shape[dim] for dim in side) == 1 for side in (dims.inputs, dims.outputs)):
        return "a vector"
    return None


def choose(hparams: NestedWeightHParams, rules: Rules, heads: str, owner: str) -> dict[str, Choice]:
    """Returns {path: `Choice`}: whether each variable holds matrices, and its row, column and stack dimensions.

    Args:
      hparams: WeightHParams of the variables, with notes about their use in the model's program, which `with_uses` adds. Without
        these notes, trained variables of rank 2 are matrices.
      rules: (regex, form) pairs with forms such as 'stack,rows,cols'; see `MatrixOptimizer.rules`. The first pair whose regex is
        found in a variable's path applies.
      heads: 'joined': all attention heads of a variable are in one matrix; 'apart': each head is a separate matrix.
      owner: the optimizer's name, for messages.

    Raises:
      UserError: a rule doesn't fit its variable, or a variable of rank 3 or more has neither a rule nor notes from `with_uses`.
    """
    return {path: _choice(path, p, rules, heads, owner) for path, p in masks.with_paths(hparams)}


def _choice(path: str, hparams: base_layer.WeightHParams, rules: Rules, heads: str, owner: str) -> Choice:
    shape = tuple(hparams.full_shape)
    for number, (regex, form) in enumerate(rules, start=1):
        if re.search(regex, path):
            dims = None if form == NO_MATRIX else _of_form(path, hparams, f"{owner}.rules: rule {number}", form)
            return Choice(None if dims is None else Matrix(dims, shape), f"rule {number}")
    known = next((name for name in hparams.collections if name.startswith((_DIMS, _REASON))), None)
    if known is None:
        return _unknown(path, hparams, owner)
    if known.startswith(_REASON):
        return Choice(None, known.removeprefix(_REASON))
    stack, rows, cols = (
        tuple(map(int, side.split(","))) if side else () for side in known.removeprefix(_DIMS).split("/")
    )
    if heads == "apart":
        # If a side has several dimensions, the first counts heads, and the others belong to one head.
        apart = tuple(side[0] for side in (rows, cols) if len(side) > 1)
        stack = (*stack, *apart)
        rows, cols = (tuple(dim for dim in side if dim not in apart) for side in (rows, cols))
    return Choice(Matrix(MatrixDims(stack, rows, cols), shape), _names(rows, cols))


def _names(rows: Sequence[int], cols: Sequence[int]) -> str:
    return " x ".join(f"dim{'s' if len(side) > 1 else ''} {'+'.join(map(str, side))}" for side in (rows, cols))


def _unknown(path: str, hparams: base_layer.WeightHParams, owner: str) -> Choice:
    repeats, rank = len(hparams.repeat_prefix or ()), len(hparams.shape)
    shape = tuple(hparams.full_shape)
    if base_layer.var_not_trainable(hparams):
        return Choice(None, "it does not learn")
    if rank > 2:
        raise UserError(
            f"{owner}: nothing says which dimensions of {path}, of shape {shape}, are rows and columns; add a rule, e.g. "
            f"rules=[({path!r}, 'stack,{'rows,' * (rank - 2)}cols')], or ({path!r}, 'adam')"
        )
    if rank < 2:
        return Choice(None, "a vector")
    dims = MatrixDims(tuple(range(repeats)), (repeats,), (repeats + 1,))
    return Choice(Matrix(dims, shape), "of two dimensions")


def _of_form(path: str, hparams: base_layer.WeightHParams, rule: str, form: str) -> MatrixDims:
    repeats, roles = len(hparams.repeat_prefix or ()), [role.strip() for role in form.split(",")]
    if len(roles) != len(hparams.shape):
        repeated = f", without the {repeats} of its repeated layers" if repeats else ""
        raise UserError(
            f"{rule} gives {form!r} to {path}, of shape {tuple(hparams.shape)}{repeated}; give one of "
            f"{_ROLES} for each of its {len(hparams.shape)} dimensions, or {NO_MATRIX!r}"
        )
    found = MatrixDims(
        (*range(repeats), *(repeats + dim for dim, role in enumerate(roles) if role == "stack")),
        *(tuple(repeats + dim for dim, role in enumerate(roles) if role == side) for side in ("rows", "cols")),
    )
    if not found.inputs or not found.outputs:
        raise UserError(f"{rule} gives {form!r} to {path}; a matrix has both rows and cols")
    return found


def check_rules(rules: Rules, owner: str, others: Sequence[str] = (NO_MATRIX,)) -> None:
    """Checks the syntax of matrix rules; needs no variables.

    Args:
      rules: (regex, form) pairs. A form lists a role for each dimension, such as 'stack,rows,cols'.
      owner: the name of the field that holds the rules, for messages.
      others: forms that are allowed besides such lists of roles.

    Raises:
      UserError: a rule is not a (regex, form) pair, its regex doesn't compile, or its form has an unknown role.
    """
    known = " or ".join([*map(repr, others), f"a list of {_ROLES}"])
    for number, rule in enumerate(rules, start=1):
        if not isinstance(rule, list | tuple) or len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            raise UserError(
                f"{owner}: rule {number} is {rule!r}; give (regex, form), e.g. ('emb', {[*others, 'cols'][0]!r})"
            )
        try:
            re.compile(rule[0])
        except re.error as error:
            raise UserError(f"{owner}: rule {number}, {rule[0]!r}, doesn't compile: {error}") from error
        for role in [] if rule[1] in others else rule[1].split(","):
            if role.strip() not in _ROLES:
                meant = did_you_mean(role.strip(), (*_ROLES, *others))
                raise UserError(f"{owner}: rule {number} has the form {rule[1]!r}; give {known}{meant}")


@functools.lru_cache(maxsize=16)
def _log_table(name: str, text: str) -> None:
    """Logs a table of matrices only once, although a search for a mesh computes the same table for each candidate mesh."""
    logging.info("%s computes on these matrices, and leaves the rest to Adam:\n%s", name, text)


def log_choices(optimizer: Any, hparams: NestedWeightHParams) -> dict[str, str]:
    """Logs which variables a `MatrixOptimizer` treats as matrices, and warns of ambiguous variables and unused rules.

    Returns:
      {'/m/PATH': text of the `Choice`} for each variable's path PATH. In the optimizer state, the path of the variable's first
      moment ends with '/m/PATH'.

    Raises:
      UserError: no variable is a matrix; also the errors of `choose`.
    """
    name, choices = type(optimizer).__name__, optimizer.choices(hparams)
    text = table(choices)
    if not any(choice.matrix for choice in choices.values()):
        raise UserError(
            f"{name} finds no matrix among the variables that learn:\n{text}\nUse Adam, or say with rules what is a matrix, e.g. "
            f"rules=[({next(iter(choices))!r}, 'rows,cols')]"
        )
    _log_table(name, text + optimizer.notes(choices))
    for number, (regex, _) in enumerate(optimizer.rules, start=1):
        if not any(re.search(regex, path) for path in choices):
            logging.warning("%s.rules: rule %d (%r) matches no variable that learns", name, number, regex)
    _warn_of_doubts(name, choices, hparams, optimizer.heads)
    return {
        f"/m/{path}": f"{name}: {choice}" if choice.matrix else f"Adam: {choice.reason}"
        for path, choice in choices.items()
    }


def _warn_of_doubts(name: str, choices: Mapping[str, Choice], hparams: NestedWeightHParams, heads: str) -> None:
    by_program = [p for path, p in masks.with_paths(hparams) if not choices[path].reason.startswith("rule ")]
    notes = [note for p in by_program for note in p.collections]
    if doubts := [note.removeprefix(_DOUBT) for note in notes if note.startswith(_DOUBT)]:
        logging.warning(
            "%s: the program doesn't show what these are; say it with rules=[...]:\n  %s", name, "\n  ".join(doubts)
        )
    fused = [note.removeprefix(_FUSED) for note in notes if note.startswith(_FUSED)]
    if heads == "apart" and fused:
        logging.warning(
            "%s.heads='apart' leaves these variables whole, because one dimension holds all heads and their columns: %s",
            name,
            ", ".join(fused),
        )


def has_optax_muon(opt_states: PyTree) -> bool:
    """Returns True if an optimizer state contains a state of `optax.contrib.muon`."""
    return any(map(_is_muon, jax.tree.leaves(opt_states, is_leaf=_is_muon)))


def _is_muon(node: Any) -> bool:
    return isinstance(node, optax.contrib.MuonState)


def check_optax_muon(hparams: NestedWeightHParams, opt_states: PyTree) -> None:
    """Checks that `optax.contrib.muon`, which treats all variables with two dimensions as matrices, finds the model's matrices.

    Checks nothing if the user gave Muon dimension numbers, i.e. if Muon updates a variable that doesn't have two dimensions.

    Args:
      hparams: WeightHParams of the variables with an optimizer state, from `with_uses`.
      opt_states: shapes of the optimizer's state.

    Raises:
      UserError: Muon treats a variable as a matrix that is not one, or omits a matrix because it is stacked or has heads.
    """
    variables = dict(jax.tree_util.tree_leaves_with_path(hparams))
    moments = [node.mu for node in jax.tree.leaves(opt_states, is_leaf=_is_muon) if _is_muon(node)]
    taken = {optax_bridge.variable_of(path, variables) for path, _ in jax.tree_util.tree_leaves_with_path(moments)}
    wrong = []
    for path, p in variables.items():
        choice = _choice(path_str(path), p, (), HEADS[0], "optax.contrib.muon")
        if path in taken and len(p.shape) != 2:
            return
        if path in taken and choice.matrix is None and choice.reason != OUTPUT:
            wrong.append(f"{path_str(path)} gets Muon and is none: {choice}")
        elif path not in taken and choice.matrix is not None:
            wrong.append(f"{path_str(path)} gets Adam and has {choice}")
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(
            "optax.contrib.muon takes every variable of two dimensions for a matrix, and no other: "
            f"{'; '.join(wrong[:5])}{more}. Use learner.optimizer = Config(st.Muon, learning_rate=..., "
            "lr_schedule=Config(schedules.Constant, value=1.0)), which knows stacks and heads, or give "
            "muon_weight_dimension_numbers"
        )


def table(choices: Mapping[str, Choice]) -> str:
    """Returns the choices as text. Variables with the same choice share a line if their paths differ only in numbers."""
    kinds = Counter((re.sub(r"\d+(?=/|$)", "*", path), str(choice)) for path, choice in choices.items())
    width = max((len(path) for path, _ in kinds), default=0)
    return "\n".join(f"  {path:{width}}  {count:3} x  {text}" for (path, text), count in kinds.items())

"""Maps adapter variables to PEFT tensors.

For a weight [out, in] of the base model and rank r, PEFT has the tensors `lora_A.weight` [r, in], `lora_B.weight` [out, r] and,
with DoRA, `lora_magnitude_vector` [out]. In this package, the weight is [stack..., in..., out...], and the adapter variables
are a [stack..., in..., r], b [stack..., r, out...] and magnitude [stack..., out...].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from spmd_trainer.decoder.lora import MatrixDims
from spmd_trainer.hf.errors import HfMismatchError
from spmd_trainer.hf.families.family import ROOT
from spmd_trainer.hf.tensor_names import Group, Piece, Variable

PREFIX = "base_model.model."
_WEIGHT = ".weight"
# The letter of the rank, which `families.family` does not use.
_RANK = "y"
_ADAPTERS, _BASE = "mdl_vars/params/lora/", "mdl_vars/params/"


@dataclasses.dataclass(frozen=True)
class Slot:
    """Position of one of several adapters in a variable that stacks them along its first dimension.

    Attributes:
      index: index of the adapter.
      count: number of adapters.
    """

    index: int
    count: int


def base_path(path: str) -> tuple[str, str]:
    """Splits an adapter variable's path into the path of the weight that it adapts, and its name: 'a', 'b' or 'magnitude'."""
    weight, _, part = path.removeprefix(_ADAPTERS).rpartition("/")
    return _BASE + weight, part


def variables_of(
    paths: Iterable[str],
    base: Mapping[str, Variable],
    dims: Mapping[str, MatrixDims],
    rank: int,
    *,
    slot: Slot | None = None,
    prefix: str = "",
) -> dict[str, Variable]:
    """Returns the adapter variables by path, each with the PEFT tensors that hold it.

    Args:
      paths: paths of the adapter variables in the train state.
      base: the base model's variables with their tensors, see `hf.tensor_names.variables_of`.
      dims: {'params/...': the stack, input and output dimensions of a base variable}.
      rank: the adapters' rank.
      slot: position of the adapter among several; None for a single adapter.
      prefix: prefix to add to the tensor names.

    Raises:
      HfMismatchError: PEFT has no tensors for an adapter.
    """
    found = {}
    for path in paths:
        weight, part = base_path(path)
        if weight not in base:
            raise HfMismatchError(f"{path}: PEFT's format only has adapters for the decoder below {ROOT} alone")
        variable = base[weight]
        weight_dims = dims[weight.removeprefix("mdl_vars/")]
        pieces = tuple(_piece(path, part, piece, weight_dims, rank, slot, prefix) for piece in variable.pieces)
        stack = variable.shape[: len(variable.pieces[0].leading)]
        counts = () if slot is None else (slot.count,)
        sizes = tuple(pieces[0].sizes[letter] for letter in pieces[0].order)
        found[path] = Variable(path, (*counts, *stack, *sizes), pieces)
    return found


def modules_of(variables: Iterable[Variable], every: Iterable[Variable]) -> list[str]:
    """Returns PEFT's `target_modules`: a short name, e.g. 'q_proj', if all modules of this name have adapters, else full names.

    Args:
      variables: the adapter variables.
      every: all variables of the base model.
    """
    adapted = {module_of(piece.name) for variable in variables for piece in variable.pieces}
    others = {piece.name.removesuffix(_WEIGHT) for variable in every for piece in variable.pieces} - adapted
    kept = {name.rpartition(".")[2] for name in others}
    return sorted({name if (last := name.rpartition(".")[2]) in kept else last for name in adapted})


def module_of(name: str) -> str:
    """Returns the name of the base model's module that the adapter tensor `name` belongs to."""
    return name[name.index(PREFIX) + len(PREFIX) :].rpartition(".lora_")[0]


def is_transposed(variables: Iterable[Variable], base: Mapping[str, Variable]) -> bool:
    """Returns True if the base model's weights that have adapters are [in, out], as in transformers' Conv1D."""
    for variable in variables:
        weight, part = base_path(variable.path)
        if part == "a":
            return base[weight].pieces[0].groups[0] == variable.pieces[0].groups[1]
    return False


def _piece(path: str, part: str, weight: Piece, dims: MatrixDims, rank: int, slot: Slot | None, prefix: str) -> Piece:
    depth = len(weight.leading)
    _check(path, weight, dims)
    inputs = tuple(weight.order[dim - depth] for dim in dims.inputs)
    outputs = tuple(weight.order[dim - depth] for dim in dims.outputs)
    group = {frozenset(group.outer): group for group in weight.groups}
    into, out = group.get(frozenset(inputs)), group.get(frozenset(outputs))
    if into is None or out is None:
        raise HfMismatchError(
            f"{path}: {weight.name} is no matrix of the inputs and outputs that the model uses it with"
        )
    groups, order, name = {
        "a": ((Group((_RANK,)), into), (*inputs, _RANK), "lora_A.weight"),
        "b": ((out, Group((_RANK,))), (_RANK, *outputs), "lora_B.weight"),
        "magnitude": ((out,), outputs, "lora_magnitude_vector"),
    }[part]
    leading = weight.leading if slot is None else (slot.index, *weight.leading)
    full_name = f"{prefix}{PREFIX}{weight.name.removesuffix(_WEIGHT)}.{name}"
    return Piece(full_name, leading, groups, order, {**weight.sizes, _RANK: rank})


def _check(path: str, weight: Piece, dims: MatrixDims) -> None:
    if "/moe/" in path:
        raise HfMismatchError(
            f"{path}: transformers keeps the experts of a layer, and their router, as parameters without a module of their own, "
            "for which PEFT has no such adapters. Merge the adapters into the base instead (--mode=export without "
            "--export_adapter), or choose other task.lora.targets"
        )
    if weight.is_fused:
        raise HfMismatchError(
            f"{path}: transformers keeps several matrices in one tensor ({weight.name}), for which PEFT has one pair of "
            "adapters; here each has separate adapters. Merge the adapters into the base instead (--mode=export without "
            "--export_adapter), or choose other task.lora.targets"
        )
    if dims.stack != tuple(range(len(weight.leading))):
        raise HfMismatchError(
            f"{path}: the model multiplies {weight.name} in batches, which PEFT's adapters don't support"
        )
